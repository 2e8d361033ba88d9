"""All-reduces of ranks on GPUs of one machine, launched on a stream, capturable in a graph, never waiting for the host.

One instance a rank. Every method is *collective* and *asynchronous*: it enqueues kernels on torch's current stream and returns.
All ranks must enqueue the same calls with the same shapes in the same order. Call numbers live in device memory, so a captured
graph can be replayed any number of times, mixed with eager calls.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comm.device_checks import UNIT_BYTES, WARP, check_norm, check_sum, check_tensors, check_threads, is_aligned
from comm.device_params import (
    LamportParams,
    NormParams,
    OneShotParams,
    Pointers,
    SentinelParams,
    TwoShotNormParams,
    TwoShotParams,
)
from comm.device_vocabulary import vocabulary_regions
from comm.device_watch import DeviceWatch
from comm.draft_channels import draft_regions
from comm.heap import DeviceHeap, Layout, Region

SOURCES = Path(__file__).parent / "cuda"
PACKET_BYTES = 16
LAMPORT_CTAS, LAMPORT_THREADS = 64, 256
CTA_PACKETS = 2048  # of one CTA and source
SENTINEL_CTAS, CTA_VECTORS = 128, 1024
SENTINEL_THREADS = ((512 << 10, 256), (sys.maxsize, 512))  # largest message in bytes, threads that were fastest up to there
NORM_ROWS, NORM_CTAS, NORM_THREADS = 32, 8, 256  # rows a call, most CTAs a row, threads a CTA
NORM_UNITS, NORM_PACKETS = 4, 1024  # most units a thread, packets a CTA
ONE_SHOT_CTAS, TWO_SHOT_CTAS = 32, 128
ROWS_CTAS, ROWS_THREADS, ROWS_VECTORS = 256, 512, 2  # of the norm of many rows: at most so many vectors a thread
ONE_SHOT_THREADS, TWO_SHOT_THREADS = 512, 512
# Where ranks share a GPU, the kernels of all of them, and as many that have started early, take no more of it than this, so that
# each has a place however many registers it uses.
SHARED_THREADS_PER_SM = 512
# A CTA counts as a whole SM's: there are then SMs on which none of the others' waits. A product that fills an SM's memory finds
# no place beside the smallest of them, and a rank that still has to multiply would be waited for by those that keep it from it.
MIN_SHARED_THREADS = SHARED_THREADS_PER_SM
EPOCH_BANKS, EPOCH_WORDS = 7, 256  # counters of each kind of call, one a CTA


@dataclass(frozen=True)
class Capacity:
    """Largest messages, in bytes: of one one-shot call and of one two-shot call; longer ones go in several calls. `rows_bytes`:
    of the rows that are summed and normed in two shots, no more than one call's."""

    one_shot_bytes: int = 1 << 20
    two_shot_bytes: int = 64 << 20
    rows_bytes: int = 64 << 20

    def two_shot_cta_vectors(self, size: int) -> int:
        """16-byte vectors that one CTA holds of one rank's share, in whole rounds of its threads."""
        share = -(-self.two_shot_bytes // 16 // size)
        return -(-share // (TWO_SHOT_CTAS * TWO_SHOT_THREADS)) * TWO_SHOT_THREADS


def layout_for(size: int, capacity: Capacity = Capacity()) -> Layout:
    """The heap that `DeviceCollectives`, `DeviceVocabulary` and the channels of drafts of `size` ranks need."""
    return Layout.of(
        [
            Region("lamport_inbox", 2 * size * LAMPORT_CTAS * CTA_PACKETS * PACKET_BYTES),
            Region("norm_inbox", 2 * size * NORM_ROWS * NORM_CTAS * NORM_PACKETS * PACKET_BYTES),
            Region("sentinel_inbox", 3 * size * SENTINEL_CTAS * CTA_VECTORS * 16),
            Region("one_shot_parts", 2 * capacity.one_shot_bytes),
            Region("one_shot_flags", ONE_SHOT_CTAS * size * 4),
            Region("two_shot_parts", 2 * TWO_SHOT_CTAS * size * capacity.two_shot_cta_vectors(size) * 16),
            Region("two_shot_flags", 2 * TWO_SHOT_CTAS * size * 4),
            Region("rows_summands", capacity.rows_bytes),
            Region("rows_normed", capacity.rows_bytes),
            Region("rows_flags", 2 * ROWS_CTAS * size * 4),
            Region("epochs", EPOCH_BANKS * EPOCH_WORDS * 4),
        ],
        vocabulary_regions(size),
        draft_regions(size),
    )


class DeviceCollectives:
    """`kernels[name, dtype]` are the compiled entry points; `heap` has the layout of `layout_for`."""

    def __init__(
        self,
        heap: DeviceHeap,
        watch: DeviceWatch,
        kernels: Any,
        capacity: Capacity = Capacity(),
        is_pdl: bool = True,
        ranks_per_gpu: int = 1,
    ):
        """`ranks_per_gpu` above 1 (under MPS) takes smaller grids: a kernel spins until its peers' kernels answer, so those of
        all ranks of a GPU must fit on it together, beside one of each rank that has started early behind work that waits for
        nobody.
        """
        self._most_threads = None
        if ranks_per_gpu > 1:
            num_sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
            self._most_threads = num_sms * SHARED_THREADS_PER_SM // (2 * ranks_per_gpu)
        self.heap, self.watch, self.capacity, self.is_pdl = heap, watch, capacity, is_pdl
        self.rank, self.size = heap.rank, heap.size
        self._kernels = kernels
        heap.fill("sentinel_inbox", 0xFF)

    def all_reduce_lamport(
        self, x: torch.Tensor, out: torch.Tensor | None = None, threads: int = LAMPORT_THREADS
    ) -> torch.Tensor:
        """Sum of `x` over the ranks into `out` (default: in place). Messages beyond one call's room go in several.

        *Raises*, like all of these, `TypeError` for tensors that are not on a GPU, contiguous and of one of the three dtypes, and
        `ValueError` for sizes and alignments that do not fit, before anything is enqueued.
        """
        out = x if out is None else out
        check_sum(x, out)
        check_threads(threads)
        room = self._most(LAMPORT_CTAS, threads) * CTA_PACKETS * UNIT_BYTES // x.element_size()
        for start in range(0, x.numel(), room):
            self._lamport_once(x.view(-1)[start : start + room], out.view(-1)[start : start + room], threads)
        return out

    def _lamport_once(self, x: torch.Tensor, out: torch.Tensor, threads: int) -> None:
        units = -(-x.numel() * x.element_size() // UNIT_BYTES)
        ctas = min(self._most(LAMPORT_CTAS, threads), -(-units // threads))
        params = self._lamport_params("lamport_inbox", 0, x, out, LAMPORT_CTAS, CTA_PACKETS)
        self._launch("all_reduce_lamport", x.dtype, ctas, threads, params)

    def all_reduce_sentinel(
        self, x: torch.Tensor, out: torch.Tensor | None = None, threads: int | None = None
    ) -> torch.Tensor:
        """As `all_reduce_lamport`, for larger messages: half the bytes, and what was read is cleared."""
        out = x if out is None else out
        check_sum(x, out)
        if threads is None:
            threads = next(threads for most, threads in SENTINEL_THREADS if x.numel() * x.element_size() <= most)
        check_threads(threads)
        most = self._most(SENTINEL_CTAS, threads)
        room = most * CTA_VECTORS * 16 // x.element_size()
        for start in range(0, x.numel(), room):
            source, target = x.view(-1)[start : start + room], out.view(-1)[start : start + room]
            vectors = -(-source.numel() * x.element_size() // 16)
            params = SentinelParams(
                source.data_ptr(), target.data_ptr(), self._addresses("sentinel_inbox"), self._epochs(4), self._epochs(5),
                self.watch.params, source.numel(), self.rank, self.size, SENTINEL_CTAS, CTA_VECTORS,
                is_aligned(16, source, target),
            )  # fmt: skip
            self._launch("all_reduce_sentinel", x.dtype, min(most, -(-vectors // threads)), threads, params)
        return out

    def all_reduce_lamport_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        normed: torch.Tensor,
        threads: int = NORM_THREADS,
        ctas: int = NORM_CTAS,
        is_next_early: bool = False,
    ) -> torch.Tensor:
        """`residual += sum of x over the ranks; normed = RMSNorm(residual) * weight`, all `[rows, hidden]` of one dtype.

        `x` may also be fp32 `[num_parts, rows, hidden]`, aligned to 16 bytes: parts that are added in order and rounded first.
        A row fills whole units of 8 bytes, and the tensors are aligned to that. A cluster of up to `ctas` CTAs of up to `threads`
        threads takes a row. Rows beyond one call's go in several. `is_next_early`: the kernel behind has work that needs nothing
        of this one, such as reading weights, and may start at once; heeded where no rank shares the GPU.
        """
        check_norm(x, residual, weight, normed)
        rows, hidden = residual.shape
        ctas, threads = norm_grid(hidden * residual.element_size() // UNIT_BYTES, ctas, threads)
        room = self._most(NORM_ROWS, ctas * max(threads, MIN_SHARED_THREADS))
        for start in range(0, rows, room):
            part = slice(start, min(start + room, rows))
            own = x[part] if x.dim() == 2 else residual[part]  # of parts, only the shape is used
            reduce = self._lamport_params("norm_inbox", 1, own, normed[part], NORM_ROWS * NORM_CTAS, NORM_PACKETS)
            parts = (0, 0, 0) if x.dim() == 2 else (x[0, part].data_ptr(), rows * hidden, x.shape[0])
            params = NormParams(
                reduce, residual[part].data_ptr(), normed[part].data_ptr(), weight.data_ptr(), eps, hidden, *parts,
                is_next_early,
            )  # fmt: skip
            self._launch("all_reduce_lamport_norm", residual.dtype, own.shape[0] * ctas, threads, params, cluster=ctas)
        return normed

    def all_reduce_one_shot(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x if out is None else out
        check_sum(x, out)
        cta_units = self.capacity.one_shot_bytes // UNIT_BYTES // ONE_SHOT_CTAS
        most = self._most(ONE_SHOT_CTAS, ONE_SHOT_THREADS)
        room = most * cta_units * UNIT_BYTES // x.element_size()
        for start in range(0, x.numel(), room):
            source, target = x.view(-1)[start : start + room], out.view(-1)[start : start + room]
            units = -(-source.numel() * x.element_size() // UNIT_BYTES)
            params = OneShotParams(
                source.data_ptr(), target.data_ptr(), self._addresses("one_shot_parts"), self._addresses("one_shot_flags"),
                self._epochs(2), self.watch.params, source.numel(), self.rank, self.size, ONE_SHOT_CTAS,
                cta_units, is_aligned(8, source, target),
            )  # fmt: skip
            ctas = min(most, -(-units // ONE_SHOT_THREADS))
            self._launch("all_reduce_one_shot", x.dtype, ctas, ONE_SHOT_THREADS, params)
        return out

    def all_reduce_two_shot(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        out = x if out is None else out
        check_sum(x, out)
        most = self._most(TWO_SHOT_CTAS, TWO_SHOT_THREADS)
        room = most * self.size * self.capacity.two_shot_cta_vectors(self.size) * 16 // x.element_size()
        for start in range(0, x.numel(), room):
            source, target = x.view(-1)[start : start + room], out.view(-1)[start : start + room]
            vectors = -(-source.numel() * x.element_size() // 16)
            is_whole = is_aligned(16, source, target) and source.numel() * x.element_size() % 16 == 0
            params = TwoShotParams(
                source.data_ptr(), target.data_ptr(), self._addresses("two_shot_parts"), self._addresses("two_shot_flags"),
                self._epochs(3), self.watch.params, source.numel(), self.rank, self.size, TWO_SHOT_CTAS,
                self.capacity.two_shot_cta_vectors(self.size), is_whole,
            )  # fmt: skip
            ctas = min(most, -(-vectors // (self.size * TWO_SHOT_THREADS)))
            self._launch("all_reduce_two_shot", x.dtype, ctas, TWO_SHOT_THREADS, params)
        return out

    def summands(self, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Where this rank puts what `all_reduce_two_shot_norm` is to sum: `[rows, hidden]` in the heap, the same memory each
        time. None where the rows are too many or too wide."""
        row_bytes = hidden * dtype.itemsize
        if rows * row_bytes > self.capacity.rows_bytes or row_bytes % 16 or row_bytes > 16 * ROWS_VECTORS * ROWS_THREADS:
            return None
        return self.heap.own_tensor("rows_summands", (rows, hidden), dtype)

    def all_reduce_two_shot_norm(
        self, summands: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """As `all_reduce_lamport_norm`, for many rows: `summands` is what the method of that name gave, filled. The `residual` of
        a row is brought up to date on one rank alone: rank r has rows r * share to (r + 1) * share, where share is rows / size,
        rounded up.

        Returns the normed rows, all of them, in the heap: good until the next call.
        """
        rows, hidden = residual.shape
        normed = self.heap.own_tensor("rows_normed", (rows, hidden), residual.dtype)
        check_tensors(summands, residual, normed, weight)
        if summands.data_ptr() != self.heap.address(self.rank, "rows_summands") or summands.shape != residual.shape:
            raise ValueError(f"the sum of many rows takes what `summands` gives, [{rows}, {hidden}] in the heap")
        if weight.shape != (hidden,) or not is_aligned(16, residual, weight):
            raise ValueError(f"the norm of many rows takes weight [{hidden}], and tensors aligned to 16 bytes")
        vectors = hidden * residual.element_size() // 16
        threads = min(ROWS_THREADS, -(-vectors // WARP) * WARP)
        params = TwoShotNormParams(
            self._addresses("rows_summands"), self._addresses("rows_normed"), self._addresses("rows_flags"),
            residual.data_ptr(), weight.data_ptr(), self._epochs(6), self.watch.params, rows, vectors, self.rank, self.size,
            ROWS_CTAS, eps,
        )  # fmt: skip
        ctas = self._most(min(ROWS_CTAS, -(-rows // self.size)), threads)
        self._launch("all_reduce_two_shot_norm", residual.dtype, ctas, threads, params)
        return normed

    def _lamport_params(
        self, inbox: str, bank: int, x: torch.Tensor, out: torch.Tensor, max_ctas: int, packets: int
    ) -> LamportParams:
        return LamportParams(
            x.data_ptr(), out.data_ptr(), self._addresses(inbox), self._epochs(bank), self.watch.params, x.numel(),
            self.rank, self.size, max_ctas, packets, is_aligned(8, x, out),
        )  # fmt: skip

    def _most(self, ctas: int, threads: int) -> int:
        """The largest grid of CTAs of `threads` threads that this rank may launch, of at most `ctas`."""
        if self._most_threads is None:
            return ctas
        return max(1, min(ctas, self._most_threads // max(threads, MIN_SHARED_THREADS)))

    def _addresses(self, region: str) -> Any:
        return Pointers(*(self.heap.address(peer, region) for peer in range(self.size)))

    def _epochs(self, bank: int) -> int:
        return self.heap.address(self.rank, "epochs") + bank * 4 * EPOCH_WORDS

    def _launch(
        self, name: str, dtype: torch.dtype, ctas: int, threads: int, params: ctypes.Structure, cluster: int = 1
    ) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernels[name, dtype].launch(ctas, threads, (params,), stream, cluster=cluster, is_pdl=self.is_pdl)


def norm_grid(units: int, max_ctas: int = NORM_CTAS, max_threads: int = NORM_THREADS) -> tuple[int, int]:
    """CTAs of a row's cluster, and threads of each, for a row of `units` units. Every CTA gets at least one warp of them.

    *Raises* `ValueError` for a row that is too long.
    """
    ctas = next(ctas for ctas in (8, 4, 2, 1) if ctas <= max_ctas and (ctas - 1) * WARP < units or ctas == 1)
    warps = -(-units // (WARP * ctas))
    threads = min(max_threads, warps * WARP)
    if -(-units // (ctas * threads)) * threads > min(NORM_PACKETS, NORM_UNITS * threads):
        raise ValueError(f"a row of {units * UNIT_BYTES} bytes is too long for a norm of {ctas} CTAs of {threads} threads")
    return ctas, threads
