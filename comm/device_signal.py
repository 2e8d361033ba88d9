"""Put-with-signal between two GPU ranks, by kernels on a stream: the device form of `comm/signal_channel.py`.

The same protocol: three slots in the consumer's memory, a signal word each, an acknowledgement word each at the producer, message
numbers counted in device memory, so that a captured graph goes on counting. Both ends wait in the kernel, on a word of their own
memory; only writes cross the link. Payloads have a fixed size a channel, a multiple of 8 bytes, so no size travels.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from comm.device_watch import DeviceWatch, WatchParams
from comm.heap import DeviceHeap, Region

NUM_SLOTS = 3
WORD_BYTES = 8
MAX_THREADS = 1024


class PutParams(ctypes.Structure):
    """`PutParams` of `comm/cuda/signal_channel.cu`."""

    _fields_ = [
        ("payload", ctypes.c_uint64), ("slots", ctypes.c_uint64), ("signals", ctypes.c_uint64), ("acks", ctypes.c_uint64),
        ("count", ctypes.c_uint64), ("watch", WatchParams), ("num_words", ctypes.c_uint32),
        ("slot_words", ctypes.c_uint32), ("peer", ctypes.c_uint32),
    ]  # fmt: skip


class TakeParams(ctypes.Structure):
    """`TakeParams` of `comm/cuda/signal_channel.cu`."""

    _fields_ = [
        ("out", ctypes.c_uint64), ("slots", ctypes.c_uint64), ("signals", ctypes.c_uint64), ("acks", ctypes.c_uint64),
        ("count", ctypes.c_uint64), ("watch", WatchParams), ("num_words", ctypes.c_uint32),
        ("slot_words", ctypes.c_uint32), ("peer", ctypes.c_uint32),
    ]  # fmt: skip


class DeviceSignalChannel:
    """Both ends of one channel; each rank uses its own. `stem` names its regions in `heap`.

    `kernels`: the entry points `signal_put` and `signal_take`.
    """

    def __init__(self, heap: DeviceHeap, watch: DeviceWatch, kernels: Any, stem: str, producer: int, consumer: int):
        self._heap, self._watch, self._kernels, self._stem = heap, watch, kernels, stem
        self.producer, self.consumer = producer, consumer
        span = heap.layout.span(f"{stem}.slots")
        self.slot_bytes = (span.stop - span.start) // NUM_SLOTS

    @staticmethod
    def regions(stem: str, slot_bytes: int) -> tuple[Region, ...]:
        """`slot_bytes`: a multiple of 8. Header words of four bytes: three signals, three acknowledgements, one count."""
        return (
            Region(f"{stem}.slots", NUM_SLOTS * slot_bytes),
            Region(f"{stem}.signals", NUM_SLOTS * 4),
            Region(f"{stem}.acks", NUM_SLOTS * 4),
            Region(f"{stem}.count", 4),
        )

    def put(self, payload: torch.Tensor) -> None:
        """Enqueue: wait until slot n - 3 is acknowledged, write `payload` (contiguous, on this GPU), ring. Producer only."""
        heap, stem = self._heap, self._stem
        params = PutParams(
            payload.data_ptr(), heap.address(self.consumer, f"{stem}.slots"), heap.address(self.consumer, f"{stem}.signals"),
            heap.address(self.producer, f"{stem}.acks"), heap.address(self.producer, f"{stem}.count"), self._watch.params,
            self._words(payload), self.slot_bytes // WORD_BYTES, self.consumer,
        )  # fmt: skip
        self._launch("signal_put", payload, params)

    def take(self, out: torch.Tensor) -> None:
        """Enqueue: wait for the next message, copy it to `out`, acknowledge. Consumer only; sizes must agree."""
        heap, stem = self._heap, self._stem
        params = TakeParams(
            out.data_ptr(), heap.address(self.consumer, f"{stem}.slots"), heap.address(self.consumer, f"{stem}.signals"),
            heap.address(self.producer, f"{stem}.acks"), heap.address(self.consumer, f"{stem}.count"), self._watch.params,
            self._words(out), self.slot_bytes // WORD_BYTES, self.producer,
        )  # fmt: skip
        self._launch("signal_take", out, params)

    def _words(self, tensor: torch.Tensor) -> int:
        num_bytes = tensor.numel() * tensor.element_size()
        if not tensor.is_cuda or not tensor.is_contiguous() or tensor.data_ptr() % WORD_BYTES or num_bytes % WORD_BYTES:
            raise TypeError("a payload is contiguous, on a GPU, 8-byte aligned, and a multiple of 8 bytes long")
        if num_bytes > self.slot_bytes:
            raise ValueError(f"a payload of {num_bytes} bytes does not fit a slot of {self.slot_bytes}")
        return num_bytes // WORD_BYTES

    def _launch(self, name: str, tensor: torch.Tensor, params: ctypes.Structure) -> None:
        threads = min(MAX_THREADS, -(-self._words(tensor) // 32) * 32)
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name].launch(1, threads, (params,), stream, is_pdl=True)
