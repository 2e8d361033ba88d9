"""Put-with-signal between two GPU ranks, enqueued on a stream: the device form of `comm/signal_channel.py`.

The same protocol: three slots in the consumer's memory, an acknowledgement word each at the producer, message numbers counted in
device memory, so that a captured graph goes on counting. Both ends wait on their own memory, and only writes cross the link.
Payloads have a size known to both ends, a multiple of 8 bytes, so no size travels.

Two choices, fixed for a channel and equal at both ends:

- `wait`: how the consumer waits. `kernel`: it spins in a kernel of one block, with a deadline. `stream`: by a stream memory
  operation, which occupies no SM; its deadline is the host's (`comm/stream_deadline.py`). The producer's wait for a free slot,
  seldom needed, is in its kernel either way.
- `shape`: how a message becomes known. `packet`: every 8-byte word carries 4 bytes of payload and the message's number, so
  arrival is the data: one trip, no fence, twice the bytes. `signal`: plain payload, then a release, then a signal word of its
  own. Packets trust that an aligned 8-byte store arrives whole, which NVLink gives; the signal asks a link for nothing but that
  writes arrive in the order in which they were released, which PCIe gives to posted writes. So `is_writes_only=True` (for links
  that `launch/probe_choice.py` calls slow) forces the signal, and a stream wait needs it.

*Source*: NVSHMEM's `put_signal`; NCCL's LL packets; the waits of NCCL's copy-engine collectives.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from comm import stream_ops
from comm.device_watch import DeviceWatch, WatchParams
from comm.heap import DeviceHeap, Region
from comm.stream_deadline import StreamDeadline

NUM_SLOTS = 3
WORD_BYTES = 8
MAX_THREADS = 1024
STATE_BYTES = (2 + NUM_SLOTS) * 4
RUNG = 1  # the signal of a stream wait; zero again once taken
SITE_TAKE = 7
WAITS = ("kernel", "stream")


class EndParams(ctypes.Structure):
    """`End` of `comm/cuda/signal_channel.cu`."""

    _fields_ = [
        ("slots", ctypes.c_uint64), ("signals", ctypes.c_uint64), ("acks", ctypes.c_uint64), ("state", ctypes.c_uint64),
        ("slot_words", ctypes.c_uint32), ("peer", ctypes.c_uint32), ("fixed_slot", ctypes.c_uint32),
    ]  # fmt: skip


class MoveParams(ctypes.Structure):
    """`MoveParams` of `comm/cuda/signal_channel.cu`."""

    _fields_ = [("data", ctypes.c_uint64), ("end", EndParams), ("watch", WatchParams), ("num_words", ctypes.c_uint32)]


class RelayParams(ctypes.Structure):
    """`RelayParams` of `comm/cuda/signal_channel.cu`."""

    _fields_ = [
        ("data", ctypes.c_uint64), ("source", EndParams), ("onward", EndParams), ("watch", WatchParams),
        ("num_words", ctypes.c_uint32),
    ]  # fmt: skip


class SlotOrder:
    """Which slot a message of a stream-wait channel takes: the host must know, for the slot's address is a constant of a graph.

    By its place among the eager messages, or in the capture it belongs to. A slot is one conversation of its own (message,
    acknowledgement, message), so any order of slots is sound if both ends have the same: a graph may hold any number of messages,
    and a message that is put at some place of a graph must be taken at the same place of a graph.
    """

    def __init__(self) -> None:
        self._eager, self._captured, self._capture = 0, 0, None

    def next(self, capture: int | None) -> int:
        """`capture`: that of the stream, None for an eager message."""
        if capture is None:
            self._eager += 1
            return (self._eager - 1) % NUM_SLOTS
        if capture != self._capture:
            self._capture, self._captured = capture, 0
        self._captured += 1
        return (self._captured - 1) % NUM_SLOTS


class DeviceSignalChannel:
    """Both ends of one channel; each rank uses its own. `stem` names its regions in `heap`; `kernels` are those of `load_signal`.

    `deadline`: of a stream wait, needed by its consumer. `is_pdl`: kernels may start early behind the one before them; take
    False where ranks share a GPU and what follows a take could fill it, for an early start holds SMs while the take waits.
    *Raises* `ValueError` for an unknown `wait`.
    """

    def __init__(
        self,
        heap: DeviceHeap,
        watch: DeviceWatch,
        kernels: Any,
        stem: str,
        producer: int,
        consumer: int,
        wait: str = "kernel",
        is_writes_only: bool = False,
        deadline: StreamDeadline | None = None,
        is_pdl: bool = True,
    ):
        if wait not in WAITS:
            raise ValueError(f"a channel waits by {' or '.join(WAITS)}, not {wait!r}")
        self._heap, self._watch, self._kernels, self._stem = heap, watch, kernels, stem
        self.producer, self.consumer, self.wait, self._is_pdl = producer, consumer, wait, is_pdl
        self._deadline = deadline if wait == "stream" and heap.rank == consumer else None
        self.shape = "packet" if wait == "kernel" and not is_writes_only else "signal"
        span = heap.layout.span(f"{stem}.slots")
        self.slot_bytes = (span.stop - span.start) // (2 * NUM_SLOTS)
        self._order = SlotOrder()
        if wait == "stream" and heap.rank == consumer:
            if deadline is None:
                raise ValueError("a stream wait has no deadline of its own: give the consumer's channel one")
            for slot in range(NUM_SLOTS):
                deadline.guard(self._signal(slot), RUNG, SITE_TAKE, producer)

    @staticmethod
    def regions(stem: str, slot_bytes: int) -> tuple[Region, ...]:
        """`slot_bytes`: the largest payload, a multiple of 8; packets take twice that. Header words have 4 bytes each."""
        return (
            Region(f"{stem}.slots", NUM_SLOTS * 2 * slot_bytes),
            Region(f"{stem}.signals", NUM_SLOTS * 4),
            Region(f"{stem}.acks", NUM_SLOTS * 4),
            Region(f"{stem}.state", STATE_BYTES),
        )

    def put(self, payload: torch.Tensor) -> None:
        """Enqueue: wait until a slot is acknowledged, write `payload` (contiguous, on this GPU), make it known. Producer only."""
        self._must_be(self.producer, "puts")
        self._words(payload)  # what is refused must not use up a slot
        self._move("put", payload, self._end(self._next_slot()), self._is_pdl)

    def take(self, out: torch.Tensor) -> None:
        """Enqueue: wait for the next message, copy it to `out`, acknowledge. Consumer only; sizes must agree."""
        self._must_be(self.consumer, "takes")
        self._words(out)  # what is refused must not use up a slot
        slot = self._next_slot()
        self._enqueue_wait(slot)
        self._move("take", out, self._end(slot), self._is_pdl and self.wait == "kernel")

    def note_launch(self) -> None:
        """Takes of this channel have been launched on torch's current stream, eagerly or in graphs, and the host will not wait
        for them through `StreamDeadline.synchronize`: the deadline of a stream wait runs from here on. Not while capturing."""
        if self._deadline is not None:
            self._deadline.note_launch()

    def relay(self, out: torch.Tensor, onward: DeviceSignalChannel) -> None:
        """Enqueue in one kernel: take the next message into `out` and put it on `onward`, a channel of the same kind.

        *Order*: waits for a free slot of `onward` before it takes.
        """
        self._must_be(self.consumer, "takes")
        onward._must_be(onward.producer, "puts")
        if (onward.wait, onward.shape) != (self.wait, self.shape):
            raise ValueError("a message is relayed between channels that wait alike and have one shape")
        num_words = min(self._words(out), onward._words(out))
        slot, next_slot = self._next_slot(), onward._next_slot()
        self._enqueue_wait(slot)
        params = RelayParams(out.data_ptr(), self._end(slot), onward._end(next_slot), self._watch.params, num_words)
        self._launch("relay", num_words, params, self._is_pdl and self.wait == "kernel")

    def _move(self, verb: str, data: torch.Tensor, end: EndParams, is_pdl: bool) -> None:
        num_words = self._words(data)
        self._launch(verb, num_words, MoveParams(data.data_ptr(), end, self._watch.params, num_words), is_pdl)

    def _next_slot(self) -> int:
        """`NUM_SLOTS` where the kernel counts for itself."""
        if self.wait == "kernel":
            return NUM_SLOTS
        return self._order.next(stream_ops.capture_id(_stream()))

    def _enqueue_wait(self, slot: int) -> None:
        if self.wait == "stream":
            stream_ops.wait_value32(_stream(), self._signal(slot), RUNG)

    def _signal(self, slot: int) -> int:
        return self._heap.address(self.consumer, f"{self._stem}.signals") + 4 * slot

    def _end(self, slot: int) -> EndParams:
        address, stem, rank = self._heap.address, self._stem, self._heap.rank
        return EndParams(
            address(self.consumer, f"{stem}.slots"), self._signal(0), address(self.producer, f"{stem}.acks"),
            address(rank, f"{stem}.state"), self.slot_bytes // WORD_BYTES,
            self.consumer if rank == self.producer else self.producer, slot,
        )  # fmt: skip

    def _must_be(self, rank: int, verb: str) -> None:
        if self._heap.rank != rank:
            raise ValueError(f"on channel {self._stem} rank {rank} {verb}, and this is rank {self._heap.rank}")

    def _words(self, tensor: torch.Tensor) -> int:
        num_bytes = tensor.numel() * tensor.element_size()
        if not tensor.is_cuda or not tensor.is_contiguous() or tensor.data_ptr() % WORD_BYTES or num_bytes % WORD_BYTES:
            raise TypeError("a payload is contiguous, on a GPU, 8-byte aligned, and a multiple of 8 bytes long")
        if not 0 < num_bytes <= self.slot_bytes:
            raise ValueError(f"a payload of {num_bytes} bytes does not fit a slot of {self.slot_bytes}")
        return num_bytes // WORD_BYTES

    def _launch(self, verb: str, num_words: int, params: ctypes.Structure, is_pdl: bool) -> None:
        threads = min(MAX_THREADS, -(-num_words // 32) * 32)
        self._kernels[f"{self.shape}_{verb}"].launch(1, threads, (params,), _stream(), is_pdl=is_pdl)


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
