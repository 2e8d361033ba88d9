"""Weights on a GPU: files through pinned memory, FP8 against the CPU's, FP8 products in graphs, large random shards."""

from __future__ import annotations

import time

import pytest
import torch
import torch.nn.functional as F

import engine.checkpoint
import engine.staging
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.shapes import named_config
from engine.shard_plan import ShardPlan
from engine.weights import MATRICES, dummy_weights, load_weights, shard_bytes
from kernels.linear import linear
from kernels.quantize import dequantize, quantize
from tests.cpu.tiny import make_model, save_model

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, rank", [(1, 0), (3, 1)])
def test_files_arrive_whole(tmp_path, monkeypatch, dtype, saved, size, rank):
    """Blocks and buffers so small that buffers are taken hundreds of times while copies are under way."""
    folder = save_model(make_model("llama", attention_bias=True, mlp_bias=True).to(saved), tmp_path)
    config = load_config(folder)
    plan = ShardPlan.make(config, size, rank)
    wanted = load_weights(Checkpoint.open(folder, config), plan, dtype, CPU)
    monkeypatch.setattr(engine.checkpoint, "BLOCK_BYTES", 600)
    monkeypatch.setattr(engine.staging, "STAGING_BYTES", 600)
    found = load_weights(Checkpoint.open(folder, config), plan, dtype, GPU)
    for layer, right in zip(found.layers, wanted.layers):
        for name, tensor in vars(right).items():
            if tensor is not None:
                assert same_bits(getattr(layer, name), tensor), name
    assert same_bits(found.embedding, wanted.embedding) and same_bits(found.head, wanted.head)


def test_fp8_files_are_quantised_as_on_a_cpu(tmp_path):
    folder = save_model(make_model("qwen2"), tmp_path)
    config = load_config(folder)
    plan = ShardPlan.make(config, 1, 0)
    found, wanted = (
        load_weights(Checkpoint.open(folder, config), plan, torch.bfloat16, device, is_fp8=True) for device in (GPU, CPU)
    )
    for layer, right in zip(found.layers, wanted.layers):
        for name in MATRICES:
            matrix, other = getattr(layer, name), getattr(right, name)
            assert matrix.device == GPU and torch.equal(matrix.scale.cpu(), other.scale)
            assert same_bits(matrix.data, other.data), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 16, 33, 512])
def test_fp8_product(dtype, rows):
    weight = torch.randn(1000, 1024, device=GPU) * 0.02
    workspace = torch.empty(weight.numel(), dtype=dtype, device=GPU)
    matrix, bias = quantize(weight, workspace), torch.randn(1000, device=GPU).to(dtype)
    x = torch.randn(rows, 1024, device=GPU).to(dtype)
    found = linear(x, matrix, bias)
    wanted = F.linear(x.double(), dequantize(matrix, torch.float64), bias.double())
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def test_fp8_product_in_a_graph_allocates_nothing_wide():
    """Several matrices share a workspace; replays follow what is in their inputs."""
    workspace = torch.empty(4096 * 2048, dtype=torch.bfloat16, device=GPU)
    matrices = [quantize(torch.randn(4096, 2048, device=GPU) * 0.02, workspace) for _ in range(4)]
    x = torch.randn(32, 2048, device=GPU).bfloat16()
    wanted = [linear(x, matrix) for matrix in matrices]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        linear(x, matrices[0])  # cuBLAS allocates its own workspace at the first product on a stream
    stream.synchronize()
    before = torch.cuda.memory_allocated()
    with torch.cuda.graph(graph, stream=stream):
        outs = [linear(x, matrix) for matrix in matrices]
    assert torch.cuda.memory_allocated() - before < 4096 * 2048, "a wide copy of a matrix"
    for out in outs:
        out.fill_(float("nan"))
    graph.replay()
    for out, right in zip(outs, wanted):
        torch.testing.assert_close(out, right, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("is_fp8, size, limit_s", [(False, 2, 10.0), (True, 1, 20.0)])
def test_72b_is_made_in_seconds_and_fits(is_fp8, size, limit_s):
    """TP=2 in bf16: 73 GB a rank. FP8 on one GPU: 75 GB, which must not take more on the way than one matrix in bf16."""
    config = named_config("qwen2.5-72b")
    plan = ShardPlan.make(config, size, 0)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, started = torch.cuda.memory_allocated(), time.perf_counter()
    weights = dummy_weights(config, plan, torch.bfloat16, GPU, is_fp8=is_fp8)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    grown, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    print(f"{'fp8' if is_fp8 else 'bf16'} TP={size}: {grown / 1e9:.1f} GB in {seconds:.1f} s, peak {peak / 1e9:.1f} GB")
    assert weights.num_bytes == shard_bytes(config, plan, torch.bfloat16, is_fp8) and seconds < limit_s
    assert grown < weights.num_bytes * 1.01 + is_fp8 * 2 * 2 * 29568 * 8192
    assert peak < grown + 10 * 4 * (1 << 24)  # a few fp32 blocks
    layer = weights.layers[79]
    matrix = dequantize(layer.down, torch.float32) if is_fp8 else layer.down.float()
    assert 0.019 < matrix.std() < 0.021 and matrix.isfinite().all()
    del weights, layer, matrix
    torch.cuda.empty_cache()
