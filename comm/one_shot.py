"""The communicator over a symmetric heap of one machine's ranks: one collective a file, put together here."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from comm.all_reduce_one_shot import OneShotAllReduce
from comm.barrier import FlagBarrier
from comm.broadcast import Broadcast
from comm.communicator import Communicator
from comm.gather import Gather
from comm.heap import Layout
from comm.heap_posix import PosixHeap
from comm.process_group import ProcessGroup
from comm.words import Patience

GATHER_SLOT_BYTES = 256 << 10  # a vocabulary shard of one row; longer gathers overlap their chunks
BROADCAST_SLOT_BYTES = 64 << 10  # a step's token ids many times over


class OneShotCommunicator(Communicator):
    """`Communicator` over `heap`, which must have the layout of `layout_for`. Closes it, and `group` if given."""

    name = "one_shot"

    def __init__(self, heap: PosixHeap, patience: Patience, reason: str, group: ProcessGroup | None = None):
        self.rank, self.size, self.reason = heap.rank, heap.size, reason
        self._heap, self._group = heap, group
        self._all_reduce = OneShotAllReduce(heap, patience)
        self._gather = Gather(heap, patience)
        self._broadcast = Broadcast(heap, patience)
        self._barrier = FlagBarrier(heap, "barrier", patience)

    @staticmethod
    def layout_for(size: int, max_bytes: int) -> Layout:
        """The heap's layout for `size` ranks, where a message of up to `max_bytes` is reduced in one round."""
        slot_bytes = -(-max(max_bytes, 8) // 8) * 8
        return Layout.of(
            OneShotAllReduce.regions(size, slot_bytes),
            Gather.regions(size, GATHER_SLOT_BYTES),
            Broadcast.regions(size, BROADCAST_SLOT_BYTES),
            FlagBarrier.regions("barrier", size),
        )

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        return self._gather(x)

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        data = None if values is None else array("q", values).tobytes()
        return array("q", self._broadcast(data)).tolist()

    def broadcast_object(self, value: Any = None) -> Any:
        data = json.dumps(value).encode() if self.rank == 0 else None
        return json.loads(self._broadcast(data))

    def barrier(self) -> None:
        self._barrier.wait()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self._heap.close()
        if self._group is not None:
            self._group.close()
