"""Every way to make a product against fp64: numbers of rows, odd sizes, both weight types, biases, splits, graphs."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

ROWS = (1, 2, 3, 5, 8, 9, 13, 16)
# (out, in): whole tiles and pieces, a tail of rows, a tail of a block, one piece, wide, long.
SHAPES = ((1152, 896), (37, 128), (4608, 3584), (8192, 3696), (896, 4864), (100, 16), (8, 14784), (3, 8192), (2048, 18944))
# Every way, with the most rows that it takes.
WAYS = {"rows": 2, "rows2": 2, "half_rows": 2, "groups": 8, "groups2": 8, "half_groups": 8, "groups4": 8, "tiles": 16}


@cache
def gemv(is_pdl: bool = True, ways: tuple[str, ...] = ("rows", "tiles")):
    from kernels.build import Build, default_cache_folder
    from kernels.gemv import Gemv, load_gemv

    torch.zeros(1, device="cuda")
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return Gemv(load_gemv(Build(default_cache_folder())), num_sms, is_pdl, ways)


def cases(is_fp8: bool = False):
    """(rows of x, way): every number of rows by every way that there is for it."""
    return [(rows, way) for rows in ROWS for way, most in WAYS.items() if rows <= most // (1 + (is_fp8 and "groups" in way))]


def can(way: str, rows: int, inner: int) -> bool:
    """Whether the way takes these rows: `gemv_rows` wants more than a block of each, `gemv_groups` has all x in shared memory."""
    return inner >= 64 if "rows" in way else "groups" not in way or rows * inner <= 1 << 16


def bound(way: str, is_fp8: bool) -> float:
    """Of the error: fp32 sums of bf16 products; fp16 x for e4m3 keeps all of bf16 but the smallest values; the tensor cores add
    e4m3 products of 128 elements with about 14 bits."""
    return (6e-4 if "groups" in way else 1e-4) if is_fp8 else 2e-5


def operands(rows: int, out: int, inner: int, is_fp8: bool):
    generator = torch.Generator("cuda").manual_seed(rows * 7919 + out * 31 + inner)
    x = torch.randn(rows, inner, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(out, inner, generator=generator, device="cuda").bfloat16()
    bias = torch.randn(out, generator=generator, device="cuda").bfloat16()
    if not is_fp8:
        return x, weight, weight.double(), bias
    scale = weight.float().abs().amax(1) / 448.0
    data = (weight.float() / scale[:, None]).to(torch.float8_e4m3fn)
    return x, SimpleNamespace(data=data, scale=scale), data.double() * scale.double()[:, None], bias


def error_of(result: torch.Tensor, exact: torch.Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("is_fp8", (False, True))
@pytest.mark.parametrize("out, inner", SHAPES)
def test_linear(out, inner, is_fp8):
    for rows, way in cases(is_fp8):
        x, weight, full, bias = operands(rows, out, inner, is_fp8)
        before = x.clone()
        for b in (None, bias):
            exact = x.double() @ full.T + (0.0 if b is None else b.double())
            guard = torch.full((64, rows, out + 64), float("nan"), device="cuda")
            if not can(way, rows, inner):
                continue
            sums = gemv(True, (way,)).linear(x, weight, b)
            del guard
            assert torch.isfinite(sums).all()
            assert error_of(sums.sum(0), exact) < bound(way, is_fp8), (rows, way, error_of(sums.sum(0), exact))
        assert torch.equal(x, before)


@pytest.mark.parametrize("splits", (1, 2, 3, 4, 6))
@pytest.mark.parametrize("rows", (1, 2, 4))
def test_splits_add_up_and_repeat(rows, splits):
    x, weight, full, bias = operands(rows, 4608, 3584, False)
    sums = torch.full((splits, rows, 4608), float("nan"), device="cuda")
    gemv().linear(x, weight, bias, sums, num_splits=splits)
    assert error_of(sums.sum(0), x.double() @ full.T + bias.double()) < 2e-5
    for _ in range(20):
        assert torch.equal(gemv().linear(x, weight, bias, num_splits=splits), sums), "the same bits every time"


@pytest.mark.parametrize("is_fp8", (False, True))
@pytest.mark.parametrize("out, inner", ((2 * 4864, 896), (2 * 37, 128), (2 * 2368, 3584), (2 * 3696, 8192)))
def test_gate_up(out, inner, is_fp8):
    from kernels.gemv import gemv_twin

    for rows, way in cases(is_fp8):
        x, weight, full, bias = operands(rows, out, inner, is_fp8)
        x = (x.float() / inner**0.5).bfloat16()
        product = torch.full((rows, out // 2), float("nan"), device="cuda", dtype=torch.bfloat16)
        if not gemv(True, (way,)).takes(x, weight, is_gate_up=True):  # more of x than a CTA has room for beside its stages
            assert rows * inner >= 9 * 8192
            with pytest.raises(ValueError, match="no product"):
                gemv(True, (way,)).gate_up(x, weight, bias, product)
            continue
        gemv(True, (way,)).gate_up(x, weight, bias, product)
        wanted = gemv_twin(x, weight, bias, is_gate_up=True)
        assert torch.isfinite(product.float()).all()
        # Three roundings to bf16, each of which may fall the other way when the fp32 sum differs in its last bits.
        assert error_of(product, wanted.double()) < 4e-3, (rows, out, inner)


@pytest.mark.parametrize("way", WAYS)
def test_extreme_values_of_x_with_e4m3(way):
    x, weight, full, _ = operands(2, 128, 512, True)
    x[0, 3], x[1, 7] = 60000.0, -3.0e6
    assert error_of(gemv(True, (way,)).linear(x, weight).sum(0), x.double() @ full.T) < bound(way, True)


@pytest.mark.parametrize("out, inner", ((700, 3696), (300, 608), (40, 14784)))
def test_a_spoilt_weight_row_spoils_nothing_else(out, inner):
    """Rows that do not end with a block: what lies behind them is not read, and neither is memory that nobody wrote."""
    for rows, way in ((1, "groups"), (2, "groups2"), (5, "groups"), (1, "rows"), (2, "rows2")):
        x, weight, full, _ = operands(rows, out, inner, False)
        weight[1::2] = float("nan")
        sums = gemv(True, (way,)).linear(x, weight).sum(0)
        assert sums[:, 1::2].isnan().all()
        assert error_of(sums[:, ::2], x.double() @ full[::2].T) < 2e-5


@pytest.mark.parametrize("splits, ways", ((2, ("rows", "tiles")), (1, ("rows2", "tiles")), (1, ("groups",)), (1, ("groups2",))))
@pytest.mark.parametrize("rows", (1, 2, 3))
def test_chains_in_a_replayed_graph(rows, splits, ways):
    """Products that depend on each other, with programmatic launch, on other data at every replay."""
    x, first, _, bias = operands(rows, 2 * 1024, 512, False)
    _, second, _, _ = operands(rows, 512, 1024, False)
    hidden = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16)
    sums = torch.empty(splits, rows, 512, device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def body():
        for _ in range(8):
            gemv(True, ways).gate_up(x, first, bias, hidden)
            gemv(True, ways).linear(hidden, second, None, sums, num_splits=splits)

    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            body()
        for replay in range(50):
            x.copy_(torch.randn(rows, 512, device="cuda").mul_(1 + replay))
            graph.replay()
            got = sums.clone()
            gemv(False, ways).gate_up(x, first, bias, hidden)
            assert torch.equal(gemv(False, ways).linear(hidden, second, None, num_splits=splits), got), replay


def test_what_does_not_fit_is_refused():
    x, weight, _, _ = operands(1, 64, 128, False)
    with pytest.raises(ValueError):
        gemv().linear(torch.zeros(17, 128, device="cuda", dtype=torch.bfloat16), weight)
    with pytest.raises(TypeError):
        gemv().linear(x.float(), weight)
    with pytest.raises(ValueError):
        gemv().linear(x, weight, out=torch.empty(9, 1, 64, device="cuda"))
