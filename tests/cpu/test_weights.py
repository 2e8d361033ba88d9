"""Shards of weights: together they are the model, padding is zero, memory is shard plus one tensor. Case 115."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint import Checkpoint
from engine.config import load_config, parse_config
from engine.shapes import named_config
from engine.shard_plan import ShardPlan
from engine.weights import ModelWeights, dummy_weights, load_weights, shard_bytes
from tests.cpu.tiny import make_model, save_model

CPU = torch.device("cpu")


def load_ranks(folder: Path, size: int, dtype: torch.dtype = torch.float32) -> list[tuple[ShardPlan, ModelWeights]]:
    config = load_config(folder)
    plans = [ShardPlan.make(config, size, rank) for rank in range(size)]
    return [(plan, load_weights(Checkpoint.open(folder, config), plan, dtype, CPU)) for plan in plans]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shards_sum_to_the_model(tmp_path, size):
    """Scatter every shard back by the plan's own head lists: the full matrices, and zeros in every padded place."""
    folder = save_model(make_model("llama", attention_bias=True, mlp_bias=True), tmp_path)
    full = load_file(folder / "model.safetensors")
    prefix, d = "model.layers.1.", 16
    o, down = torch.zeros(64, 128), torch.zeros(64, 100)
    q, k, gate, up = torch.zeros(128, 64), torch.zeros(32, 64), torch.zeros(100, 64), torch.zeros(100, 64)
    o_bias, head = torch.zeros(64), torch.zeros(131, 64)
    for plan, weights in load_ranks(folder, size):
        layer = weights.layers[1]
        q_local, k_local, v_local = layer.qkv.split([len(plan.q_heads) * d] + [len(plan.kv_heads) * d] * 2)
        for j, h in enumerate(plan.q_heads):
            rows, columns = q_local[j * d : j * d + d], layer.o[:, j * d : j * d + d]
            if h is None:
                assert not rows.any() and not columns.any() and not layer.qkv_bias[j * d : j * d + d].any()
                continue
            q[h * d : h * d + d] += rows
            o[:, h * d : h * d + d] += columns
            assert torch.equal(
                layer.qkv_bias[j * d : j * d + d], full[prefix + "self_attn.q_proj.bias"][h * d : h * d + d]
            )
        for j, h in enumerate(plan.kv_heads):
            if h is None:
                assert not k_local[j * d : j * d + d].any() and not v_local[j * d : j * d + d].any()
            else:
                k[h * d : h * d + d] = k_local[j * d : j * d + d]
                assert torch.equal(
                    v_local[j * d : j * d + d], full[prefix + "self_attn.v_proj.weight"][h * d : h * d + d]
                )
        begin, end = plan.mlp_range
        gate_local, up_local = layer.gate_up.chunk(2)
        gate[begin:end], up[begin:end] = gate_local[: end - begin], up_local[: end - begin]
        down[:, begin:end] = layer.down[:, : end - begin]
        assert not gate_local[end - begin :].any() and not layer.down[:, end - begin :].any()
        head[slice(*plan.vocab_range)] = weights.head[: plan.num_vocab_rows]
        if layer.o_bias is not None:
            o_bias += layer.o_bias
    attention = {"q_proj": q, "k_proj": k, "o_proj": o}
    for name, found in attention.items():
        assert torch.equal(found, full[f"{prefix}self_attn.{name}.weight"]), name
    for name, found in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
        assert torch.equal(found, full[f"{prefix}mlp.{name}.weight"]), name
    assert torch.equal(o_bias, full[prefix + "self_attn.o_proj.bias"])
    assert torch.equal(head, full["lm_head.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_and_progress(tmp_path, dtype):
    folder = save_model(make_model("qwen3"), tmp_path, max_shard_size="50KB")
    config = load_config(folder)
    plan = ShardPlan.make(config, 3, 1)
    calls: list[tuple[int, int]] = []
    weights = load_weights(Checkpoint.open(folder, config), plan, dtype, CPU, lambda *call: calls.append(call))
    assert weights.num_bytes == shard_bytes(config, plan, dtype) == calls[-1][0] == calls[-1][1]
    assert calls == sorted(calls) and len(set(calls)) == len(calls)
    assert weights.layers[0].qkv.dtype == weights.final_norm.dtype == dtype


def test_conversion_rounds_as_torch_does(tmp_path):
    folder = save_model(make_model("qwen2").to(torch.bfloat16), tmp_path)
    ((_, weights),) = load_ranks(folder, 1, torch.float32)
    expected = load_file(folder / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert expected.dtype == torch.bfloat16 and torch.equal(weights.layers[0].o, expected.float())


def test_packing_keeps_values_and_embedding(tmp_path):
    folder = save_model(make_model("qwen2", tie_word_embeddings=True), tmp_path)
    ((_, weights),) = load_ranks(folder, 1)
    plain = [weights.layers[0].qkv.clone(), weights.embedding.clone()]
    weights.pack()
    weights.pack()
    assert torch.equal(weights.layers[0].qkv.to_dense(), plain[0])
    assert torch.equal(weights.head.to_dense(), plain[1]) and torch.equal(weights.embedding, plain[1])


@pytest.mark.parametrize("size", [1, 8])
def test_dummy_weights(size):
    config = parse_config(
        {**make_model("qwen3").config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}, "config.json"
    )
    plan = ShardPlan.make(config, size, size - 1)
    weights = dummy_weights(config, plan, torch.float32, CPU, seed=3)
    again = dummy_weights(config, plan, torch.float32, CPU, seed=3)
    other = dummy_weights(config, plan, torch.float32, CPU, seed=4)
    assert weights.num_bytes == shard_bytes(config, plan, torch.float32)
    assert torch.equal(weights.layers[1].down, again.layers[1].down)
    assert not torch.equal(weights.layers[1].down, other.layers[1].down)
    assert bool((weights.layers[0].q_norm == 1).all()) and 0.015 < weights.layers[0].gate_up.std() < 0.025
    assert not weights.embedding[plan.num_vocab_rows :].any()


def test_shard_of_72b_at_8_ranks_has_an_eighth_of_the_model():
    config = named_config("qwen2.5-72b")
    plan = ShardPlan.make(config, 8, 7)
    share = shard_bytes(config, plan, torch.bfloat16) / (2 * config.num_parameters / 8)
    assert 1.0 <= share < 1.001  # only norms are replicated


LOADER = """
import json, sys
from pathlib import Path
import torch
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.shard_plan import ShardPlan
from engine.weights import load_weights

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
config = load_config(folder)
plan = ShardPlan.make(config, 4, rank)
checkpoint = Checkpoint.open(folder, config)


def peak_bytes():
    # VmHWM, because ru_maxrss survives exec and would start at the peak of the test process.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at the present size
before = peak_bytes()
weights = load_weights(checkpoint, plan, getattr(torch, sys.argv[3]), torch.device("cpu"))
print(json.dumps({"growth": peak_bytes() - before, "shard": weights.num_bytes}))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory) -> Path:
    """310 MB in fp32: four layers of 16 MB each, and an embedding and head of 123 MB each, in one file."""
    model = make_model(
        "qwen2", vocab_size=60000, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=64
    )
    return save_model(model, tmp_path_factory.mktemp("large"))


def test_peak_memory_is_shard_plus_one_tensor(large_folder):
    """Case 115: four processes load at once; none grows by more than its shard, one tensor and a fixed slack,
    with (odd ranks) and without conversion.

    Peak RSS counts mapped file pages too, so reading whole tensors, or keeping the file open, would show.
    """
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from Linux's /proc")
    root = Path(__file__).resolve().parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOADER, str(large_folder), str(rank), ("float32", "bfloat16")[rank % 2]],
            cwd=root, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(4)
    ]  # fmt: skip
    total = (large_folder / "model.safetensors").stat().st_size
    largest_slice = 60000 * 512 * 4 // 4
    slack = 24 * 2**20
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        report = json.loads(output)
        assert report["growth"] <= report["shard"] + largest_slice + slack, report
        assert report["shard"] < total / 3.9
