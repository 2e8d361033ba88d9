"""The tokenizer of a model folder: text to ids and back, special tokens, stop ids.

Only local files are read, never a hub, and no code from the model folder runs. transformers is imported on the first
load, so that this module is cheap to import. One process, one thread: the tokenizer is not locked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.chat_template import ChatTemplate, TextError, encode_ids
from engine.detokenizer import TokenBytes
from launch.errors import ModelError

__all__ = ["Text", "TextError"]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class Text:
    """All that the engine knows about text. Made by `load`.

    `vocab_size`: number of tokens of the tokenizer, not of the model's padded vocabulary. `special_ids`: ids of special
    tokens. `token_bytes[id]`: the bytes that a token stands for.
    """

    def __init__(self, tokenizer: Any):
        """`tokenizer`: a fast transformers tokenizer."""
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # tokenizer.json may ask for both, and prompts must stay what they are
        self._backend.no_padding()
        self.token_bytes = TokenBytes(self._backend)
        self.special_ids = self.token_bytes.special_ids
        self._specials = {self._backend.id_to_token(i): i for i in sorted(self.special_ids)}
        self.chat_template = ChatTemplate(tokenizer, self._specials)

    @classmethod
    def load(cls, folder: str | Path) -> Text:
        """The tokenizer in `folder`. *Raises* ModelError naming `folder` if that is missing, broken or too old."""
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"there is no model folder {folder}")
        if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError(
                f"{folder} holds no tokenizer ({', '.join(_TOKENIZER_FILES)}); copy it from the original model"
            )
        tokenizer = _load_tokenizer(folder)
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer in {folder} has no fast form; convert it to a tokenizer.json with transformers"
            )
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template.exists

    def encode(self, prompt: str) -> list[int]:
        """Ids of a raw prompt. Special tokens written in it are special; BOS is added only if the tokenizer adds it.

        *Raises* TextError `bad_text` for text that is not valid Unicode.
        """
        return encode_ids(self._backend, prompt, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping], continue_final: bool = False) -> list[int]:
        """Ids of a conversation by the model's own template; see `ChatTemplate.encode`."""
        return self.chat_template.encode(messages, continue_final)

    def render_chat(self, messages: Sequence[Mapping], continue_final: bool = False) -> str:
        """The conversation as the template writes it, for people to read. Not to be encoded: use `encode_chat`."""
        return self.chat_template.render(messages, continue_final)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, with no clean-up of spaces. Ids beyond the tokenizer stand for nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def eos_ids(self, *sources: int | Iterable[int] | None) -> tuple[int, ...]:
        """The ids that end an answer, sorted: the union of `sources`, the tokenizer's EOS and the template's turn end.

        `sources`: the EOS fields of config.json and generation_config.json (an id, a list, or None). Checkpoints
        often disagree about EOS, and a chat model that is stopped by none of them goes on for ever; the union costs
        nothing, as no answer holds these tokens in its middle.
        """
        ids = {self._tokenizer.eos_token_id, self.chat_template.turn_end_id}
        for source in sources:
            ids.update(source if isinstance(source, Iterable) else [source])
        return tuple(sorted(ids - {None}))

    def token_id(self, text: str) -> int | None:
        """The id of the special token written exactly `text`, None if there is none."""
        return self._specials.get(text)

    def split_stops(self, stops: Iterable[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Stop strings to look for in the text, and the ids of those that are special tokens, never part of it."""
        stops = tuple(dict.fromkeys(stops))
        strings = tuple(stop for stop in stops if stop not in self._specials)
        return strings, tuple(self._specials[stop] for stop in stops if stop in self._specials)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary (every id with its token, and which are special), in hex.

        Equal for two models exactly if an id means the same to both, which is what a draft and a target must share. How
        text is split into ids is left out: only one of the two ever does that.
        """
        vocabulary = sorted((token_id, token) for token, token_id in self._backend.get_vocab().items())
        content = json.dumps([vocabulary, sorted(self.special_ids)], ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()


def _load_tokenizer(folder: Path) -> Any:
    """The one call into transformers. A broken file can raise anything there, down to the Rust library's own errors."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ModelError(f"the tokenizer in {folder} cannot be read: {reason}") from error
