"""Launches `gemv_rows.cu`: x @ weight.T for 1 or 2 rows of x, the weights read as one sweep through memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from kernels.build import HEADERS, Build
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).parent / "gemv_rows.cu"
MAX_ROWS = 2
WARPS, MAX_SLOTS, BLOCK, SEGMENTS = 8, 16, 64, 8  # as in gemv_rows.cu; bytes of a block, segments of a row
CHUNK_BYTES = 16 << 10  # of a copy: larger ones were not faster, and the last is multiplied when nothing is read any more
MAX_CHUNK_ROWS = 32  # a lane each
MAX_SHARED_BYTES = 200 << 10  # of a CTA
MIN_RING_BYTES = 48 << 10  # an H200 brings 34 KB an SM in a us, and takes more than one to answer
GOOD_RING_BYTES = 80 << 10  # what is read ahead while the kernel before ends
PART_COST = 0.02  # of a sum by one more part, as a share of the whole: what its reader pays
MAX_WHOLE_BYTES = 8 << 10  # of a row that is not worth cutting
SMALL_CHUNK_BYTES = 2 << 10  # what is less takes no less time
CHUNK_COST = 256  # bytes that could be read while a CTA goes from a chunk to the next


class GemvRowsParams(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_uint64), ("x", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("bias", ctypes.c_uint64),
        ("sums", ctypes.c_uint64), ("product", ctypes.c_uint64), ("in_", ctypes.c_uint32), ("out", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32), ("part_bytes", ctypes.c_uint32), ("segment", ctypes.c_uint32),
        ("chunk_rows", ctypes.c_uint32), ("slots", ctypes.c_uint32), ("in_flight_first", ctypes.c_uint32),
        ("in_flight", ctypes.c_uint32), ("slot_bytes", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class RowsPlan:
    """How a product is dealt out. `ctas`: a multiple of `num_splits`, the parts of a row. A slot takes a chunk of each half."""

    ctas: int
    num_splits: int
    part_bytes: int  # of a weight row
    segment: int  # blocks
    chunk_rows: int
    slots: int
    slot_bytes: int
    shared_bytes: int
    in_flight_first: int  # chunks, until every slot has been filled, up to `in_flight`
    in_flight: int  # behind that, up to `slots`

    threads: ClassVar[int] = (WARPS + 1) * 32

    def paced(self, first_bytes: int, later_bytes: int) -> RowsPlan:
        """The same with at most about so many bytes under way at once, until every slot has been filled and behind that."""
        later = min(self.slots, max(2, later_bytes // self.slot_bytes))
        return replace(self, in_flight_first=min(later, max(2, first_bytes // self.slot_bytes)), in_flight=later)


@cache
def plan_rows(
    rows: int, inner: int, out: int, elem_bytes: int, num_ctas: int, is_gate_up: bool = False, num_splits: int | None = None,
    shared_bytes: int = MAX_SHARED_BYTES,
) -> RowsPlan | None:  # fmt: skip
    """The best dealing for `rows` rows of x and a weight `[out, inner]` (`out` of each half if `is_gate_up`), or None.

    The time of a product is that of the fullest CTA, and of multiplying its last chunk. Only long rows are cut, unless
    `num_splits` says so, and a gate and up product never. `num_ctas`: that the GPU holds at once. `shared_bytes`: of a CTA,
    exceeded where a ring would be too short.
    """
    if not 0 < rows <= MAX_ROWS or inner * elem_bytes % 16 or inner * 2 % 16 or (is_gate_up and num_splits not in (None, 1)):
        return None
    row_bytes, halves = inner * elem_bytes, 1 + is_gate_up
    fewest = -(-row_bytes // CHUNK_BYTES)
    if is_gate_up or row_bytes <= MAX_WHOLE_BYTES:
        parts = (num_splits or 1,)
    else:
        parts = (num_splits,) if num_splits else range(fewest, fewest + 6)
    for limit in (shared_bytes, max(shared_bytes, MAX_SHARED_BYTES)):
        best, least = None, float("inf")
        for part in parts:
            for chunk_rows in range(1, MAX_CHUNK_ROWS + 1) if part == 1 else (1,):
                plan = _dealt(rows, row_bytes, out, elem_bytes, num_ctas, halves, part, chunk_rows, limit)
                if plan is not None and (cost := _cost(plan, row_bytes, out, num_ctas, halves)) < least:
                    best, least = plan, cost
        if best is not None:
            return best
    return None


def _dealt(
    rows: int, row_bytes: int, out: int, elem_bytes: int, num_ctas: int, halves: int, parts: int, chunk_rows: int, limit: int
) -> RowsPlan | None:  # fmt: skip
    """The plan with these parts and rows a chunk, within `limit` bytes of shared memory."""
    part_bytes = -(-row_bytes // (parts * BLOCK)) * BLOCK if parts > 1 else row_bytes
    last_bytes = row_bytes - (parts - 1) * part_bytes
    segment = -(-part_bytes // (SEGMENTS * BLOCK))
    copied = chunk_rows * part_bytes * (halves if chunk_rows > 1 else 1)  # two long rows may share a slot, more may not
    if parts > num_ctas or last_bytes < segment * BLOCK or copied > CHUNK_BYTES:
        return None
    sets = min(-(-out // chunk_rows), num_ctas // parts)
    slot_bytes = -(-chunk_rows * part_bytes // 128) * 128 * halves
    x_bytes = rows * segment * SEGMENTS * BLOCK // elem_bytes * 2
    slots = min(MAX_SLOTS, (limit - x_bytes) // slot_bytes)
    needed = -(-out // (chunk_rows * sets))  # what a CTA has no chunks for is left to other kernels
    if slots < needed and slots * chunk_rows * part_bytes * halves < MIN_RING_BYTES:
        return None
    slots = min(slots, needed)
    total = slots * slot_bytes + x_bytes
    return RowsPlan(sets * parts, parts, part_bytes, segment, chunk_rows, slots, slot_bytes, total, slots, slots)


def _cost(plan: RowsPlan, row_bytes: int, out: int, num_ctas: int, halves: int) -> float:
    """What a CTA could read in the time that the product takes, in bytes."""
    most = -(-out // (plan.chunk_rows * (plan.ctas // plan.num_splits)))
    chunk_bytes = halves * plan.chunk_rows * plan.part_bytes
    whole = PART_COST * plan.num_splits * halves * out * row_bytes / num_ctas
    is_short = plan.slots < most and plan.slots * chunk_bytes < GOOD_RING_BYTES
    border = (GOOD_RING_BYTES - plan.slots * chunk_bytes) / 4 if is_short else 0
    return most * (max(chunk_bytes, SMALL_CHUNK_BYTES) + CHUNK_COST) + chunk_bytes / 2 + whole + border


def load_gemv_rows(build: Build) -> dict[tuple[bool, bool, int], Kernel]:
    """Kernels by (is e4m3, is gate and up, rows), on the current GPU."""
    kernels = {}
    for is_fp8 in (False, True):
        for is_gate_up in (False, True):
            for rows in range(1, MAX_ROWS + 1):
                variant = {"ELEM": 0, "FP8": int(is_fp8), "GATE_UP": int(is_gate_up), "ROWS": rows}
                module = load(build.cubin(SOURCE, [HEADERS], variant), "gemv_rows")
                kernels[is_fp8, is_gate_up, rows] = module.function("gemv_rows", (GemvRowsParams,))
    return kernels
