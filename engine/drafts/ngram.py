"""Prompt lookup: what followed the last time the row said this. No second model; strong where an answer copies its prompt.

*Source*: Saxena, "Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.drafts.speculation import DraftRow

LONGEST = 4  # tokens of context to look for; a longer match is rarer and hardly better


@dataclass(eq=False)
class NgramIndex:
    """For every n-gram of a row (n = 1 .. `LONGEST`) where its latest occurrence ends, the end of the row left out.

    *Cost*: `LONGEST` dictionary entries a token, some 0.7 kB, and as many look-ups.
    """

    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0

    def grow(self, token_ids: list[int]) -> None:
        """Take in the n-grams that have a successor by now; each is seen once."""
        for end in range(self.num_indexed + 1, len(token_ids)):
            for length in range(1, min(LONGEST, end) + 1):
                self.ends[tuple(token_ids[end - length : end])] = end
        self.num_indexed = max(self.num_indexed, len(token_ids) - 1)

    def successor(self, token_ids: list[int]) -> int | None:
        """Index of the token after the latest earlier occurrence of the longest known end of `token_ids`."""
        for length in range(min(LONGEST, len(token_ids)), 0, -1):
            end = self.ends.get(tuple(token_ids[-length:]))
            if end is not None:
                return end
        return None


class NgramDrafter:
    """`Drafter` that copies from the row itself."""

    def __init__(self) -> None:
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        return [self._propose(row) for row in rows]

    def drop(self, seq_id: int) -> None:
        self._indices.pop(seq_id, None)

    def _propose(self, row: DraftRow) -> list[int]:
        index = self._indices.setdefault(row.seq_id, NgramIndex())
        index.grow(row.token_ids)
        start = index.successor(row.token_ids)
        if start is None:
            return []
        # A copy that reaches the end of the row goes on in what it has copied: a row that repeats itself keeps doing so.
        period = len(row.token_ids) - start
        return [row.token_ids[start + offset % period] for offset in range(row.num_wanted)]
