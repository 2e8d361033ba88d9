"""Launches `gemv_groups.cu`: x @ weight.T for a few rows of x, multiplied by Hopper's warpgroup instructions."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import ClassVar

from kernels.build import HEADERS, Build
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).parent / "gemv_groups.cu"
GROUP, MAX_SLOTS, BOX, TILE, COLUMNS = 128, 32, 128, 64, 8  # as in the sources
GROUPS = (2, 4)  # warpgroups that a CTA can have; two CTAs of four do not fit on an SM
MAX_SHARED_BYTES = 200 << 10  # of a CTA; beside it attention still finds room
MIN_RING_BYTES = 40 << 10  # an H200 brings 34 KB an SM in a us, and takes about one to answer
BOX_COST, TILE_COST = 2048, 2048  # what a box takes at least, and a tile besides, as bytes that could be read meanwhile


class GemvGroupsParams(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_uint8 * 128), ("x", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("bias", ctypes.c_uint64),
        ("sums", ctypes.c_uint64), ("product", ctypes.c_uint64), ("rows", ctypes.c_uint32), ("in_", ctypes.c_uint32),
        ("out", ctypes.c_uint32), ("tiles", ctypes.c_uint32), ("boxes", ctypes.c_uint32), ("box_rows", ctypes.c_uint32),
        ("half_rows", ctypes.c_uint32), ("slots", ctypes.c_uint32), ("slot_bytes", ctypes.c_uint32),
        ("in_flight_first", ctypes.c_uint32), ("in_flight", ctypes.c_uint32),
        ("unused", ctypes.c_uint8 * 44),  # up to the map's alignment
    ]  # fmt: skip


@dataclass(frozen=True)
class GroupsPlan:
    """How a product is dealt out: tiles of `box_rows` output rows (of each half) to `ctas` CTAs in turn."""

    ctas: int
    tiles: int
    boxes: int  # of a tile
    box_rows: int
    slots: int
    slot_bytes: int
    shared_bytes: int
    groups: int
    in_flight_first: int  # boxes of a group, until its slots have been filled, up to `in_flight`
    in_flight: int  # behind that, up to its slots

    num_splits: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        return self.groups * (GROUP + 32)

    def paced(self, first_bytes: int, later_bytes: int) -> GroupsPlan:
        """As `RowsPlan.paced`."""
        round_bytes = self.slot_bytes * self.groups
        later = max(1, min(self.slots // self.groups, later_bytes // round_bytes))
        return replace(self, in_flight_first=max(1, min(later, first_bytes // round_bytes)), in_flight=later)

    @property
    def half_rows(self) -> int:
        return _to_8(self.box_rows)


@cache
def plan_groups(
    rows: int, inner: int, out: int, elem_bytes: int, num_ctas: int, is_gate_up: bool = False, num_splits: int | None = None,
    shared_bytes: int = MAX_SHARED_BYTES, groups: int = GROUPS[0],
) -> GroupsPlan | None:  # fmt: skip
    """The best dealing for `rows` rows of x and a weight `[out, inner]` (`out` of each half if `is_gate_up`), or None.

    The time of a product is that of the fullest CTA. `num_ctas`: that the GPU holds at once. `shared_bytes`: of a CTA, exceeded
    where a ring would be too short.
    """
    columns = rows * (2 if elem_bytes == 1 else 1)
    if not 0 < columns <= COLUMNS or inner * elem_bytes % 16 or inner * 2 % 16 or num_splits not in (None, 1):
        return None
    halves, boxes = 1 + is_gate_up, -(-inner * elem_bytes // BOX)
    box_rows = min(range(1, TILE // halves + 1), key=lambda count: _cost(count, out, boxes, halves, num_ctas))
    tiles, slot_bytes = -(-out // box_rows), _to_8(box_rows) * halves * BOX
    # A product reads all rows of a box and all columns, those that nobody filled as well.
    x_bytes = boxes * BOX * columns + (boxes * rows * 4 if elem_bytes == 1 else 0) + COLUMNS * 16
    x_bytes = max(-(-x_bytes // 128) * 128, TILE * BOX - slot_bytes)
    for limit in (shared_bytes, max(shared_bytes, MAX_SHARED_BYTES)):
        slots = min(MAX_SLOTS, (limit - x_bytes) // slot_bytes) // groups * groups
        if slots >= groups and slots * slot_bytes >= MIN_RING_BYTES:
            break
    else:
        if slots < 2 * groups:
            return None
    ctas = min(tiles, num_ctas)
    slots = max(groups, min(slots, -(-(-(-tiles // ctas) * boxes) // groups) * groups))
    total = slots * slot_bytes + x_bytes
    return GroupsPlan(ctas, tiles, boxes, box_rows, slots, slot_bytes, total, groups, slots // groups, slots // groups)


def _to_8(count: int) -> int:
    return -(-count // 8) * 8


def _cost(box_rows: int, out: int, boxes: int, halves: int, num_ctas: int) -> int:
    """What a CTA could read in the time that the product takes, in bytes."""
    tiles = -(-out // box_rows)
    return -(-tiles // min(tiles, num_ctas)) * (boxes * max(box_rows * halves * BOX, BOX_COST) + TILE_COST)


def load_gemv_groups(build: Build) -> dict[tuple[str, bool, bool, int], Kernel]:
    """Kernels by ("groups", is e4m3, is gate and up, groups), on the current GPU."""
    kernels = {}
    for is_fp8 in (False, True):
        for is_gate_up in (False, True):
            for groups in GROUPS:
                variant = {"ELEM": 0, "FP8": int(is_fp8), "GATE_UP": int(is_gate_up), "ROWS": COLUMNS, "GROUPS": groups}
                module = load(build.cubin(SOURCE, [HEADERS], variant), "gemv_groups")
                kernels["groups", is_fp8, is_gate_up, groups] = module.function("gemv_groups", (GemvGroupsParams,))
    return kernels
