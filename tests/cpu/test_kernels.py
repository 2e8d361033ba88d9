"""The torch twins against fp64 formulas written out plainly. Cases 95, 103 (padded rows write nowhere), 106."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.kv_write import kv_write
from kernels.linear import linear, pack_linear
from kernels.paged_attention import GroupPlan, RowPlan, group_rows, paged_attention, plan_row
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotate
from kernels.silu_mul import silu_mul

# Against fp64. fp32: a handful of roundings of values near 1; bf16: 8 bits of mantissa, two roundings.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 16), (0, 64)])
def test_rms_norm(shape, dtype):
    x, weight = rand(*shape).to(dtype), (1 + rand(shape[-1], seed=1) / 4).to(dtype)
    before = x.clone()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = rms_norm(x, weight, 1e-5)
    assert found.dtype == dtype and torch.equal(x, before)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rms_norm_does_not_overflow_in_half_precision():
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300 ** 2 is beyond the fp16 range
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, width", [(1, 100), (9, 33), (0, 8)])
def test_silu_mul(rows, width, dtype):
    gate_up = rand(rows, 2 * width).to(dtype)
    before = gate_up.clone()
    gate, up = gate_up.double().chunk(2, -1)
    found = silu_mul(gate_up)
    assert found.dtype == dtype and found.is_contiguous() and torch.equal(gate_up, before)
    torch.testing.assert_close(found.double(), gate / (1 + (-gate).exp()) * up, atol=TOLERANCE[dtype], rtol=2e-2)


@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rotary(scale):
    """Pairs (i, i + d/2) turn by position * frequency: a complex product, in fp64."""
    positions, inv_freq = torch.tensor([0, 1, 7, 300]), torch.tensor([1.0, 0.1, 0.01, 0.001])
    x = rand(4, 3, 8)
    before = x.clone()
    turn = torch.polar(torch.full((4, 4), scale).double(), positions.double()[:, None] * inv_freq.double())
    expected = torch.complex(x[..., :4].double(), x[..., 4:].double()) * turn[:, None]
    found = rotate(x, *rotary_table(positions, inv_freq, scale, torch.float32))
    assert torch.equal(x, before)
    torch.testing.assert_close(found.double(), torch.cat((expected.real, expected.imag), -1), atol=5e-5, rtol=0)
    assert torch.allclose(found[0], x[0] * scale)


@pytest.mark.parametrize("rows", [0, 1, 2, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_linear(rows, has_bias, is_packed):
    x, weight, bias = rand(rows, 40), rand(70, 40, seed=1), rand(70, seed=2) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    found = linear(x, pack_linear(weight) if is_packed else weight, bias)
    assert found.is_contiguous() and found.shape == (rows, 70)
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=0)


def test_packing_leaves_other_dtypes_alone():
    weight = rand(8, 8).to(torch.bfloat16)
    assert pack_linear(weight) is weight
    packed = pack_linear(rand(8, 8))
    assert packed.is_mkldnn and pack_linear(packed) is packed


def test_kv_write_touches_only_its_slots():
    """Case 103's invariant: slots that are not named keep their bits."""
    keys, values = torch.full((12, 2, 4), math.nan), torch.full((12, 2, 4), math.nan)
    qkv = rand(3, 6, 4)
    kv_write(keys, values, torch.tensor([7, 0, 3]), qkv[:, 2:4], qkv[:, 4:])
    assert torch.equal(keys[[7, 0, 3]], qkv[:, 2:4]) and torch.equal(values[[7, 0, 3]], qkv[:, 4:])
    assert bool(keys[[1, 2, 4, 5, 6, 8, 9, 10, 11]].isnan().all())


PAGE = 4


def attention_reference(q, k, v, context_len: int, window: int | None) -> torch.Tensor:
    """One query and one head at a time, in fp64. `q` `[n, heads, d]`, `k`, `v` `[context_len + n, kv_heads, d]`."""
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        end = context_len + i + 1
        begin = 0 if window is None else max(0, end - window)
        for head in range(q.shape[1]):
            keys, values = k[begin:end, head // group].double(), v[begin:end, head // group].double()
            scores = keys @ q[i, head].double() / math.sqrt(q.shape[2])
            out[i, head] = scores.softmax(0) @ values
    return out


# (num_tokens, context_len) of the rows of one step: decode beside prefill beside a chunk with history
STEPS = {
    "many decodes": [(1, 8), (1, 3), (4, 2), (1, 10), (1, 6)],
    "decode": [(1, 0), (1, 3), (1, 4), (1, 30)],
    "prefill": [(13, 0), (4, 0), (2, 0)],
    "chunks": [(5, 9), (8, 8), (2, 17)],
    "mixed": [(1, 10), (6, 0), (3, 7), (1, 1)],
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("window", [None, 1, 5, 9, 64])
@pytest.mark.parametrize("is_scattered", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(6, 2), (3, 3), (5, 1)])
def test_paged_attention(step, window, is_scattered, heads, kv_heads):
    shapes, d = STEPS[step], 8
    page_order = torch.randperm(60, generator=torch.Generator().manual_seed(5)).tolist() if is_scattered else range(60)
    free = iter(page_order)
    keys, values = torch.full((240, kv_heads, d), math.nan), torch.full((240, kv_heads, d), math.nan)
    q = rand(sum(n for n, _ in shapes), heads, d, seed=2)
    rows, expected, start = [], [], 0
    for i, (num_tokens, context_len) in enumerate(shapes):
        kv_len = context_len + num_tokens
        pages = [next(free) for _ in range(-(-kv_len // PAGE))]
        slots = torch.tensor([pages[p // PAGE] * PAGE + p % PAGE for p in range(kv_len)])
        k, v = rand(kv_len, kv_heads, d, seed=10 + i), rand(kv_len, kv_heads, d, seed=20 + i)
        keys[slots], values[slots] = k, v
        rows.append(plan_row(start, num_tokens, context_len, pages, PAGE, window, torch.float32, CPU))
        expected.append(attention_reference(q[start : start + num_tokens], k, v, context_len, window))
        start += num_tokens
    out = torch.full_like(q, math.nan)
    before = q.clone()
    for plan in (rows, group_rows(rows, torch.float32, CPU)):
        out.fill_(math.nan)
        paged_attention(q, keys, values, plan, out)
        assert torch.equal(q, before)
        torch.testing.assert_close(out.double(), torch.cat(expected), atol=2e-6, rtol=0)


def test_rows_of_one_query_are_grouped_where_padding_is_cheap():
    def row(kv_len: int, num_tokens: int = 1) -> RowPlan:
        return plan_row(0, num_tokens, kv_len - num_tokens, range(100), PAGE, None, torch.float32, CPU)

    def groups(*rows: RowPlan) -> list[bool]:
        return [isinstance(plan, GroupPlan) for plan in group_rows(rows, torch.float32, CPU)]

    assert groups(row(10), row(20, 5), row(12), row(14)) == [False, True]
    assert groups(row(10), row(12)) == [False, False]
    assert groups(row(1), row(1), row(1), row(90)) == [False] * 4
    (group,) = group_rows((row(10),) * 3, torch.float32, CPU)
    assert group.mask is None


def test_adjacent_pages_are_read_without_a_copy():
    assert isinstance(plan_row(0, 1, 9, [4, 5, 6], PAGE, None, torch.float32, CPU).kv, slice)
    assert isinstance(plan_row(0, 1, 9, [4, 6, 5], PAGE, None, torch.float32, CPU).kv, torch.Tensor)
    # Pages before the window are not read, so they need not be adjacent either.
    assert plan_row(0, 1, 9, [0, 5, 6], PAGE, 3, torch.float32, CPU).kv == slice(23, 26)


def test_a_row_does_not_depend_on_its_batch_mates():
    """Case 95: bit for bit, because rows never share a product."""
    keys, values, q = rand(64, 2, 8), rand(64, 2, 8, seed=1), rand(9, 4, 8, seed=2)
    mates = [
        plan_row(0, 4, 0, [8, 9], PAGE, None, torch.float32, CPU),
        plan_row(5, 4, 7, [1, 3, 5], PAGE, None, torch.float32, CPU),
    ]
    row = plan_row(4, 1, 20, [10, 11, 12, 13, 14, 15], PAGE, None, torch.float32, CPU)
    alone = paged_attention(q, keys, values, [row], torch.zeros_like(q))[4]
    assert torch.equal(alone, paged_attention(q, keys, values, [mates[0], row, mates[1]], torch.zeros_like(q))[4])
