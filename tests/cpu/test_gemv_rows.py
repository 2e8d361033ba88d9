"""How `gemv_rows` deals a product out: every byte of the weight once, within what the kernel has room for."""

from __future__ import annotations

import pytest

from kernels.gemv_choice import WAYS
from kernels.gemv_rows import BLOCK, CHUNK_BYTES, MAX_SHARED_BYTES, MAX_SLOTS, SEGMENTS, plan_rows

# (out, in) of Qwen2.5's products at several degrees, and odd ones.
SHAPES = (
    (1152, 896), (896, 4864), (151936, 896), (3584, 18944), (8192, 8192), (8192, 29568), (8192, 14784), (8192, 3696),
    (8192, 1024), (1280, 8192), (37, 128), (3, 8192), (50, 608), (33, 272), (1, 64),
)  # fmt: skip


@pytest.mark.parametrize("num_sms", (132, 78, 12))
@pytest.mark.parametrize("elem_bytes", (1, 2))
@pytest.mark.parametrize("rows", (1, 2))
def test_every_byte_is_dealt_once(rows, elem_bytes, num_sms):
    for out, inner in SHAPES:
        for is_gate_up in (False, True):
            plan = plan_rows(rows, inner, out, elem_bytes, num_sms, is_gate_up)
            if is_gate_up and inner * elem_bytes > CHUNK_BYTES:
                assert plan is None  # its parts would have to be added before silu
                continue
            assert plan is not None, (out, inner)
            parts, row_bytes = plan.num_splits, inner * elem_bytes
            begins = [part * plan.part_bytes for part in range(parts)]
            sizes = [min(plan.part_bytes, row_bytes - begin) for begin in begins]
            assert sum(sizes) == row_bytes and all(size % 16 == 0 for size in sizes)
            assert parts == 1 or (plan.part_bytes % BLOCK == 0 and plan.chunk_rows == 1)
            # A part has its eight segments, which may overlap but not stick out of it.
            assert all(plan.segment * BLOCK <= size <= plan.segment * BLOCK * SEGMENTS for size in sizes)
            assert plan.ctas % parts == 0 and 0 < plan.ctas <= num_sms and 0 < plan.slots <= MAX_SLOTS
            assert plan.chunk_rows * plan.part_bytes * (1 + is_gate_up) <= plan.slot_bytes and plan.slot_bytes % 128 == 0
            x_bytes = rows * plan.segment * BLOCK * SEGMENTS * 2 // elem_bytes
            assert plan.slots * plan.slot_bytes + x_bytes == plan.shared_bytes <= MAX_SHARED_BYTES


def test_two_ctas_of_a_product_fit_beside_each_other():
    """Every product of Qwen2.5-72B at TP=8."""
    for elem_bytes in (1, 2):
        for out, inner, is_gate_up in ((1280, 8192, False), (8192, 1024, False), (3696, 8192, True), (8192, 3696, False)):
            plan = plan_rows(1, inner, out, elem_bytes, 264, is_gate_up, shared_bytes=WAYS["rows2"].shared_bytes)
            assert plan.shared_bytes <= WAYS["rows2"].shared_bytes


def test_what_the_kernel_cannot_do_has_no_plan():
    assert plan_rows(3, 896, 64, 2, 132) is None
    assert plan_rows(1, 20, 64, 2, 132) is None  # no whole vectors of 16 bytes
    assert plan_rows(1, 16, 64, 2, 132) is None  # less than a block
    assert plan_rows(1, 896, 64, 2, 132, True, 2) is None
    assert plan_rows(1, 896, 64, 2, 132, False, 3).num_splits == 3
