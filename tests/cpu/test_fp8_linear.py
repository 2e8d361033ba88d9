"""FP8 products with FP8 activations: the twin, what the launcher refuses, and what the rounding does to a real model."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import engine.eager
from comm.single import SingleCommunicator
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.eager import EagerStep
from engine.kv_cache import KvCache
from engine.loading import draw_blueprint
from engine.settings import EngineSettings
from engine.shard_plan import ShardPlan
from engine.step_batch import RowSpan, StepBatch
from engine.weights import load_weights
from kernels.fp8_linear import MIN_ROWS, ScaledLinear, scaled_linear
from kernels.linear import linear
from kernels.quantize import FP8, Fp8Weight, dequantize, quantize
from kernels.quantize_rows import launch_quantize_rows, quantize_rows
from launch.errors import UsageError
from launch.world import World
from tests.cpu.engine_harness import CPU
from tests.cpu.test_device_refusals import on_gpu
from tests.cpu.test_processes import MODEL
from tests.cpu.test_quantize import chunks, rand  # noqa: F401

HALF_STEP = 2**-4  # of e4m3: a normal value moves by at most half of an eighth of its binade
SMALLEST_STEP = 2**-9  # between subnormal values


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_move_by_half_a_step_at_most(dtype):
    x = (rand(13, 200) * torch.logspace(-6, 6, 13)[:, None]).to(dtype)
    before = x.clone()
    data, scale = quantize_rows(x)
    assert torch.equal(x, before) and (data.dtype, scale.dtype) == (FP8, torch.float32)
    assert torch.allclose(scale, x.float().abs().amax(1) / 448, rtol=1e-6) and (data.float().abs().amax(1) == 448).all()
    bound = (x.double().abs() * HALF_STEP).clamp_min(SMALLEST_STEP / 2 * scale.double()[:, None])
    moved = (data.double() * scale.double()[:, None] - x.double()).abs()
    assert (moved <= bound * (1 + 1e-6)).all() and moved.any()


def test_rows_of_zeros_and_of_no_numbers():
    x = torch.tensor([[0.0, -0.0], [1.0, math.nan], [math.inf, 1.0], [1e-38, 0.0], [3e38, -3e38]])
    data, scale = quantize_rows(x)
    found = data.float() * scale[:, None]
    assert not found[0].any() and found[1].isnan().any() and found[2].isnan().any() and found[3:].isfinite().all()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("has_bias", (False, True))
def test_the_product_is_that_of_the_rounded_values(dtype, tolerance, has_bias):
    x, weight, bias = rand(33, 64).to(dtype), quantize(rand(70, 64, seed=1)), rand(70, seed=2).to(dtype) if has_bias else None
    data, scale = quantize_rows(x)
    rounded = data.double() * scale.double()[:, None]
    expected = F.linear(rounded, dequantize(weight, torch.float64), None if bias is None else bias.double())
    found = scaled_linear(x, weight, bias)
    assert found.dtype == dtype and found.shape == (33, 70)
    torch.testing.assert_close(found.double(), expected, atol=tolerance * float(expected.abs().max()), rtol=0)
    # Beside the matrix as it is, what is new is the rounding of x: 2.2 % of a product of normal values.
    wide = linear(x, weight, bias).double()
    assert 0.005 < float((found.double() - wide).norm() / wide.norm()) < 0.04


def test_which_products_are_taken():
    scaled = ScaledLinear(None)

    def takes(rows=MIN_ROWS, inner=64, out=32, dtype=torch.bfloat16, is_fp8=True):
        weight = torch.zeros(out, inner)
        return scaled.takes(torch.zeros(rows, inner, dtype=dtype), quantize(weight) if is_fp8 else weight)

    assert takes() and takes(rows=4000)
    assert not takes(rows=MIN_ROWS - 1) and not takes(inner=40) and not takes(out=40)
    assert not takes(dtype=torch.float16) and not takes(is_fp8=False)


def test_what_is_passed_to_the_kernel_and_to_the_library(monkeypatch):
    launches, calls = [], []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))

    def empty(shape, dtype, device):
        return on_gpu(*([shape] if isinstance(shape, int) else shape), dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "_scaled_mm", lambda *tensors, **options: calls.append((tensors, options)))
    kernel = SimpleNamespace(launch=lambda grid, block, args, stream, is_pdl: launches.append((grid, block, args[0], stream)))
    x, bias = on_gpu(20, 64), on_gpu(32)
    weight = Fp8Weight(on_gpu(32, 64, dtype=FP8), on_gpu(32, dtype=torch.float32))
    ScaledLinear(kernel, is_fast=False).linear(x, weight, bias)
    ((grid, block, params, stream),) = launches
    assert (grid, block, stream, params.x, params.vectors) == (20, 256, 77, x.data_ptr(), 8)
    (((data, matrix), options),) = calls
    assert (data.data_ptr(), options["scale_a"].data_ptr()) == (params.data, params.scale)
    assert matrix.shape == (64, 32) and matrix.stride() == (1, 64) and matrix.data_ptr() == weight.data.data_ptr()
    assert options["scale_a"].shape == (20, 1) and options["scale_b"].shape == (1, 32)
    assert options["bias"] is bias and options["out_dtype"] == torch.bfloat16 and options["use_fast_accum"] is False


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"x": on_gpu(3, 64, dtype=torch.float16)}, TypeError, "x must be torch.bfloat16 on a GPU, not torch.float16"),
        ({"data": on_gpu(3, 64)}, TypeError, "data must be torch.float8_e4m3fn"),
        ({"scale": on_gpu(4, dtype=torch.float32)}, ValueError, r"scale must be contiguous \(3,\)"),
        ({"x": on_gpu(3, 64, offset=1)}, ValueError, "16-byte border"),
        ({"x": on_gpu(3, 20), "data": on_gpu(3, 20, dtype=FP8)}, ValueError, "multiple of 16 bytes"),
    ],
    ids=str,
)
def test_quantize_rows_refuses_what_does_not_fit(changes, error, sentence):
    fitting = {"x": on_gpu(3, 64), "data": on_gpu(3, 64, dtype=FP8), "scale": on_gpu(3, dtype=torch.float32)}
    with pytest.raises(error, match=sentence):
        launch_quantize_rows(None, **{**fitting, **changes})


def test_an_unknown_way_is_refused():
    with pytest.raises(UsageError, match="fp8_products must be scaled or widened, not 'exact'"):
        draw_blueprint(EngineSettings("qwen2.5-7b", load_format="dummy", fp8_products="exact"), World())


def fp8_linear(x, weight, bias=None):
    """`linear` of the eager step, with activations in FP8 where a GPU has them."""
    is_scaled = isinstance(weight, Fp8Weight) and x.shape[0] >= MIN_ROWS
    return scaled_linear(x, weight, bias) if is_scaled else linear(x, weight, bias)


@pytest.mark.model
@pytest.mark.slow
@torch.inference_mode()
def test_what_it_does_to_a_real_model(chunks, monkeypatch):  # noqa: F811
    """All products of a prefill are scaled ones: the error of the logits and the perplexity, beside those of the widened way."""
    config = load_config(MODEL)
    plan = ShardPlan.make(config, 1, 0)
    positions = torch.arange(512)

    def step(is_fp8: bool) -> EagerStep:
        weights = load_weights(Checkpoint.open(MODEL, config), plan, torch.float32, CPU, is_fp8=is_fp8)
        kv = KvCache.allocate(config.num_layers, 32, 16, plan.local_kv_heads, config.head_dim, torch.float32, CPU)
        return EagerStep(config, plan, weights, SingleCommunicator(), kv)

    def logits(of: EagerStep) -> torch.Tensor:
        span = (RowSpan(0, 512, 0, tuple(range(32))),)
        parts = [of.run(StepBatch(torch.tensor(ids), positions, positions, positions, span)) for ids in chunks[:2]]
        return torch.stack(parts)

    def perplexity(of: torch.Tensor) -> float:
        wanted = torch.tensor(chunks[:2])[:, 1:].flatten()
        return math.exp(float(F.cross_entropy(of[:, :-1].flatten(0, 1), wanted)))

    fp8 = step(is_fp8=True)
    plain, widened = logits(step(is_fp8=False)), logits(fp8)
    monkeypatch.setattr(engine.eager, "linear", fp8_linear)
    scaled = logits(fp8)
    spread = plain - plain.mean(-1, keepdim=True)
    for name, found, against in (("widened", widened, plain), ("scaled", scaled, plain), ("scaled, to widened", scaled, widened)):
        moved = found - against
        error = float((moved - moved.mean(-1, keepdim=True)).norm() / spread.norm())
        agreement = float((found.argmax(-1) == against.argmax(-1)).float().mean())
        change = perplexity(found) / perplexity(against) - 1
        print(f"{name}: logits {100 * error:.2f} %, same best token {100 * agreement:.1f} %, perplexity {100 * change:+.2f} %")
    assert abs(perplexity(scaled) / perplexity(widened) - 1) < 0.02 and 0 < error < 0.15
