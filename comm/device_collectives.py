"""All-reduces of ranks on GPUs of one machine, launched on a stream, capturable in a graph, never waiting for the host.

One instance a rank. Every method is *collective* and *asynchronous*: it enqueues kernels on torch's current stream and returns.
All ranks must enqueue the same calls with the same shapes in the same order. Call numbers live in device memory, so a captured
graph can be replayed any number of times, mixed with eager calls.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comm.device_watch import DeviceWatch, WatchParams
from comm.heap import DeviceHeap, Layout, Region

SOURCES = Path(__file__).parent / "cuda"
MAX_RANKS = 8
UNIT_BYTES, PACKET_BYTES = 8, 16
ELEMS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
LAMPORT_CTAS, LAMPORT_THREADS = 64, 512
CTA_PACKETS = 1024  # of one CTA and source; one row of 8192 bf16, or two rounds of 512 threads, is 2048 or 1024 units
ONE_SHOT_CTAS, TWO_SHOT_CTAS = 32, 64


class _Pointers(ctypes.Array):
    _type_, _length_ = ctypes.c_uint64, MAX_RANKS


class LamportParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("inbox", _Pointers), ("epochs", ctypes.c_uint64),
        ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("max_ctas", ctypes.c_uint32), ("cta_packets", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class NormParams(ctypes.Structure):
    _fields_ = [
        ("reduce", LamportParams), ("residual", ctypes.c_uint64), ("normed", ctypes.c_uint64), ("weight", ctypes.c_uint64),
        ("eps", ctypes.c_float), ("hidden", ctypes.c_uint32),
    ]  # fmt: skip


class OneShotParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("parts", _Pointers), ("flags", _Pointers),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("slot_units", ctypes.c_int64),
        ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


class TwoShotParams(ctypes.Structure):
    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("parts", _Pointers), ("flags", _Pointers),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("num_elems", ctypes.c_int64), ("slot_vectors", ctypes.c_int64),
        ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class Capacity:
    """Largest messages, in bytes: of one one-shot call and of one two-shot call; longer ones go in several calls."""

    one_shot_bytes: int = 1 << 20
    two_shot_bytes: int = 64 << 20


def layout_for(size: int, capacity: Capacity = Capacity()) -> Layout:
    """The heap that `DeviceCollectives` of `size` ranks needs."""
    return Layout.of(
        [
            Region("lamport_inbox", 2 * size * LAMPORT_CTAS * 2 * CTA_PACKETS * PACKET_BYTES),
            Region("norm_inbox", 2 * size * LAMPORT_CTAS * 4 * CTA_PACKETS * PACKET_BYTES),
            Region("one_shot_parts", 2 * capacity.one_shot_bytes),
            Region("one_shot_flags", ONE_SHOT_CTAS * size * 4),
            Region("two_shot_parts", 2 * capacity.two_shot_bytes),
            Region("two_shot_flags", 2 * TWO_SHOT_CTAS * size * 4),
            Region("epochs", 4 * 4 * LAMPORT_CTAS),
        ]
    )


class DeviceCollectives:
    """`kernels[name, dtype]` are the compiled entry points; `heap` has the layout of `layout_for`."""

    def __init__(self, heap: DeviceHeap, watch: DeviceWatch, kernels: Any, capacity: Capacity = Capacity(), is_pdl: bool = True):
        self.heap, self.watch, self.capacity, self.is_pdl = heap, watch, capacity, is_pdl
        self.rank, self.size = heap.rank, heap.size
        self._kernels = kernels

    def all_reduce_lamport(self, x: torch.Tensor, out: torch.Tensor | None = None, threads: int = 128) -> torch.Tensor:
        """Sum of `x` over the ranks into `out` (default: in place). Messages beyond one call's room go in several."""
        out = x if out is None else out
        self._check(x, out)
        room = LAMPORT_CTAS * 2 * CTA_PACKETS * UNIT_BYTES // x.element_size()
        for start in range(0, x.numel(), room):
            self._lamport_once(x.view(-1)[start : start + room], out.view(-1)[start : start + room], threads)
        return out

    def _lamport_once(self, x: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        units = -(-x.numel() * x.element_size() // UNIT_BYTES)
        ctas = min(LAMPORT_CTAS, -(-units // threads))
        if -(-units // (ctas * threads)) * threads > 2 * CTA_PACKETS:
            threads = LAMPORT_THREADS
            ctas = min(LAMPORT_CTAS, -(-units // threads))
        params = self._lamport_params("lamport_inbox", 0, x, out, 2 * CTA_PACKETS)
        self._launch("all_reduce_lamport", x.dtype, ctas, threads, params)

    def all_reduce_lamport_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, normed: torch.Tensor, threads: int = 1024
    ) -> torch.Tensor:
        """`residual += sum of x over the ranks; normed = RMSNorm(residual) * weight`, all `[rows, hidden]` of one dtype.

        Rows beyond one call's go in several.
        """
        rows, hidden = x.shape
        self._check(x, residual, normed, weight)
        for start in range(0, rows, LAMPORT_CTAS):
            part = slice(start, min(start + LAMPORT_CTAS, rows))
            reduce = self._lamport_params("norm_inbox", 1, x[part], normed[part], 4 * CTA_PACKETS)
            params = NormParams(
                reduce, residual[part].data_ptr(), normed[part].data_ptr(), weight.data_ptr(), eps, hidden
            )  # fmt: skip
            self._launch("all_reduce_lamport_norm", x.dtype, x[part].shape[0], threads, params)
        return normed

    def all_reduce_one_shot(self, x: torch.Tensor, out: torch.Tensor | None = None, threads: int = 512) -> torch.Tensor:
        out = x if out is None else out
        self._check(x, out)
        room = self.capacity.one_shot_bytes // x.element_size()
        for start in range(0, x.numel(), room):
            source, target = x.view(-1)[start : start + room], out.view(-1)[start : start + room]
            units = -(-source.numel() * x.element_size() // UNIT_BYTES)
            params = OneShotParams(
                source.data_ptr(), target.data_ptr(), self._addresses("one_shot_parts"), self._addresses("one_shot_flags"),
                self._epochs(2), self.watch.params, source.numel(), self.capacity.one_shot_bytes // UNIT_BYTES,
                self.rank, self.size, _is_aligned(8, source, target),
            )  # fmt: skip
            self._launch("all_reduce_one_shot", x.dtype, min(ONE_SHOT_CTAS, -(-units // threads)), threads, params)
        return out

    def all_reduce_two_shot(self, x: torch.Tensor, out: torch.Tensor | None = None, threads: int = 512) -> torch.Tensor:
        out = x if out is None else out
        self._check(x, out)
        room = self.capacity.two_shot_bytes // x.element_size()
        for start in range(0, x.numel(), room):
            source, target = x.view(-1)[start : start + room], out.view(-1)[start : start + room]
            vectors = -(-source.numel() * x.element_size() // 16)
            is_aligned = _is_aligned(16, source, target) and source.numel() * x.element_size() % 16 == 0
            params = TwoShotParams(
                source.data_ptr(), target.data_ptr(), self._addresses("two_shot_parts"), self._addresses("two_shot_flags"),
                self._epochs(3), self.watch.params, source.numel(), self.capacity.two_shot_bytes // 16,
                self.rank, self.size, TWO_SHOT_CTAS, is_aligned,
            )  # fmt: skip
            ctas = min(TWO_SHOT_CTAS, max(1, -(-vectors // (self.size * threads))))
            self._launch("all_reduce_two_shot", x.dtype, ctas, threads, params)
        return out

    def _lamport_params(self, inbox: str, bank: int, x: torch.Tensor, out: torch.Tensor, packets: int) -> LamportParams:
        return LamportParams(
            x.data_ptr(), out.data_ptr(), self._addresses(inbox), self._epochs(bank), self.watch.params, x.numel(),
            self.rank, self.size, LAMPORT_CTAS, packets, _is_aligned(8, x, out),
        )  # fmt: skip

    def _addresses(self, region: str) -> Any:
        return _Pointers(*(self.heap.address(peer, region) for peer in range(self.size)))

    def _epochs(self, bank: int) -> int:
        return self.heap.address(self.rank, "epochs") + bank * 4 * LAMPORT_CTAS

    def _launch(self, name: str, dtype: torch.dtype, ctas: int, threads: int, params: ctypes.Structure) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name, dtype].launch(ctas, threads, (params,), stream, is_pdl=self.is_pdl)

    def _check(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            if not tensor.is_cuda or not tensor.is_contiguous() or tensor.dtype not in ELEMS:
                raise TypeError(
                    f"a collective needs contiguous bf16, fp16 or fp32 tensors on a GPU, not {tensor.dtype} on {tensor.device}"
                )
            if tensor.dtype != tensors[0].dtype:
                raise TypeError(f"the tensors of a collective have one dtype, not {tensors[0].dtype} and {tensor.dtype}")


def _is_aligned(num_bytes: int, *tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % num_bytes == 0 for tensor in tensors)
