"""A vocabulary split over ranks on GPUs of one machine: arg-max, draw and gather, launched on a stream, with no wait of the host.

One instance a rank. Every method is *collective* and *asynchronous*, as those of `DeviceCollectives`: all ranks enqueue the same
calls with the same shapes in the same order on torch's current stream; call numbers live in device memory, so graphs can be
replayed, mixed with eager calls. A world of one works like any other. The plain version is `comm/vocabulary.py`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from comm.device_params import Pointers
from comm.device_watch import DeviceWatch, WatchParams
from comm.heap import DeviceHeap, Region
from comm.vocabulary import DrawOptions

UNIT_BYTES, PACKET_BYTES = 8, 16
ROWS, ROW_CTAS = 64, 128  # rows a call, most CTAs a row
ARGMAX_THREADS = 256
ARGMAX_CTAS = 512  # a call; 132 SMs hold 792 of 256 threads and 40 registers at once
SHARED_ARGMAX_CTAS = 128  # of all ranks of a GPU that share it: fewer than it has SMs (`comm/device_collectives.py`)
GATHER_CTAS, GATHER_THREADS, GATHER_PACKETS = 64, 512, 2048  # packets of one CTA and source
EVERY_RANK = 0xFFFFFFFF


class ArgmaxParams(ctypes.Structure):
    """Of `comm/cuda/argmax_lamport.cu`, like the next one."""

    _fields_ = [
        ("logits", ctypes.c_uint64), ("ids", ctypes.c_uint64), ("values", ctypes.c_uint64), ("inbox", Pointers),
        ("epochs", ctypes.c_uint64), ("watch", WatchParams), ("pitch", ctypes.c_int64), ("num_valid", ctypes.c_uint32),
        ("first_id", ctypes.c_uint32), ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32), ("row_ctas", ctypes.c_uint32),
        ("max_rows", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32),
    ]  # fmt: skip


class DrawParams(ctypes.Structure):
    _fields_ = [
        ("argmax", ArgmaxParams), ("temperatures", ctypes.c_uint64), ("starts", ctypes.c_uint64),
        ("positions", ctypes.c_uint64), ("window", ctypes.c_uint32),
    ]  # fmt: skip


class GatherParams(ctypes.Structure):
    """Of `comm/cuda/gather_lamport.cu`."""

    _fields_ = [
        ("x", ctypes.c_uint64), ("out", ctypes.c_uint64), ("inbox", Pointers), ("epochs", ctypes.c_uint64),
        ("watch", WatchParams), ("first", ctypes.c_int64), ("num_elems", ctypes.c_int64), ("local", ctypes.c_int64),
        ("root", ctypes.c_uint32), ("rank", ctypes.c_uint32), ("size", ctypes.c_uint32), ("max_ctas", ctypes.c_uint32),
        ("cta_packets", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32), ("is_packed", ctypes.c_uint32),
    ]  # fmt: skip


def vocabulary_regions(size: int) -> tuple[Region, ...]:
    """What `DeviceVocabulary` of `size` ranks needs of the heap."""
    return (
        Region("argmax_inbox", 2 * size * ROWS * ROW_CTAS * 2 * PACKET_BYTES),
        Region("argmax_epochs", ROWS * 4),
        Region("gather_inbox", 2 * size * GATHER_CTAS * GATHER_PACKETS * PACKET_BYTES),
        Region("gather_epochs", GATHER_CTAS * 4),
    )


def row_chunks(num_rows: int, share: int) -> Iterator[slice]:
    """The rows of each call. `share`: into how many parts the GPU is cut (see `DeviceVocabulary`)."""
    room = max(1, ROWS // share)
    for start in range(0, num_rows, room):
        yield slice(start, min(start + room, num_rows))


def ctas_a_row(num_rows: int, local_vocab: int, cta_elems: int, share: int) -> int:
    """CTAs that scan a row when `num_rows` go in one call and a CTA takes `cta_elems` elements a round. The same on all ranks:
    it follows from the padded width."""
    most = max(1, (ARGMAX_CTAS if share == 1 else SHARED_ARGMAX_CTAS) // share // num_rows)
    return max(1, min(ROW_CTAS, most, -(-local_vocab // cta_elems)))


def gather_chunks(num_elems: int, elem_bytes: int, share: int) -> Iterator[tuple[int, int, int]]:
    """(first element, elements, CTAs) of each call. All first elements are at unit borders."""
    most = max(1, GATHER_CTAS // share)
    room = most * GATHER_PACKETS * UNIT_BYTES // elem_bytes
    for first in range(0, num_elems, room):
        count = min(room, num_elems - first)
        units = -(-count * elem_bytes // UNIT_BYTES)
        yield first, count, min(most, -(-units // GATHER_THREADS))


class DeviceVocabulary:
    """`heap` has the regions of `vocabulary_regions`; `kernels[name, dtype]` are the compiled entry points.

    `ranks_per_gpu` above 1 (under MPS) takes smaller grids and fewer rows a call, for the reason given at `DeviceCollectives`.
    """

    def __init__(self, heap: DeviceHeap, watch: DeviceWatch, kernels: Any, is_pdl: bool = True, ranks_per_gpu: int = 1):
        self.rank, self.size = heap.rank, heap.size
        self._heap, self._watch, self._kernels, self._is_pdl = heap, watch, kernels, is_pdl
        self._share = 1 if ranks_per_gpu == 1 else 2 * ranks_per_gpu

    def argmax(
        self,
        logits: torch.Tensor,
        first_id: int,
        num_valid: int,
        ids: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Id of the highest logit of each row over all ranks, on every rank.

        `logits` `[rows, local_vocab]` bf16, fp16 or fp32, each row contiguous at any alignment and pitch: this rank's columns, of
        which column 0 is id `first_id` and the first `num_valid` count; the others are not read. `ids` int64 `[rows]`: the
        result, returned (default: a new tensor). `values` fp32 `[rows]`: the logits of these ids, if wanted.

        *Numbers*: those of `torch.argmax` over the whole rows: the lowest id among equals, NaN above everything, -0.0 equal to
        0.0. *Raises* `TypeError`, `ValueError` for operands that do not fit.
        """
        return self._choose(logits, first_id, num_valid, None, ids, values)

    def draw(
        self,
        logits: torch.Tensor,
        first_id: int,
        num_valid: int,
        options: DrawOptions,
        ids: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `argmax`, with each row drawn by its temperature: the highest logit / temperature + Gumbel noise, in fp64.

        `options`: on the GPU, read when the kernel runs, so a replayed graph sees what is in them then. The draw of
        `engine.sampler` with no filter, up to rounding (1e-6 where fp32 logits differ by rounding when the maximum is taken
        off). A chosen logit that is not finite says that there was nothing to choose from.
        """
        return self._choose(logits, first_id, num_valid, options, ids, values)

    def gather(self, x: torch.Tensor, root: int | None = None, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """All ranks' `x` `[..., n]` side by side along the last dimension, in rank order, on `root` (None: on every rank).

        `x`: bf16, fp16 or fp32, contiguous, at any alignment. `out` `[..., size * n]`: the result (default: a new tensor).
        Returns it where it is, None on the other ranks. *Cost*: twice the bytes of `x` to every rank that receives; a
        message beyond one call's room goes in several. *Order*: no rank leaves before every rank has come.
        """
        self._check("gather_lamport", x)
        if root is not None and not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of a world of {self.size}")
        if not x.is_contiguous() or x.dim() == 0:
            raise ValueError(f"a gather needs a contiguous tensor of at least one dimension, not shape {tuple(x.shape)}")
        is_receiver = root is None or root == self.rank
        shape = (*x.shape[:-1], self.size * x.shape[-1])
        if is_receiver and out is None:
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        if is_receiver and (out.shape != shape or out.dtype != x.dtype or not out.is_cuda or not out.is_contiguous()):
            raise ValueError(f"the result of this gather is a contiguous {shape} of {x.dtype} on the GPU")
        for first, count, ctas in gather_chunks(x.numel(), x.element_size(), self._share):
            self._launch("gather_lamport", x.dtype, ctas, GATHER_THREADS, self._gather_params(x, out, root, first, count))
        return out if is_receiver else None

    def _gather_params(
        self, x: torch.Tensor, out: torch.Tensor | None, root: int | None, first: int, count: int
    ) -> GatherParams:
        target = 0 if out is None else out.data_ptr()
        is_packed = target % UNIT_BYTES == 0 and x.shape[-1] * x.element_size() % UNIT_BYTES == 0
        return GatherParams(
            x.data_ptr(), target, self._addresses("gather_inbox"), self._heap.address(self.rank, "gather_epochs"),
            self._watch.params, first, count, x.shape[-1], EVERY_RANK if root is None else root, self.rank, self.size,
            GATHER_CTAS, GATHER_PACKETS, x.data_ptr() % UNIT_BYTES == 0, is_packed,
        )  # fmt: skip

    def _choose(
        self,
        logits: torch.Tensor,
        first_id: int,
        num_valid: int,
        options: DrawOptions | None,
        ids: torch.Tensor | None,
        values: torch.Tensor | None,
    ) -> torch.Tensor:
        name = "argmax_lamport" if options is None else "draw_lamport"
        self._check(name, logits)
        rows, local_vocab = logits.shape
        if logits.stride(1) != 1 and local_vocab > 1:
            raise ValueError(f"the columns of logits must be contiguous, not at strides {logits.stride()}")
        if not 0 <= num_valid <= local_vocab or not 0 <= first_id < 1 << 31:
            raise ValueError(f"{num_valid} valid columns from id {first_id} on do not fit {local_vocab} columns")
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device) if ids is None else ids
        _check_vectors(rows, ids=(ids, torch.int64), values=(values, torch.float32))
        if options is not None:
            _check_options(rows, options)
        # Noise costs more than a load, so a draw spreads over more CTAs.
        cta_elems = ARGMAX_THREADS * (16 // logits.element_size() if options is None else 1)
        for part in row_chunks(rows, self._share):
            count = part.stop - part.start
            row_ctas = ctas_a_row(count, local_vocab, cta_elems, self._share)
            params = ArgmaxParams(
                logits[part].data_ptr(), ids[part].data_ptr(), 0 if values is None else values[part].data_ptr(),
                self._addresses("argmax_inbox"), self._heap.address(self.rank, "argmax_epochs"), self._watch.params,
                logits.stride(0), num_valid, first_id, self.rank, self.size, row_ctas, ROWS, ROW_CTAS,
            )  # fmt: skip
            if options is not None:
                params = _draw_params(params, options, part)
            self._launch(name, logits.dtype, count * row_ctas, ARGMAX_THREADS, params)
        return ids

    def _addresses(self, region: str) -> Any:
        return Pointers(*(self._heap.address(peer, region) for peer in range(self.size)))

    def _launch(self, name: str, dtype: torch.dtype, ctas: int, threads: int, params: ctypes.Structure) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name, dtype].launch(ctas, threads, (params,), stream, is_pdl=self._is_pdl)

    def _check(self, name: str, x: torch.Tensor) -> None:
        if not x.is_cuda or (name, x.dtype) not in self._kernels:
            raise TypeError(f"{name} takes bf16, fp16 or fp32 tensors on a GPU, not {x.dtype} on {x.device}")


def _draw_params(params: ArgmaxParams, options: DrawOptions, part: slice) -> DrawParams:
    positions = 0 if options.positions is None else options.positions[part].data_ptr()
    window = options.starts.shape[1]
    return DrawParams(params, options.temperatures[part].data_ptr(), options.starts[part].data_ptr(), positions, window)


def _check_options(rows: int, options: DrawOptions) -> None:
    _check_vectors(
        rows, temperatures=(options.temperatures, torch.float64), positions=(options.positions, torch.int64)
    )
    starts = options.starts
    if starts.dim() != 2 or starts.shape[0] != rows or not starts.shape[1] or not starts.is_contiguous():
        raise ValueError(f"starts must be contiguous [{rows}, window], not {tuple(starts.shape)}")
    if starts.dtype != torch.int64 or not starts.is_cuda:
        raise TypeError(f"starts must be int64 on a GPU, not {starts.dtype} on {starts.device}")


def _check_vectors(rows: int, **vectors: tuple[torch.Tensor | None, torch.dtype]) -> None:
    for name, (vector, dtype) in vectors.items():
        if vector is None:
            continue
        if vector.dtype != dtype or not vector.is_cuda:
            raise TypeError(f"{name} must be {dtype} on a GPU, not {vector.dtype} on {vector.device}")
        if vector.shape != (rows,) or not vector.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{rows}], not {tuple(vector.shape)}")
