"""The decode attention's twin against the operators of the eager step, and what its launcher asks of the GPU."""

from __future__ import annotations

import pytest
import torch

from kernels.build_variants import variant_of
from kernels.decode_attention import (
    ELEMS,
    HEAD_DIMS,
    SOURCE,
    AttentionParams,
    DecodeAttention,
    decode_attention,
    load_decode_attention,
)
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention, plan_row
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotary_turns, rotate
from kernels.split_grid import BLOCK_SHARED_BYTES, STAGES, WARPS, SplitGrid, split_grid
from tests.gpu.attention_case import AttentionCase, Step

CPU = torch.device("cpu")
# bf16: the eager step rounds weights as its attention does, the twin does not.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def eager(step: Step) -> torch.Tensor:
    """The same step, as `engine/eager.py` takes it."""
    case, rows = step.case, [row for row, position in enumerate(step.case.positions) if position >= 0]
    num_q, num_kv, size = case.num_q, case.num_kv, case.page_size
    x = step.qkv.sum(0) if case.parts else step.qkv.float()
    x = (x + step.bias.float() if case.has_bias else x).to(case.dtype)[rows]
    q, k, v = x[:, :num_q], x[:, num_q : num_q + num_kv], x[:, num_q + num_kv :]
    if step.norms:
        q, k = rms_norm(q, step.norms.q_weight, 1e-6), rms_norm(k, step.norms.k_weight, 1e-6)
    inv_freq = 10000.0 ** -(torch.arange(0, case.head_dim, 2) / case.head_dim)
    positions = step.positions[rows].long()
    table = rotary_table(positions, inv_freq, 1.0, case.dtype)
    q, k = rotate(q, *table), rotate(k, *table)
    pages = [step.page_table[row, : case.positions[row] // size + 1].tolist() for row in rows]
    slots = torch.tensor([own[-1] * size + position % size for own, position in zip(pages, positions.tolist())])
    kv_write(step.keys, step.values, slots, k, v)
    plans = [plan_row(i, 1, case.positions[row], pages[i], size, case.window, case.dtype, CPU) for i, row in enumerate(rows)]
    out = torch.zeros_like(step.out)
    out[rows] = paged_attention(q, step.keys, step.values, plans, torch.empty_like(q))
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parts": 0, "has_bias": False},
        {"parts": 4, "has_norms": True},
        {"window": 1},
        {"window": 40, "is_wide": True},
        {"num_q": 7, "num_kv": 1, "head_dim": 64, "page_size": 4},
        {"num_q": 16, "num_kv": 1, "page_size": 1},
    ],
    ids=str,
)
def test_twin_is_the_eager_step(changes, dtype):
    case = AttentionCase((0, 15, -1, 16, 17, 100, 255, -1), dtype=dtype, **changes)
    step, wanted = Step(case, "cpu"), Step(case, "cpu")
    found = decode_attention(*step.arguments(), turns=step.turns, page_size=case.page_size, **step.options())
    assert found is step.out
    torch.testing.assert_close(found, eager(wanted), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not found[2].any() and not found[7].any(), "a padding row is zeros"
    for own, right in ((step.keys, wanted.keys), (step.values, wanted.values)):
        torch.testing.assert_close(own, right, atol=0, rtol=0, equal_nan=True)


def test_turns_are_the_rotary_table_by_position():
    inv_freq = torch.tensor([1.0, 0.3, 0.01])
    turns = rotary_turns(50, inv_freq, 1.2, torch.bfloat16)
    cos, signed_sin = rotary_table(torch.tensor([0, 7, 49]), inv_freq, 1.2, torch.bfloat16)
    assert torch.equal(turns[[0, 7, 49], :3], cos[:, 0, :3]) and torch.equal(turns[[0, 7, 49], 3:], -signed_sin[:, 0, :3])


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 32, 33, 64, 100, 256])
@pytest.mark.parametrize("kv_heads", [1, 4, 8])
def test_grid_fills_the_gpu_and_fits_it(rows, kv_heads):
    for num_sms in (78, 132):
        grid = split_grid(rows, kv_heads, num_sms, 32768)
        num_ctas = rows * kv_heads * grid.cluster * grid.num_clusters
        places = num_sms * (BLOCK_SHARED_BYTES // grid.shared_bytes(torch.bfloat16, 128))
        assert 2 * num_ctas * grid.num_warps >= 4 * num_sms, "two warps an SM, and up to a half lost to a power of two"
        assert num_ctas <= places or grid.cluster == grid.num_clusters == 1, "what shares a row should run at once"
        assert split_grid(rows, kv_heads, num_sms, 100).num_clusters == 1


@pytest.mark.parametrize("numbers", [(3, 1), (16, 1), (2, 0), (2, 1, 5), (2, 1, 4, 1), (2, 1, 4, 5), (2, 1, 4, 2, 0)])
def test_a_grid_that_the_kernel_cannot_have_is_refused(numbers):
    with pytest.raises(ValueError, match="cannot be shared as SplitGrid"):
        SplitGrid(*numbers)


def test_a_grid_that_needs_too_much_shared_memory_is_refused():
    step = Step(AttentionCase((5,)), "cpu")
    with pytest.raises(ValueError, match="takes 278528 bytes of shared memory a CTA, more than 232448"):
        launcher(step, Kernel(), grid=SplitGrid(1, 1, 8, 4))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sums_of_a_warp_fit_where_its_tiles_were(head_dim):
    for dtype in ELEMS:
        for num_warps in WARPS:
            for num_stages in STAGES:
                grid = SplitGrid(1, 1, num_warps, num_stages)
                assert grid.warp_bytes(dtype, head_dim) >= 16 * (head_dim + 4) * 4
                if dtype != torch.float32:
                    assert grid.warp_bytes(dtype, head_dim) >= num_stages * 2 * 16 * head_dim * 2


class Kernel:
    def __init__(self):
        self.launches = []

    def launch(self, grid, block, args, stream, shared_bytes=0, cluster=1, is_pdl=False):
        self.launches.append((grid, block, args[0], stream, shared_bytes, cluster, is_pdl))


@pytest.fixture
def stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 77}))


def launcher(step: Step, kernel: Kernel, **changes) -> DecodeAttention:
    case = step.case
    options = {"max_rows": 16, "max_context": step.max_context, "num_sms": 132, **changes}
    return DecodeAttention(kernel, case.num_q, case.num_kv, case.page_size, step.turns, **options)


def test_launch_passes_addresses_and_shapes(stream):
    step, kernel = Step(AttentionCase((0, 3000, -1), parts=3, has_norms=True, window=9, is_wide=True), "cpu"), Kernel()
    attention = launcher(step, kernel)
    assert attention.launch(*step.arguments(), **step.options(), is_early=False) is step.out
    ((grid, block, params, raw_stream, shared_bytes, cluster, is_pdl),) = kernel.launches
    expected = split_grid(3, 2, 132, 3001)
    assert expected.num_clusters > 1
    assert (grid, block) == ((expected.cluster * expected.num_clusters, 2, 3), 32 * expected.num_warps)
    assert (raw_stream, is_pdl) == (77, True)
    assert (shared_bytes, cluster) == (expected.shared_bytes(torch.bfloat16, 128), expected.cluster)
    assert isinstance(params, AttentionParams)
    tensors = {"qkv": step.qkv, "bias": step.bias, "q_norm": step.norms.q_weight, "k_norm": step.norms.k_weight,
               "turns": step.turns, "positions": step.positions, "pages": step.page_table, "keys": step.keys,
               "values": step.values, "out": step.out}  # fmt: skip
    assert {name: getattr(params, name) for name in tensors} == {name: tensor.data_ptr() for name, tensor in tensors.items()}
    numbers = {"num_q": 8, "num_kv": 2, "num_parts": 3, "max_pages": step.page_table.shape[1], "page_shift": 4, "window": 9,
               "group": 4, "num_clusters": expected.num_clusters, "alone_tiles": expected.alone_tiles,
               "shared_tiles": expected.shared_tiles, "num_stages": expected.num_stages,
               "warp_bytes": expected.warp_bytes(torch.bfloat16, 128), "is_wide": 1, "is_early": 0}  # fmt: skip
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert params.scale == pytest.approx(128**-0.5 / 0.6931471805599453)
    assert params.sums and params.scores and params.arrived


def test_launch_without_bias_norms_and_window(stream):
    step, kernel = Step(AttentionCase((5,), parts=0, has_bias=False), "cpu"), Kernel()
    launcher(step, kernel, grid=SplitGrid(2, 1), is_pdl=False).launch(*step.arguments())
    ((grid, _, params, _, _, cluster, is_pdl),) = kernel.launches
    assert (grid, cluster, is_pdl) == ((2, 2, 1), 2, False)
    assert (params.bias, params.q_norm, params.k_norm, params.num_parts, params.window, params.is_early) == (0, 0, 0, 0, 0, 1)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"num_q": 34, "num_kv": 2}, ValueError, "1 to 16 query heads a KV head, not 34 for 2"),
        ({"num_q": 3, "num_kv": 2}, ValueError, "not 3 for 2"),
        ({"page_size": 12}, ValueError, "a power of two of tokens, not 12"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        launcher(Step(AttentionCase((5, 20), **changes), "cpu"), Kernel())


def test_a_rotary_table_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="ends at 6 positions, and a row may have 9"):
        launcher(Step(AttentionCase((5,)), "cpu"), Kernel(), max_context=9)


@pytest.mark.parametrize(
    "name, spoil, error",
    [
        ("qkv", lambda x: x.half(), TypeError),
        ("qkv", lambda x: x[..., :64], ValueError),
        ("qkv", lambda x: x[:, :, 1:], ValueError),
        ("positions", lambda x: x.float(), TypeError),
        ("positions", lambda x: x[:1], ValueError),
        ("page_table", lambda x: x.long(), TypeError),
        ("page_table", lambda x: x.t().contiguous().t(), ValueError),
        ("keys", lambda x: x.float(), TypeError),
        ("keys", lambda x: x.flatten()[1 : 1 + 16 * 2 * 128].view(16, 2, 128), ValueError),
        ("values", lambda x: x[:16], ValueError),
        ("out", lambda x: x.float(), TypeError),
        ("bias", lambda x: x[1:], ValueError),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_the_launch(name, spoil, error, stream):
    step, kernel = Step(AttentionCase((5, 40)), "cpu"), Kernel()
    attention = launcher(step, kernel)
    setattr(step, name, spoil(getattr(step, name)))
    with pytest.raises(error, match=name):
        attention.launch(*step.arguments(), **step.options())
    assert not kernel.launches


def test_too_many_rows_are_refused(stream):
    step, kernel = Step(AttentionCase((5, 40, 3)), "cpu"), Kernel()
    with pytest.raises(ValueError, match="1 to 2 rows, not 3"):
        launcher(step, kernel, max_rows=2).launch(*step.arguments())
    assert not kernel.launches and torch.isnan(step.out).all()


def test_every_kind_of_heads_is_compiled_ahead():
    for elem in ELEMS.values():
        for head_dim in HEAD_DIMS:
            variant_of(SOURCE, {"ELEM": elem, "HEAD_DIM": head_dim})
    with pytest.raises(ValueError, match="heads of"):
        load_decode_attention(None, torch.bfloat16, 96)
