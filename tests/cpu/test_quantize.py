"""FP8 weights: what a value may lose, shards, memory, and what it does to a real model's answers."""

from __future__ import annotations

import math
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F

import engine.weights
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.shard_plan import ShardPlan
from engine.text import Text
from engine.weights import MATRICES, load_weights, shard_bytes
from kernels import quantize as module
from kernels.linear import linear, pack_linear
from kernels.quantize import FP8, Fp8Weight, dequantize, quantize
from tests.cpu.engine_harness import answer, request
from tests.cpu.test_processes import MODEL
from tests.cpu.tiny import make_model, save_model

CPU = torch.device("cpu")
HALF_STEP = 2**-4  # e4m3 has 3 bits of mantissa: a normal value moves by at most half of an eighth of its binade
SMALLEST_STEP = 2**-9  # between subnormal values


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [1, 100, 1 << 24])
def test_values_move_by_half_a_step_at_most(dtype, block, monkeypatch):
    monkeypatch.setitem(module.BLOCK_ELEMENTS, "cpu", block)
    weight = (rand(13, 40) * torch.logspace(-3, 1, 13)[:, None]).to(dtype)  # rows of very different size
    before = weight.clone()
    found = quantize(weight)
    assert torch.equal(weight, before)
    assert (found.data.dtype, found.scale.dtype, found.shape) == (FP8, torch.float32, weight.shape)
    smallest = weight.float().abs().amax(1) * (1 / 448)
    assert ((smallest <= found.scale) & (found.scale < 2 * smallest)).all()
    bound = (weight.double().abs() * HALF_STEP).clamp_min(SMALLEST_STEP / 2 * found.scale.double()[:, None])
    moved = (dequantize(found, torch.float32).double() - weight.double()).abs()
    assert (moved <= bound * (1 + 1e-6)).all() and moved.any()
    largest = weight.float().abs().argmax(1, keepdim=True)
    assert (found.data.float().gather(1, largest).abs() > 200).all()


def test_the_best_scale_of_several_is_taken():
    weight = rand(50, 300)
    errors = [(dequantize(quantize(weight, None, number), torch.float32) - weight).square().sum(1) for number in (1, 16)]
    assert (errors[1] <= errors[0]).all() and errors[1].sum() < 0.92 * errors[0].sum()
    assert torch.equal(quantize(weight, None, 1).scale, weight.abs().amax(1) * (1 / 448))


def test_columns_are_sampled_in_wide_rows(monkeypatch):
    weight = rand(20, 300)
    weight[:, 1::2] = 0.1  # not in the sample, so the scale is as good for the others as if these were not there
    monkeypatch.setattr(module, "SAMPLE_COLUMNS", 150)
    found = quantize(weight).scale
    assert torch.equal(found, quantize(weight[:, ::2].contiguous()).scale)


def test_rows_of_zeros_and_of_no_numbers():
    weight = torch.tensor([[0.0, -0.0], [1.0, math.nan], [math.inf, 1.0], [1e-38, 0.0], [3e38, -3e38]])
    found = dequantize(quantize(weight), torch.float32)
    assert not found[0].any() and found[1].isnan().all()
    assert not found[2].isfinite().all(), "an infinity must not turn into a number"
    assert found[3:].isfinite().all() and torch.allclose(found[4], weight[4], rtol=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-6), (torch.bfloat16, 2**-7)])
@pytest.mark.parametrize("rows", [0, 1, 8, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_workspace", [False, True])
def test_linear(rows, has_bias, has_workspace, dtype, tolerance):
    x, bias = rand(rows, 40).to(dtype), rand(70, seed=2).to(dtype) if has_bias else None
    workspace = torch.full((70 * 40 + 3,), math.nan, dtype=dtype) if has_workspace else None
    weight = quantize(rand(70, 40, seed=1), workspace)
    expected = F.linear(x.double(), dequantize(weight, torch.float64), None if bias is None else bias.double())
    before = x.clone()
    found = linear(x, pack_linear(weight), bias)
    assert found.dtype == dtype and found.is_contiguous() and found.shape == (rows, 70) and torch.equal(x, before)
    # bf16 rounds the sum, the scaled sum and the sum with the bias.
    scale = expected.abs().amax().item() if rows else 1.0
    torch.testing.assert_close(found.double(), expected, atol=tolerance * scale, rtol=0)
    if has_workspace:
        assert workspace[70 * 40 :].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, rank", [(1, 0), (3, 1), (8, 7)])
def test_a_loaded_shard_is_the_quantised_shard(tmp_path, size, rank, dtype):
    folder = save_model(make_model("llama", attention_bias=True, mlp_bias=True), tmp_path)
    config = load_config(folder)
    plan = ShardPlan.make(config, size, rank)
    calls: list[tuple[int, int]] = []
    plain = load_weights(Checkpoint.open(folder, config), plan, dtype, CPU)
    found = load_weights(Checkpoint.open(folder, config), plan, dtype, CPU, lambda *call: calls.append(call), is_fp8=True)
    for layer, wanted in zip(found.layers, plain.layers):
        for name in MATRICES:
            matrix, expected = getattr(layer, name), quantize(getattr(wanted, name))
            assert isinstance(matrix, Fp8Weight) and matrix.workspace.dtype == dtype
            assert torch.equal(matrix.data.view(torch.uint8), expected.data.view(torch.uint8)), name
            assert torch.equal(matrix.scale, expected.scale), name
        assert torch.equal(layer.input_norm, wanted.input_norm) and torch.equal(layer.qkv_bias, wanted.qkv_bias)
    assert torch.equal(found.embedding, plain.embedding) and torch.equal(found.head, plain.head)
    assert found.num_bytes == shard_bytes(config, plan, dtype, is_fp8=True) == calls[-1][0] == calls[-1][1]
    workspaces = {id(getattr(layer, name).workspace) for layer in found.layers for name in MATRICES}
    assert len(workspaces) == 1, "one workspace serves all"


def test_loading_never_holds_two_wide_matrices(tmp_path, monkeypatch):
    """What fits 72B on one GPU: beside the FP8 shard there is the workspace, and every matrix is put together in it."""
    folder = save_model(make_model("qwen2"), tmp_path)
    config = load_config(folder)
    places = set()

    def spy(weight, workspace, num_scales):
        places.add(weight.data_ptr())
        return quantize(weight, workspace, num_scales)

    monkeypatch.setattr(engine.weights, "quantize", spy)
    weights = load_weights(Checkpoint.open(folder, config), ShardPlan.make(config, 1, 0), torch.float32, CPU, is_fp8=True)
    assert places == {weights.layers[0].qkv.workspace.data_ptr()}
    assert weights.layers[0].qkv.workspace.numel() == max(getattr(weights.layers[0], name).data.numel() for name in MATRICES)


def test_every_degree_answers_in_fp8(tmp_path):
    """The scales of o and down are of a rank's slice, so degrees differ from each other as much as from the unquantised model."""
    folder = save_model(make_model("qwen2", tie_word_embeddings=True), tmp_path)
    runs = [answer(folder, [request(range(3, 40), prompt_logprobs=0)], size, dtype="fp8") for size in (1, 2, 3)]
    plain = answer(folder, [request(range(3, 40), prompt_logprobs=0)])
    wanted = _logprobs(plain)
    for run in runs:
        assert len(run.token_ids[0]) == 16
        moved = (_logprobs(run) - wanted).abs()
        assert 0 < moved.mean() < 0.15, moved  # random weights, where errors add up; unquantised degrees differ by 1e-5


def _logprobs(run) -> torch.Tensor:
    return torch.tensor([entry.logprob for entry in run.answers[0][0].prompt_logprobs[1:]])


@pytest.fixture(scope="module")
def chunks() -> list[list[int]]:
    """English prose that every Python brings, 4 texts of 512 tokens."""
    token_ids = Text.load(MODEL).encode("\n".join(topics[name] for name in ("assignment", "class", "numbers", "exceptions")))
    assert len(token_ids) >= 4 * 512
    return [token_ids[first : first + 512] for first in range(0, 4 * 512, 512)]


@pytest.mark.model
@pytest.mark.slow
def test_perplexity_of_a_real_model(chunks):
    def perplexity(dtype: str) -> float:
        requests = [request(ids, prompt_logprobs=0, max_tokens=1) for ids in chunks]
        run = answer(MODEL, requests, dtype=dtype, kv_memory_bytes=1 << 28)
        values = [entry.logprob for answers in run.answers for entry in answers[0].prompt_logprobs[1:]]
        assert len(values) == 4 * 511
        return math.exp(-sum(values) / len(values))

    plain, found = perplexity("float32"), perplexity("fp8")
    print(f"perplexity over {4 * 511} tokens: fp32 {plain:.4f}, fp8 {found:.4f}, {100 * (found / plain - 1):+.2f} %")
    assert found != plain and abs(found / plain - 1) < 0.01
