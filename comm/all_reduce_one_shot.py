"""The textbook all-reduce: everyone publishes its data, one flag barrier, everyone sums everybody's.

Not the fastest (it waits at a barrier) and not the leanest (every rank reads all the data): the plain one that the
others are measured and tested against.

Each rank has two slots, used in turn. Why no second barrier is needed before a slot is written again: a rank writes
slot `epoch % 2` for call `epoch` only after call `epoch - 1` has returned, so after every peer arrived at `epoch - 1`,
and a peer arrives there only after it has read the data of `epoch - 2`, the slot's previous content.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from comm.barrier import FlagBarrier
from comm.heap import Region
from comm.heap_posix import PosixHeap
from comm.operand import FLOAT_DTYPES, check_operand, sum_in_rank_order
from comm.words import Patience

STEM = "all_reduce_one_shot"


class OneShotAllReduce:
    """All-reduce of the ranks of `heap`. A message larger than a slot goes in several rounds."""

    def __init__(self, heap: PosixHeap, patience: Patience):
        self._rank = heap.rank
        self._barrier = FlagBarrier(heap, STEM, patience)
        self._slots = [heap.tensor(peer, f"{STEM}.slots").view(2, -1) for peer in range(heap.size)]
        slot_bytes = self._slots[0].shape[1]
        self._max_elements = {dtype: slot_bytes // dtype.itemsize for dtype in FLOAT_DTYPES}
        # Views cost a microsecond each to make; a model reduces the same few shapes for ever.
        self._parts = lru_cache(maxsize=256)(self._make_parts)

    @staticmethod
    def regions(size: int, slot_bytes: int) -> tuple[Region, ...]:
        """`slot_bytes`: a multiple of 8, the largest message that goes in one round."""
        return (*FlagBarrier.regions(STEM, size), Region(f"{STEM}.slots", 2 * slot_bytes))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (any shape, fp32, bf16 or fp16, contiguous) over the ranks, in place, and return it.

        *Collective*: all ranks, equal shape and dtype.
        *Numbers*: fp32, in rank order, rounded once; the same bits on every rank.
        *Cost*: writes the message once, reads it once from each rank; one barrier a round.
        *Raises* `TypeError`, `ValueError` for an operand it cannot take; `PeerTimeout` at the deadline.
        """
        check_operand(x)
        flat = x.detach().view(-1)
        limit = self._max_elements[x.dtype]
        if flat.numel() <= limit:
            self._round(flat)
        else:
            for chunk in flat.split(limit):
                self._round(chunk)
        return x

    def _round(self, flat: torch.Tensor) -> None:
        parts = self._parts(self._barrier.next_epoch & 1, flat.numel(), flat.dtype)
        parts[self._rank].copy_(flat)
        self._barrier.wait()
        sum_in_rank_order(parts, out=flat)

    def _make_parts(self, slot: int, num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [slots[slot, : num_elements * dtype.itemsize].view(dtype) for slots in self._slots]
