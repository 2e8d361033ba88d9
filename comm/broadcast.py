"""Broadcast of host-side data from rank 0 over the heap: rank 0 is the producer of a channel to every other rank.

Not a barrier: rank 0 may be up to three messages ahead of a rank. A message says how much follows, so the receivers
need not know.
"""

from __future__ import annotations

import struct

import torch

from comm.heap import Region
from comm.heap_posix import PosixHeap
from comm.signal_channel import SignalChannel, SignalConsumer, SignalProducer
from comm.words import Patience

STEM = "broadcast"
_HEADER = struct.Struct("<q")


class Broadcast:
    """Broadcast from rank 0 to the other ranks of `heap`."""

    def __init__(self, heap: PosixHeap, patience: Patience):
        self._producers: list[SignalProducer] = []
        self._consumer: SignalConsumer | None = None
        if heap.rank:
            self._consumer = SignalConsumer(heap, STEM, 0, heap.rank, patience, heap.rank)
        else:
            self._producers = [SignalProducer(heap, STEM, 0, peer, patience, peer) for peer in range(1, heap.size)]

    @staticmethod
    def regions(size: int, slot_bytes: int) -> tuple[Region, ...]:
        return SignalChannel.regions(STEM, slot_bytes, num_lanes=size)

    def __call__(self, data: bytes | None) -> bytes:
        """Rank 0's `data` (any length), on every rank; other ranks pass None.

        *Collective.* *Raises* `PeerTimeout` at the deadline.
        """
        if self._consumer is None:
            return self._send(data or b"")
        return self._receive(self._consumer)

    def _send(self, data: bytes) -> bytes:
        message = torch.frombuffer(bytearray(_HEADER.pack(len(data)) + data), dtype=torch.uint8)
        # Chunk by chunk, not peer by peer: all receivers then copy at the same time.
        for chunk in message.split(self._producers[0].slot_bytes):
            for producer in self._producers:
                producer.put(chunk)
        return data

    def _receive(self, consumer: SignalConsumer) -> bytes:
        received = bytearray()
        consumer.take(lambda payload: received.extend(payload.numpy().tobytes()))
        (num_bytes,) = _HEADER.unpack_from(received)
        while len(received) < _HEADER.size + num_bytes:
            consumer.take(lambda payload: received.extend(payload.numpy().tobytes()))
        return bytes(received[_HEADER.size :])
