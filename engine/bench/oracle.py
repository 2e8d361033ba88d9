"""A drafter that knows the answers: speculation at an acceptance that is set, since random weights have none of their own."""

from __future__ import annotations

from collections.abc import Sequence as Ids

import torch

from engine.graph.row_state import SpeculativeRows
from engine.graph.speculative_step import DeviceDrafter
from engine.sequence import Sequence

_COIN_BITS = 20
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, odd, as a signed 64-bit number


class OracleDrafts:
    """`DeviceDrafter` that proposes the right token with probability `rate`, else another one.

    The right tokens are those of `answers`, prompt and output of each row, whose prompts are all different; behind the end of an
    answer nothing is right. Whether a guess is right is a hash of its row and position, so all ranks guess alike. `inner`: a
    drafter that is run for the time that it takes; what it proposes is not used.
    """

    def __init__(
        self, rate: float, num_ids: int, max_rows: int, max_tokens: int, device: torch.device, inner: DeviceDrafter | None
    ):
        self.rate, self._num_ids, self._inner = rate, num_ids, inner
        self.answers: list[Ids[int]] = []
        self._right = torch.full((max_rows, max_tokens + 1), -1, dtype=torch.int64, device=device)
        beside = "" if inner is None else f", beside {inner.description}"
        self.description = f"an oracle that is right at a rate of {rate}{beside}"

    def catch_up(self, sequences: list[Sequence]) -> None:
        if self._inner is not None:
            self._inner.catch_up(sequences)
        self._right.fill_(-1)
        for row, sequence in enumerate(sequences):
            prompt = sequence.token_ids[: sequence.num_prompt]
            answer = next((answer for answer in self.answers if list(answer[: len(prompt)]) == prompt), ())
            kept = torch.tensor(list(answer[: self._right.shape[1] - 1]), dtype=torch.int64)
            self._right[row, : kept.numel()].copy_(kept)

    def note_end(self, sequences: list[Sequence]) -> None:
        if self._inner is not None:
            self._inner.note_end(sequences)

    def note_launch(self) -> None:
        if self._inner is not None:
            self._inner.note_launch()

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        if self._inner is not None:
            self._inner.propose(rows, num_drafts)
        numbers = torch.arange(len(rows), device=self._right.device)[:, None]
        places = rows.rows.positions[:, None] + 1 + torch.arange(num_drafts, device=self._right.device)
        right = self._right[: len(rows)].gather(1, places.clamp(0, self._right.shape[1] - 1))
        bits = (places * 1024 + numbers + 1) * _MIX
        coin = (bits ^ (bits >> 29)) * _MIX >> (64 - _COIN_BITS) & ((1 << _COIN_BITS) - 1)
        is_right = (coin < self.rate * (1 << _COIN_BITS)) & (right >= 0)
        return torch.where(is_right, right, (right + 1) % self._num_ids)
