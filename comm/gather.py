"""Gather to rank 0 over the heap: every other rank is the producer of a channel that rank 0 consumes.

Not a barrier: a rank leaves as soon as its data is in its slots. Slots lie at the producer, so that rank 0 does not
need one set for each rank in a heap whose parts are all equal.
"""

from __future__ import annotations

import torch

from comm.heap import Region
from comm.heap_posix import PosixHeap
from comm.signal_channel import SignalChannel, SignalConsumer, SignalProducer
from comm.words import Patience

STEM = "gather"


class Gather:
    """Gather of the ranks of `heap`."""

    def __init__(self, heap: PosixHeap, patience: Patience):
        self._producer: SignalProducer | None = None
        self._consumers: list[SignalConsumer] = []
        if heap.rank:
            # One lane a producer in rank 0's signal words; the acknowledgements use the same lane of the producer's
            # own.
            self._producer = SignalProducer(heap, STEM, heap.rank, 0, patience, heap.rank, payload_at=heap.rank)
        else:
            self._consumers = [
                SignalConsumer(heap, STEM, peer, 0, patience, peer, payload_at=peer) for peer in range(1, heap.size)
            ]

    @staticmethod
    def regions(size: int, slot_bytes: int) -> tuple[Region, ...]:
        return SignalChannel.regions(STEM, slot_bytes, num_lanes=size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | None:
        """`x` `[..., n]` (any dtype) of all ranks, side by side along the last dimension, on rank 0; None elsewhere.

        *Collective*: all ranks, equal shape and dtype. *Cost*: two copies of each rank's data.
        *Raises* `PeerTimeout` at the deadline, `ValueError` when a rank sent another size.
        """
        x = x.detach().contiguous()
        if self._producer is not None:
            self._producer.send(x.view(-1).view(torch.uint8))
            return None
        parts = [x]
        for consumer in self._consumers:
            part = torch.empty_like(x)
            consumer.receive(part.view(-1).view(torch.uint8))
            parts.append(part)
        return torch.cat(parts, dim=-1)
