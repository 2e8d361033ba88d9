"""Token ids to text, one token at a time.

Every token stands for bytes, and the bytes of a token do not depend on its neighbours (but for the leading space that
sentencepiece-style decoders drop at the very start of a text). So a row's stream is these bytes through an incremental
UTF-8 decoder: constant work per token, nothing is ever decoded twice, and what is held back is at most one unfinished
character. Bytes that can never become a character are given out as U+FFFD as soon as that is certain.

Not here: the stop rules (`engine/stop_strings.py`) and finding the tokenizer (`engine/text.py`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from engine.text import Text

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE vocabularies write for each byte (the GPT-2 table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes each token id stands for; one object a tokenizer, shared by all rows.

    Ids beyond the tokenizer (padded vocabulary rows) stand for nothing. *Source*: the byte table is the one of GPT-2.
    """

    def __init__(self, tokenizer: Tokenizer):
        from tokenizers import decoders

        self._tokenizer = tokenizer
        self.is_byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self.special_ids = frozenset(i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        self._alphabet = _byte_alphabet()
        self._known: dict[int, bytes] = {}
        self._anchor, self._anchor_text = (None, "") if self.is_byte_level else self._find_anchor()

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of `token_id` in the middle of a text, special tokens included."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def at_start(self, token_id: int) -> bytes:
        """Bytes of `token_id` as the first token of a text: some decoders drop one leading space there."""
        if self.is_byte_level:
            return self[token_id]
        byte = self._byte_of(token_id)
        if byte is not None and not byte.isascii():  # part of a character cannot be decoded alone
            return byte
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            # Added tokens may hold other characters; the tokenizer's own decoder then takes them as they are.
            codes = [self._alphabet.get(char) for char in token]
            return token.encode() if None in codes else bytes(codes)
        byte = self._byte_of(token_id)
        if byte is not None:
            return byte
        pair = self._tokenizer.decode([self._anchor, token_id], skip_special_tokens=False)
        return pair[len(self._anchor_text) :].encode()

    def _byte_of(self, token_id: int) -> bytes | None:
        """The byte of a byte-fallback token such as `<0xE4>`, None for other tokens."""
        match = _BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")
        return bytes([int(match.group(1), 16)]) if match else None

    def _find_anchor(self) -> tuple[int, str]:
        """A plain token to put before another one, so that the other is not at the start of a text."""
        for token_id in self._tokenizer.encode("a", add_special_tokens=False).ids:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            if text and token_id not in self.special_ids:
                return token_id, text
        raise ValueError("the tokenizer has no token for the letter a")


class Detokenizer:
    """The text of one row, as its tokens arrive.

    `context`: ids that come before the first pushed token (the prompt, or its last few tokens); none means that the row
    starts a text. `skip_special_tokens`: special tokens add nothing. For a byte-level tokenizer all the text given out,
    with that of `flush`, equals the tokenizer's own decoding of all pushed ids, whatever the ids. For byte-fallback
    tokenizers this holds for valid UTF-8; malformed bytes give one U+FFFD a broken character here, one a byte there.
    """

    def __init__(self, text: Text, skip_special_tokens: bool = True, context: Iterable[int] = ()):
        self._bytes = text.token_bytes
        self._skipped = self._bytes.special_ids if skip_special_tokens else frozenset()
        self._has_started = any(self._bytes[token_id] for token_id in context if token_id not in self._skipped)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; empty while it ends inside a character."""
        if token_id in self._skipped:
            return ""
        piece = self._bytes[token_id]
        if not self._has_started and piece:
            self._has_started = True
            piece = self._bytes.at_start(token_id)
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """End of the row: an unfinished character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)
