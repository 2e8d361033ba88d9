"""Text for a model that has no tokenizer (`--load-format dummy` with a named shape): one id a byte.

Good for feeding a shape something and for seeing that it answers; what it answers is noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.chat_template import TextError

NUM_BYTES = 256


class ByteTokens:
    """Bytes of an id: itself below 256, a visible mark above."""

    special_ids: frozenset[int] = frozenset()

    def __getitem__(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < NUM_BYTES else f"<{token_id}>".encode()


class ByteText:
    """Same methods as `engine.text.Text`, as far as a model without a tokenizer can have them."""

    has_chat_template = False
    special_ids: frozenset[int] = frozenset()
    fingerprint = "bytes"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.token_bytes = ByteTokens()

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode("utf-8", errors="replace"))

    def encode_chat(self, messages: Sequence[Mapping], continue_final: bool = False) -> list[int]:
        raise TextError("no_chat_template", "a model without a tokenizer has no chat template; use a plain prompt with --raw")

    def render_chat(self, messages: Sequence[Mapping], continue_final: bool = False) -> str:
        raise TextError("no_chat_template", "a model without a tokenizer has no chat template; use a plain prompt with --raw")

    def eos_ids(self, *sources: int | Iterable[int] | None) -> tuple[int, ...]:
        ids: set[int | None] = set()
        for source in sources:
            ids.update(source if isinstance(source, Iterable) else [source])
        return tuple(sorted(ids - {None}))

    def token_id(self, text: str) -> int | None:
        return None

    def split_stops(self, stops: Iterable[str]) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(dict.fromkeys(stops)), ()
