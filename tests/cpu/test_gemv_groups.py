"""How `gemv_groups` deals a product out, and which way a product is made."""

from __future__ import annotations

import ctypes
import json

import pytest

from kernels.gemv_choice import LIBRARY, TABLE, WAYS, Product, likely_ways, measured_way
from kernels.gemv_groups import BOX, COLUMNS, MAX_SHARED_BYTES, MAX_SLOTS, TILE, GemvGroupsParams, plan_groups
from kernels.gemv_rows import plan_rows

# (out, in) of Qwen2.5's products at several degrees, and odd ones.
SHAPES = (
    (1152, 896), (896, 4864), (151936, 896), (3584, 18944), (8192, 8192), (8192, 14784), (8192, 3696), (8192, 1024),
    (1280, 8192), (37, 128), (3, 8192), (50, 608), (33, 272), (1, 64), (5, 16),
)  # fmt: skip


@pytest.mark.parametrize("num_ctas", (264, 132, 12))
@pytest.mark.parametrize("elem_bytes", (1, 2))
@pytest.mark.parametrize("rows", (1, 2, 4))
def test_every_row_is_dealt_once_and_fits(rows, elem_bytes, num_ctas):
    for out, inner in SHAPES:
        for is_gate_up in (False, True):
            plan = plan_groups(rows, inner, out, elem_bytes, num_ctas, is_gate_up)
            assert plan is not None, (out, inner)
            halves = 1 + is_gate_up
            assert (plan.tiles - 1) * plan.box_rows < out <= plan.tiles * plan.box_rows
            assert (plan.boxes - 1) * BOX < inner * elem_bytes <= plan.boxes * BOX
            assert halves * plan.half_rows <= TILE and 0 <= plan.half_rows - plan.box_rows < 8
            assert 0 < plan.ctas <= min(num_ctas, plan.tiles)
            # A slot is always of the same warpgroup, and aligned as the swizzle wants it.
            assert plan.slots % 2 == 0 and 0 < plan.slots <= MAX_SLOTS
            assert plan.slot_bytes == halves * plan.half_rows * BOX and plan.slot_bytes % 1024 == 0
            # x, the scales of its pieces, and what a product reads behind its last row and column.
            columns = rows * (2 if elem_bytes == 1 else 1)
            x_bytes = plan.boxes * BOX * columns + (plan.boxes * rows * 4 if elem_bytes == 1 else 0)
            ring_bytes = plan.slots * plan.slot_bytes
            assert ring_bytes + x_bytes + COLUMNS * 16 <= plan.shared_bytes <= MAX_SHARED_BYTES
            assert ring_bytes - plan.slot_bytes + TILE * BOX <= plan.shared_bytes


def test_no_more_is_under_way_than_there_are_slots():
    """A wait for what is under way would miss its phase."""
    for num_bytes in (0, 10_000, 64 << 10, 1 << 30):
        groups, rows = plan_groups(1, 3584, 4608, 1, 132), plan_rows(1, 3584, 4608, 1, 132)
        for other_bytes in (0, 40 << 10, 1 << 30):
            for plan, slots in ((groups, groups.slots // groups.groups), (rows, rows.slots)):
                paced = plan.paced(num_bytes, other_bytes)
                assert 1 <= paced.in_flight_first <= paced.in_flight <= slots == plan.in_flight == plan.in_flight_first


def test_what_the_kernel_cannot_do_has_no_plan():
    assert plan_groups(9, 896, 64, 2, 132) is None
    assert plan_groups(5, 896, 64, 1, 132) is None, "an e4m3 weight takes two columns a row"
    assert plan_groups(1, 20, 64, 2, 132) is None, "no whole vectors of 16 bytes"
    assert plan_groups(8, 29568, 8192, 2, 132) is None, "more of x than there is shared memory"
    assert plan_groups(1, 896, 64, 2, 132, False, 2) is None


def test_the_structure_is_a_multiple_of_its_alignment():
    assert ctypes.sizeof(GemvGroupsParams) % 64 == 0


def test_the_table_names_ways_and_shapes_that_exist():
    table = json.loads(TABLE.read_text())["ways"]
    assert set(table.values()) <= {*WAYS, LIBRARY}
    assert not [key for key, way in table.items() if key.startswith("fp8") and way == LIBRARY]


def test_rows_count_as_the_next_measured_number():
    keys = [Product(rows, 64, 128, 2, False).key for rows in (1, 2, 3, 5, 8, 9, 16)]
    assert keys == [f"bf16 {rows} 64x128" for rows in (1, 2, 4, 8, 8, 16, 16)]
    assert Product(17, 64, 128, 2, False).key is None
    assert Product(1, 64, 128, 1, True).key == "fp8 1 2x64x128"


def test_a_shape_that_was_not_measured_has_likely_ways():
    for elem_bytes in (1, 2):
        for rows in (1, 2, 8, 16):
            product = Product(rows, 17, 48, elem_bytes, False)
            assert measured_way(product) is None and set(likely_ways(product)) <= set(WAYS)
