"""The model's own chat template, applied so that nobody can forge a turn.

A template writes markers such as `<|im_start|>` around what people said. If a message itself holds the text of a
marker, a plain tokenizer call turns it into the control token, and a user speaks as the system. Here markers in
messages become ordinary characters while the template's own stay special. Messages without such text give exactly the
ids that transformers' `apply_chat_template` gives.

There is no built-in template: a model folder without one cannot chat, and says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from engine.refused import Refused

# Unicode planes 15 and 16: private-use characters, which no text means anything by.
_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class TextError(Refused):
    """One row's text cannot be turned into ids. `code` is a fixed word for programs, the message is for people."""


class ChatTemplate:
    """`tokenizer`: a fast transformers tokenizer; `specials`: its special tokens, text to id."""

    def __init__(self, tokenizer: Any, specials: Mapping[str, int]):
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._special_ids = frozenset(specials.values())
        self._marker = _any_of(specials)

    @property
    def exists(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def render(self, messages: Sequence[Mapping], continue_final: bool = False) -> str:
        """The prompt as text, as the template writes it; for people to read. See `encode` for the arguments."""
        return self._render(_plain_messages(messages), continue_final)

    def encode(self, messages: Sequence[Mapping], continue_final: bool = False) -> list[int]:
        """Token ids of `messages`, ready for the assistant's answer.

        `messages`: mappings with `role` and `content` (a string, or text parts, which are joined by line breaks).
        `continue_final`: the last message is the assistant's and unfinished; the answer goes on from its last
        character. *Raises* TextError: `no_chat_template`, `bad_messages`, `chat_template_failed`, `bad_text`.
        """
        messages = _plain_messages(messages)
        markers = sorted({found for text in _strings(messages) for found in self._find_markers(text)})
        if not markers:
            return encode_ids(self._backend, self._render(messages, continue_final))
        disguise = dict(zip(markers, _unused_characters(messages, len(markers))))
        hidden = _map_strings(messages, lambda text: self._marker.sub(lambda found: disguise[found.group()], text))
        return self._encode_hidden(self._render(hidden, continue_final), disguise)

    def _encode_hidden(self, rendered: str, disguise: Mapping[str, str]) -> list[int]:
        """Ids of `rendered`, whose only markers are the template's; those of the messages come back as plain text."""
        revealed = str.maketrans({character: marker for marker, character in disguise.items()})
        encoding = self._backend.encode(rendered, add_special_tokens=False)
        ids, done = [], 0
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets):
            if token_id in self._special_ids:
                ids += self._encode_plain(rendered[done:start].translate(revealed))
                ids.append(token_id)
                done = end
        return ids + self._encode_plain(rendered[done:].translate(revealed))

    def _encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with no special token among them."""
        self._backend.encode_special_tokens = True  # the tokenizers library's word for "encode them as plain text"
        try:
            return encode_ids(self._backend, text)
        finally:
            self._backend.encode_special_tokens = False

    def _render(self, messages: list[dict], continue_final: bool) -> str:
        if not self.exists:
            raise TextError(
                "no_chat_template",
                "this model has no chat template, so it cannot take messages; give a plain prompt, or use a chat model",
            )
        if continue_final and messages[-1]["role"] != "assistant":
            raise TextError("bad_messages", "only a last message of the assistant can be continued")
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
            )
        except Exception as error:  # a template is a program from the model folder: it can fail in any way
            raise TextError("chat_template_failed", f"the chat template refused the messages: {error}") from error

    @cached_property
    def turn_end_id(self) -> int | None:
        """The special token that the template writes after an assistant's answer; None if it writes none."""
        answer = "turn end probe"
        talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            rendered = self._tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=False)
        except Exception:  # no template, or one that wants other messages: then nothing is known about its turns
            return None
        _, _, after = rendered.rpartition(answer)
        marker = self._marker.match(after.lstrip()) if self._marker else None
        return self._backend.token_to_id(marker.group()) if marker else None

    def _find_markers(self, text: str) -> list[str]:
        return self._marker.findall(text) if self._marker else []


def encode_ids(backend: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Token ids of `text`. *Raises* TextError `bad_text` for text that is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            "bad_text", f"the text is not valid Unicode: character {error.start} is one half of a surrogate pair"
        ) from None
    return backend.encode(text, add_special_tokens=add_special_tokens).ids


def _any_of(markers: Mapping[str, int]) -> re.Pattern | None:
    """Finds any of `markers`, the longest first, as the tokenizer does."""
    ordered = sorted((marker for marker in markers if marker), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _plain_messages(messages: Sequence[Mapping]) -> list[dict]:
    """Checked copies of `messages`. Text parts are joined here, so that no seam can make a marker of two halves."""
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise TextError("bad_messages", "messages must be a list with at least one message")
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TextError("bad_messages", f"message {number} must be an object with a role and a content")
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = "\n".join(_part_text(part, number) for part in content)
        elif content is not None and not isinstance(content, str):
            raise TextError("bad_messages", f"the content of message {number} must be text")
        plain.append({**message, "content": content})
    return plain


def _part_text(part: Any, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise TextError("bad_messages", f"message {number} has a part of type {kind!r}; only text is understood")


def _strings(value: Any) -> list[str]:
    """All strings in a structure of lists and mappings, keys left out: those are the template's vocabulary."""
    found: list[str] = []
    _map_strings(value, lambda text: found.append(text) or text)
    return found


def _map_strings(value: Any, change: Any) -> Any:
    """A copy of `value` with every string in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_characters(messages: list[dict], count: int) -> list[str]:
    """`count` private-use characters that no message holds."""
    used = set().union(*_strings(messages))
    free = (chr(code) for block in _PRIVATE_USE for code in block if chr(code) not in used)
    characters = [character for character, _ in zip(free, range(count))]
    if len(characters) < count:
        raise TextError("bad_text", "the messages use all private-use characters of Unicode and special tokens as well")
    return characters
