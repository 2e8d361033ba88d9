"""Drafts that say which step they are of, on any device: a receiver knows torn, lost and repeated ones from the drafts alone."""

from __future__ import annotations

import torch

from comm.device_signal import NUM_SLOTS
from engine.graph.row_state import SpeculativeRows

SHAPES = ((1, 4), (5, 4), (16, 8), (16, 16))  # (rows, drafts a row): a row alone, odd, many, the most there may be
FAULTS = ("torn", "of another step", "wrong words")
LEADS = ("below 0", *map(str, range(NUM_SLOTS + 1)), f"above {NUM_SLOTS}")  # messages put and not acknowledged
_FACTORS = 1_000_003, 0x9E3779B97F4A7C15 - (1 << 64)  # a prime, and the golden ratio: odd, so that no two steps have equal words


class Payload:
    """Of one shape. The first word is the step, the last the checksum of all before it, in which each word has its own weight."""

    def __init__(self, rows: int, num_drafts: int, device: torch.device | str):
        num_words = rows * num_drafts
        self._shape = (rows, num_drafts)
        self._places = torch.arange(1, num_words - 1, device=device) * _FACTORS[0]
        self._weights = 2 * torch.arange(num_words - 1, device=device) + 1

    def at(self, step: torch.Tensor) -> torch.Tensor:
        """int64 `[rows, num_drafts]` of `step` int64 `[1]`. Capturable, like the next one."""
        body = torch.cat((step, (self._places + step) * _FACTORS[1]))
        return torch.cat((body, (body * self._weights).sum(0, keepdim=True))).view(self._shape)

    def faults(self, found: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """int64 `[3]`: 0 or 1 for each of the first two `FAULTS`, and how many words are not those of `step`."""
        words = found.flatten()
        checksum = (words[:-1] * self._weights).sum(0, keepdim=True)
        num_wrong = (found != self.at(step)).sum().view(1)
        return torch.cat((checksum != words[-1:], words[:1] != step, num_wrong)).long()


class NumberedDrafts:
    """`DeviceDrafter` that counts its steps, from 1, and proposes the payload of each."""

    description = "numbered drafts"

    def __init__(self, device: torch.device | str):
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._payloads = {shape: Payload(*shape, device) for shape in SHAPES}

    def catch_up(self, sequences: list) -> None:
        pass

    def note_end(self, sequences: list) -> None:
        pass

    def note_launch(self) -> None:
        pass

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        self.step.add_(1)
        return self._payloads[len(rows), num_drafts].at(self.step)


def lead_bucket(lead: torch.Tensor) -> torch.Tensor:
    """The place in `LEADS` of each of `lead`."""
    return lead.clamp(-1, NUM_SLOTS + 1) + 1
