"""Put-with-signal between two ranks: the producer writes a payload into a slot and rings the signal word of that slot.

Not a queue of unbounded depth and not a collective: one producer, one consumer, three slots.

Message `n` (from 1) uses slot `n % 3`. Its three header words, each on cache lines of its own and none part of the
payload, so that any payload may pass (zeros of either sign included):

- *signal*, at the consumer: the producer stores `n` after payload and size; the consumer waits for exactly `n`, on its
  own memory.
- *size*, at the consumer: bytes of the payload, written before the signal.
- *acknowledgement*, at the producer: the consumer stores `n` when it no longer needs the slot; the producer waits for
  exactly `n - 3` before it writes the slot again. Three slots alone would not do: a one-way producer meets nobody on
  its way and would lap the consumer.

Where the payload lies is the caller's choice: at the consumer (push, as on a GPU) or at the producer (pull).

*Source*: NVSHMEM's `put_signal`, and the credits of NCCL's send and receive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from comm.heap import Region
from comm.heap_posix import PosixHeap
from comm.words import Patience

NUM_SLOTS = 3


class SignalChannel:
    """What both ends share: which ranks, which regions. `payload_at` is the rank whose heap holds the slots.

    `lane` tells apart the channels that meet in one rank: its words are `lane * 3` and the two after it.
    """

    def __init__(
        self,
        heap: PosixHeap,
        stem: str,
        producer: int,
        consumer: int,
        patience: Patience,
        lane: int = 0,
        payload_at: int | None = None,
    ):
        owner = consumer if payload_at is None else payload_at
        self._stem, self._patience, self._first = stem, patience, lane * NUM_SLOTS
        self._producer, self._consumer = producer, consumer
        self._slots = heap.tensor(owner, f"{stem}.slots").view(NUM_SLOTS, -1)
        self._signals = heap.words(consumer, f"{stem}.signals")
        self._sizes = heap.words(consumer, f"{stem}.sizes")
        self._acks = heap.words(producer, f"{stem}.acks")
        self.slot_bytes = self._slots.shape[1]
        # Messages sent and taken so far, each in its owner's memory: like an epoch, it must outlive the handle.
        self._numbers = heap.words(heap.rank, f"{stem}.numbers")
        self._number_at = lane if heap.rank == producer else len(self._numbers) // 2 + lane

    @staticmethod
    def regions(stem: str, slot_bytes: int, num_lanes: int = 1) -> tuple[Region, ...]:
        """`slot_bytes`: a multiple of 8. `num_lanes`: channels whose words one rank holds."""
        words = (Region.of_words(f"{stem}.{name}", NUM_SLOTS * num_lanes) for name in ("signals", "sizes", "acks"))
        numbers = Region.of_words(f"{stem}.numbers", 2 * num_lanes)
        return (Region(f"{stem}.slots", NUM_SLOTS * slot_bytes), numbers, *words)


class SignalProducer(SignalChannel):
    """The writing end."""

    def put(self, payload: torch.Tensor) -> None:
        """Send `payload` (uint8 `[n]`, contiguous, at most `slot_bytes`) as one message.

        *Order*: acquires the consumer's acknowledgement of the slot, releases the payload with the signal.
        *Raises* `PeerTimeout` when the consumer has not acknowledged the slot's previous message by the deadline.
        """
        number = self._numbers.load_relaxed(self._number_at) + 1
        slot = number % NUM_SLOTS
        at = self._first + slot
        num_bytes = payload.numel()
        if num_bytes > self.slot_bytes:
            raise ValueError(f"a message of {num_bytes} bytes does not fit a slot of {self.slot_bytes}")
        self._acks.wait_equal(
            at, max(0, number - NUM_SLOTS), self._patience, f"{self._stem} put", number, self._consumer
        )
        self._slots[slot, :num_bytes].copy_(payload)
        self._sizes.store_relaxed(at, num_bytes)
        self._signals.store_release(at, number)  # pairs with wait_equal in take
        self._numbers.store_relaxed(self._number_at, number)

    def send(self, payload: torch.Tensor) -> None:
        """Send `payload` (uint8 `[n]`, contiguous, any size) as one message per slotful, at least one."""
        for chunk in payload.split(self.slot_bytes):
            self.put(chunk)


class SignalConsumer(SignalChannel):
    """The reading end."""

    def take(self, read: Callable[[torch.Tensor], None]) -> None:
        """Wait for the next message and call `read(payload)` with its slot (uint8 `[n]`, valid during the call only).

        *Order*: acquires the payload with the signal, releases the slot with the acknowledgement.
        *Raises* `PeerTimeout` when no message came by the deadline.
        """
        number = self._numbers.load_relaxed(self._number_at) + 1
        slot = number % NUM_SLOTS
        at = self._first + slot
        self._signals.wait_equal(at, number, self._patience, f"{self._stem} take", number, self._producer)
        read(self._slots[slot, : self._sizes.load_relaxed(at)])
        self._acks.store_release(at, number)  # after the last read of the slot; pairs with wait_equal in put
        self._numbers.store_relaxed(self._number_at, number)

    def receive(self, out: torch.Tensor) -> None:
        """Fill `out` (uint8 `[n]`, contiguous) with what one `send` of `n` bytes sent.

        *Raises* `ValueError` when the producer sent another number of bytes: the ranks called with unequal shapes.
        """
        for chunk in out.split(self.slot_bytes):
            self.take(lambda payload, chunk=chunk: self._copy(payload, chunk))

    def _copy(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        if payload.numel() != out.numel():
            raise ValueError(
                f"{self._stem}: rank {self._producer} sent {payload.numel()} bytes where {out.numel()} were expected"
            )
        out.copy_(payload)
