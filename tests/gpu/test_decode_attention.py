"""The decode attention kernel against its torch twin, on one GPU: `python -m pytest -q tests/gpu/test_decode_attention.py`."""

from __future__ import annotations

import pytest
import torch

from kernels.build import Build, default_cache_folder
from kernels.decode_attention import DecodeAttention, decode_attention, load_decode_attention
from kernels.split_grid import SplitGrid
from tests.gpu.attention_case import AttentionCase, Step

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Of results of about 1. Half types: weights are rounded before they meet the values, the result once more, and a query or key
# that is a rounding apart shifts its scores; fp32: sums in another order.
TOLERANCE = {BF16: 4e-2, FP16: 5e-3, FP32: 5e-5}
BUILD = Build(default_cache_folder())
ALL_GRIDS = [SplitGrid(cluster, num) for cluster in (1, 2, 4, 8) for num in (1, 2, 5)]
ALL_GRIDS += [SplitGrid(2, 3, warps, stages, 1, 1) for warps, stages in ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3))]


def launcher(step: Step, **options) -> DecodeAttention:
    case = step.case
    kernel = load_decode_attention(BUILD, case.dtype, case.head_dim)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    rows, grid = len(case.positions), case.grid
    return DecodeAttention(
        kernel, case.num_q, case.num_kv, case.page_size, step.turns, rows, step.max_context, num_sms, grid, **options
    )  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == FP32 else torch.int16)


def check(case: AttentionCase, seed: int = 0) -> None:
    step, wanted = Step(case, DEVICE, seed), Step(case, DEVICE, seed)
    decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=case.page_size, **wanted.options())
    before = [part.clone() for part in (step.qkv, step.positions, step.page_table)]
    attention = launcher(step)
    attention.launch(*step.arguments(), **step.options())
    assert_same(step, wanted)
    assert all(torch.equal(bits(old) if old.is_floating_point() else old, bits(new) if new.is_floating_point() else new)
               for old, new in zip(before, (step.qkv, step.positions, step.page_table)))  # fmt: skip
    first = step.out.clone()
    attention.launch(*step.arguments(), **step.options())  # the same step again: the same bits, from counters that are 0 again
    assert torch.equal(bits(step.out), bits(first))


def assert_same(step: Step, wanted: Step) -> None:
    case, tolerance = step.case, TOLERANCE[step.case.dtype]
    torch.testing.assert_close(step.out, wanted.out, atol=tolerance, rtol=tolerance)
    padding = step.positions < 0
    assert not step.out[padding].any()
    is_new = torch.zeros(step.keys.shape[0], dtype=torch.bool, device=DEVICE)
    for row, position in enumerate(step.positions.tolist()):
        if position >= 0:
            is_new[step.page_table[row, position // case.page_size] * case.page_size + position % case.page_size] = True
    for found, right in ((step.keys, wanted.keys), (step.values, wanted.values)):
        assert torch.equal(bits(found[~is_new]), bits(right[~is_new])), "another slot of the cache changed"
        # A fused product may round to the neighbour of what two roundings give.
        rounding = 4 * torch.finfo(case.dtype).eps
        torch.testing.assert_close(found[is_new], right[is_new], atol=rounding, rtol=rounding)


# Each length around the borders of pages, tiles of 16 keys, warps, clusters, and of the change from one cluster to several.
BORDERS = (0, 1, 2, 7, 8, 14, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths(dtype, head_dim):
    check(AttentionCase(BORDERS, dtype=dtype, head_dim=head_dim))


@pytest.mark.parametrize("grid", ALL_GRIDS, ids=str)
def test_every_way_to_share_a_row(grid):
    for num_q, head_dim in ((7, 128), (16, 64)):
        check(AttentionCase((0, 15, 65, 300, 513, 1025, 2047, 2048, 2049), num_q=num_q, num_kv=1, head_dim=head_dim, grid=grid))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 9, 16])
def test_groups(group, dtype):
    check(AttentionCase((5, 600, 77), num_q=3 * group, num_kv=3, dtype=dtype))
    check(AttentionCase((700,), num_q=group, num_kv=1, dtype=dtype, head_dim=64, grid=SplitGrid(8, 3)))


@pytest.mark.parametrize("num_kv", [1, 4])
def test_a_long_row(num_kv):
    check(AttentionCase((32767,), num_q=8 * num_kv, num_kv=num_kv))
    check(AttentionCase((40000, 3), num_q=7 * num_kv, num_kv=num_kv, dtype=FP16))
    check(AttentionCase((20001,), num_q=2 * num_kv, num_kv=num_kv, dtype=FP32, head_dim=64))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("parts", [0, 1, 4, 7])
@pytest.mark.parametrize("has_norms", [False, True])
def test_where_the_heads_come_from(parts, has_norms, dtype):
    for head_dim in (64, 128):
        for has_bias in (False, True):
            source = {"parts": parts, "has_bias": has_bias, "has_norms": has_norms}
            check(AttentionCase((0, 40, -1, 333), head_dim=head_dim, dtype=dtype, **source))


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, 512, 1024])
def test_windows(window):
    for dtype in (BF16, FP32):
        check(AttentionCase((0, 1, 15, 16, 17, 99, 100, 101, 511, 512, 2000), dtype=dtype, window=window, grid=SplitGrid(2, 3)))


@pytest.mark.parametrize("page_size", [1, 2, 8, 32, 256])
def test_page_sizes(page_size):
    check(AttentionCase((0, 31, 32, 257, 700), page_size=page_size))


def test_padding_rows_and_wide_positions():
    for grid in (None, SplitGrid(4, 3)):
        check(AttentionCase((-1, 100, -1, -1, 3, 900, -1), is_wide=True, grid=grid))
    check(AttentionCase((-1, -1, -1)))


def test_many_rows():
    lengths = torch.randint(0, 400, (256,), generator=torch.Generator().manual_seed(1)).tolist()
    check(AttentionCase(tuple(lengths), num_q=28, num_kv=4))


def test_layers_back_to_back_share_the_workspace():
    """Launches that start before the one before has ended, on caches of their own; each result must be its own."""
    case = AttentionCase((3000, 10, 1700), num_q=14, num_kv=2, grid=SplitGrid(8, 4))
    steps, wanted = ([Step(case, DEVICE, seed) for seed in range(12)] for _ in range(2))
    attention = launcher(steps[0])
    graph = torch.cuda.CUDAGraph()
    for step in steps:
        attention.launch(*step.arguments(), **step.options())
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for step in steps:
            attention.launch(*step.arguments(), **step.options())
    for _ in range(5):
        for step in steps:
            step.out.fill_(float("nan"))
        graph.replay()
    for step, right in zip(steps, wanted):
        decode_attention(*right.arguments(), turns=right.turns, page_size=case.page_size, **right.options())
        assert_same(step, right)


def test_a_replayed_graph_goes_on_from_token_to_token():
    """Positions advance on the device, over borders of pages and of shares; each step reads what the last one wrote."""
    num_steps, starts = 40, (10, 0, -1, 500)
    ends = tuple(start + num_steps if start >= 0 else start for start in starts)
    step, wanted = (Step(AttentionCase(ends, grid=SplitGrid(2, 3)), DEVICE) for _ in range(2))
    qkvs = torch.randn(num_steps, *step.qkv.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 2
    outs = torch.full((num_steps, *step.out.shape), float("nan"), dtype=BF16, device=DEVICE)
    number = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    advance = (step.positions >= 0).int()
    attention = launcher(step)

    def run() -> None:
        torch.index_select(qkvs, 0, number, out=step.qkv.unsqueeze(0))
        attention.launch(*step.arguments(), **step.options())
        outs.index_copy_(0, number, step.out.unsqueeze(0))
        step.positions.add_(advance)
        number.add_(1)

    for each in (step, wanted):
        each.positions.copy_(torch.tensor(starts))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        for _ in range(num_steps - 1):
            graph.replay()
    torch.cuda.synchronize()
    for qkv, out in zip(qkvs, outs):
        wanted.qkv.copy_(qkv)
        decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=16, **wanted.options())
        torch.testing.assert_close(out, wanted.out, atol=TOLERANCE[BF16], rtol=TOLERANCE[BF16])
        wanted.positions.add_(advance)


def test_positions_of_the_kernel_just_before_need_is_early_off():
    step, wanted = (Step(AttentionCase((900, 64)), DEVICE) for _ in range(2))
    decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=16, **wanted.options())
    right = step.positions.clone()
    attention = launcher(step)
    step.positions.fill_(-1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)
    step.positions.copy_(right)
    attention.launch(*step.arguments(), **step.options(), is_early=False)
    assert_same(step, wanted)
