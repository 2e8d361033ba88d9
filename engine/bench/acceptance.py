"""Drafts that hold at a rate that is set, since random weights accept none of their own; and a drafter that takes no time."""

from __future__ import annotations

import torch

from engine.graph.row_state import DeviceRows, SpeculativeRows
from engine.sequence import Sequence

_COIN_BITS = 20
_MIX = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio, odd, as a signed 64-bit number


class SetAcceptance:
    """`Judge` by which each draft holds with probability `rate`, whatever it is: the token that the model chose passes for it.

    What was computed behind it was computed behind another token, so the text means nothing; the work and its time are those of
    drafts that hold. No answer has to be known beforehand. The model's own would not do: in a batch that is filled up again a
    row's products are made in steps of other sizes every time, random weights have near-ties everywhere, and behind the first
    that turns no known answer is right any more.

    Whether a draft holds is a hash of its row and position, so all ranks decide alike. *Cost*: a dozen small kernels a step.
    """

    def __init__(self, num_ids: int, device: torch.device):
        """`num_ids`: of the vocabulary."""
        self._num_ids = num_ids
        self._threshold = torch.zeros(1, dtype=torch.int64, device=device)  # captured steps read it: the rate may change

    def set_rate(self, rate: float) -> None:
        """Of the steps that are launched from now on. *Collective*. *Stream*: the current one."""
        self._threshold.fill_(round(rate * (1 << _COIN_BITS)))

    def __call__(self, rows: DeviceRows, drafts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        num_rows, num_drafts = drafts.shape
        chosen = ids.view(num_rows, num_drafts + 1)[:, :num_drafts]
        places = rows.positions[:, None] + 1 + torch.arange(num_drafts, device=ids.device)
        bits = (places * 1024 + torch.arange(1, num_rows + 1, device=ids.device)[:, None]) * _MIX
        coin = (bits ^ (bits >> 29)) * _MIX >> (64 - _COIN_BITS) & ((1 << _COIN_BITS) - 1)
        return torch.where(coin < self._threshold, chosen, (chosen + 1) % self._num_ids)


class FreeDrafts:
    """`DeviceDrafter` that repeats each row's last token: a step with it is its verification."""

    description = "the last token"

    def catch_up(self, sequences: list[Sequence]) -> None:
        pass

    def note_end(self, sequences: list[Sequence]) -> None:
        pass

    def note_launch(self) -> None:
        pass

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        return rows.rows.token_ids[:, None].repeat(1, num_drafts)
