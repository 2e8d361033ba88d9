"""Packing a model into parts and putting it together again, with a tiny one."""

from __future__ import annotations

import json

import click
import pytest
import torch
from safetensors.torch import load_file

from engine.text import Text
from kernels.quantize import dequantize, quantize
from tests.cpu.engine_harness import answer, request
from tests.cpu.tiny import make_model, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer
from tests.gpu.carry_model import NUM_TOKENS, pack, unpack
from tests.near_ties import Reference

PROMPTS = ("The quick brown fox", "One two three")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = build_tiny_tokenizer(tmp_path_factory.mktemp("model"))
    return save_model(make_model("llama", vocab_size=512), folder)


def test_a_model_comes_out_as_its_matrices_in_fp8(model, tmp_path):
    parts = pack(model, tmp_path / "parts", PROMPTS, part_bytes=30_000)
    assert [part.name for part in parts] == [f"part-{n}-of-{len(parts)}" for n in range(1, len(parts) + 1)] and len(parts) > 2
    assert all(part.stat().st_size == 30_000 for part in parts[:-1]) and {*(tmp_path / "parts").iterdir()} == {*parts}
    rebuilt = tmp_path / "rebuilt"
    unpack(tmp_path / "parts", rebuilt)
    before, after = load_file(model / "model.safetensors"), load_file(rebuilt / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        whole = dequantize(quantize(tensor, num_scales=1), torch.bfloat16) if tensor.dim() == 2 else tensor.bfloat16()
        assert torch.equal(after[name], whole), name
    assert json.loads((rebuilt / "config.json").read_text())["dtype"] == "bfloat16"
    expected, text = json.loads((rebuilt / "expected.json").read_text()), Text.load(rebuilt)
    assert expected["prompts"] == [text.encode(prompt) for prompt in PROMPTS]
    assert [len(ids) for ids in expected["answers"]] == [NUM_TOKENS] * 2
    requests = [request(ids, max_tokens=NUM_TOKENS) for ids in expected["prompts"]]
    assert answer(rebuilt, requests, text=text).token_ids == expected["answers"]
    assert Reference(rebuilt).compare(expected["prompts"], None, expected["answers"], torch.float32).num_rows == 2


def test_missing_and_mixed_parts_are_named(model, tmp_path):
    parts = pack(model, tmp_path / "parts", PROMPTS, part_bytes=60_000)
    parts[1].rename(tmp_path / "elsewhere")
    with pytest.raises(click.UsageError, match=f"not one model: {parts[1].name}"):
        unpack(tmp_path / "parts", tmp_path / "rebuilt")
    (tmp_path / "elsewhere").rename(parts[1])
    (tmp_path / "parts" / "part-1-of-1").write_bytes(b"")
    with pytest.raises(click.UsageError, match=f"not one model: {len(parts) + 1} of {len(parts)}"):
        unpack(tmp_path / "parts", tmp_path / "rebuilt")
    assert not (tmp_path / "rebuilt").exists()
    assert pack(model, tmp_path / "parts", PROMPTS, part_bytes=60_000) == parts, "parts of an older packing are gone"
    unpack(tmp_path / "parts", tmp_path / "rebuilt")
