"""The bare hop between two GPUs: a packet to and fro in one kernel. What a bench of signals is held against; no product path."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from comm.device_watch import DeviceWatch, WatchParams
from comm.heap import DeviceHeap, Region


class EchoParams(ctypes.Structure):
    """`EchoParams` of `comm/cuda/link_echo.cu`."""

    _fields_ = [
        ("mine", ctypes.c_uint64), ("theirs", ctypes.c_uint64), ("watch", WatchParams), ("first", ctypes.c_uint32),
        ("rounds", ctypes.c_uint32), ("is_leader", ctypes.c_uint32), ("peer", ctypes.c_uint32),
    ]  # fmt: skip


class LinkEcho:
    """Of ranks 0 and 1 of a heap that holds `region`; `kernel` is the entry point `link_echo`."""

    region = Region("link_echo", 16)

    def __init__(self, heap: DeviceHeap, watch: DeviceWatch, kernel: Any):
        self._heap, self._watch, self._kernel, self._done = heap, watch, kernel, 0

    def run(self, rounds: int) -> None:
        """Enqueue `rounds` there-and-backs, two hops each, on torch's current stream. *Collective*; not to be captured."""
        peer = 1 - self._heap.rank
        params = EchoParams(
            self._heap.address(self._heap.rank, "link_echo"), self._heap.address(peer, "link_echo"), self._watch.params,
            self._done + 1, rounds, self._heap.rank == 0, peer,
        )  # fmt: skip
        self._done += rounds
        self._kernel.launch(1, 32, (params,), torch.cuda.current_stream().cuda_stream)
