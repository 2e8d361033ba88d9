"""Integers on their way from the host to the device, without the host waiting for the copy.

Pinned memory must not be written again before it has been copied. Slots take turns, and one is free once a step that was
launched behind its copy has left its tokens in the ring: again a look at memory, not a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy
import torch

from engine.graph.token_ring import TokenRing

# A burst that goes on from a prefill takes three uploads before its first step is done, and one that follows it before its tokens
# are known as many again.
_NUM_SLOTS = 8
_FREE = -1


class Staging:
    """Room for `num_words` int64 words an upload."""

    def __init__(self, num_words: int, ring: TokenRing, device: torch.device):
        self._ring = ring
        self._slots = torch.zeros(_NUM_SLOTS, num_words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._step_behind = [_FREE] * _NUM_SLOTS
        self._turn = 0

    def upload(self, parts: list[numpy.ndarray], next_step: int, check: Callable[[], None]) -> list[torch.Tensor]:
        """`parts` (int64, any shape) on the device, as views that are good until the next upload.

        *Stream*: copied on the current stream. `next_step`: the number of a step that will be launched behind the copy.
        """
        slot, self._turn = self._turn, (self._turn + 1) % _NUM_SLOTS
        if self._step_behind[slot] != _FREE:
            self._ring.wait(self._step_behind[slot], check)
        self._step_behind[slot] = next_step
        host, at, views = self._slots[slot].numpy(), 0, []
        for part in parts:
            host[at : at + part.size] = part.ravel()
            views.append(self._words[at : at + part.size].view(part.shape))
            at += part.size
        self._words[:at].copy_(self._slots[slot][:at], non_blocking=True)
        return views
