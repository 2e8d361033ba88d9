"""The report on FP8 weights: its numbers by hand, a kind at a time, and the bounds of a real model."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from engine.bench.fp8_error import LogitError, WatchProducts, describe, in_dtype, main, make_record, measure, read_text
from engine.loading import draw_blueprint, load_blueprint_weights
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from engine.weights import MATRICES
from kernels.linear import linear
from kernels.quantize import dequantize, quantize
from launch.world import World
from tests.cpu.test_processes import MODEL
from tests.cpu.tiny import make_model, save_model


@pytest.fixture
def tiny(tmp_path):
    folder = save_model(make_model("qwen2"), tmp_path)
    return draw_blueprint(EngineSettings(str(folder), dtype="float32"), World())


def test_error_of_logits_by_hand():
    right = torch.tensor([[0.0, 2.0, 1.0, 1.0], [3.0, 1.0, 0.0, 0.0]])
    found = torch.tensor([[5.0, 7.0, 8.0, 4.0], [4.0, 2.0, 1.0, 1.0]])  # the second row is the same but for a constant
    error = LogitError()
    error.add_logits(found, right, torch.tensor([3, 2]))
    moved = [[0.0, 0.0, 2.0, -2.0], [0.0] * 4]
    assert error.percent == pytest.approx(100 * math.sqrt(8 / (2 + 6))) and error.largest == pytest.approx(2.0)
    assert (error.agreeing, error.num_tokens, error.num_logits) == (1, 2, 8)
    expected = F.kl_div(found.log_softmax(-1), right.log_softmax(-1), log_target=True, reduction="sum")
    metrics = error.metrics(num_chunks=1)
    assert metrics["kl_nats"] == pytest.approx(float(expected) / 2) and metrics["top1_agreement"] == 0.5
    assert metrics["logits_rms_error"] == pytest.approx(torch.tensor(moved).square().mean().sqrt().item())
    ratio = right.softmax(-1)[0, 2] / found.softmax(-1)[0, 2]  # the one token that is predicted is the second one
    assert metrics["perplexity_percent"] == pytest.approx(100 * (float(ratio) - 1), rel=1e-5)


@torch.inference_mode()
def test_products_are_compared_without_their_bias():
    """Also where the matrices have been packed."""
    x, weight, bias = torch.randn(5, 40), torch.randn(30, 40), 1e4 * torch.randn(30)

    class Weights:
        layers = [type("Layer", (), dict.fromkeys(MATRICES[1:]) | {"qkv": weight})()]

    class Other:
        layers = [type("Layer", (), {"qkv": quantize(weight)})()]

    with WatchProducts(Weights, {"fp8": Other}) as watch:
        linear(x, weight, bias)
        linear(x, weight.clone(), bias)  # no matrix of the model
    right = x.double() @ weight.double().T
    wrong = x.double() @ dequantize(quantize(weight), torch.float64).T
    assert watch.errors["fp8"]["qkv"].percent == pytest.approx(100 * float((wrong - right).norm() / right.norm()), rel=0.02)
    assert watch.errors["fp8"]["o"].right == 0.0


def test_a_model_is_not_off_from_itself(tiny, monkeypatch):
    monkeypatch.setattr("engine.bench.fp8_error.quantize", lambda weight: weight.clone())
    monkeypatch.setattr("engine.bench.fp8_error.in_dtype", lambda weights, dtype: in_dtype(weights, torch.float32))
    report = measure(tiny, [list(range(40)), list(range(50, 90))])
    metrics = report.metrics | {f"bf16_{name}": value for name, value in report.baseline.items()}
    assert metrics.pop("top1_agreement") == metrics.pop("bf16_top1_agreement") == 1.0
    assert all(abs(value) < 1e-2 for value in metrics.values()), metrics


def test_each_kind_has_its_error(tiny):
    report = measure(tiny, [list(range(70))])
    weights = load_blueprint_weights(tiny)
    for kind in MATRICES:
        matrices = [getattr(layer, kind) for layer in weights.layers]
        lost = sum(float((dequantize(quantize(w), torch.float32) - w).square().sum()) for w in matrices)
        own = 100 * math.sqrt(lost / sum(float(w.square().sum()) for w in matrices))
        # Random weights: activations have no direction of their own, so products lose what weights lose.
        assert report.products[kind].percent == pytest.approx(own, rel=0.25), kind
        assert 0 < report.baseline_products[kind].percent < report.products[kind].percent / 4
        assert 0 < report.logits[kind].percent < report.whole.percent * 1.2


def test_the_command_on_a_shape(monkeypatch, tmp_path):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))
    path = tmp_path / "fp8_error.jsonl"
    done = CliRunner().invoke(main, ["--model", "tiny", "--tokens", "40", "--device", "cpu", "--record", str(path)])
    assert done.exit_code == 0 and "tiny, 40 tokens" in done.output and "qkv" in done.output, done.output
    assert '"bench": "fp8_error"' in path.read_text() and '"perplexity_percent": 1.0' in path.read_text()


@pytest.mark.model
@pytest.mark.slow
def test_bounds_of_a_real_model():
    blueprint = draw_blueprint(EngineSettings(MODEL, dtype="float32"), World())
    record = make_record(MODEL, 128, measure(blueprint, read_text(blueprint, 128)))
    print("\n".join(describe(record)))
    metrics, peer = record.metrics, record.peer
    for kind in MATRICES:
        assert 0.5 < metrics[f"{kind}_error_percent"] < 3.0 and peer[f"{kind}_error_percent"] < 0.5
        assert 0.5 < metrics[f"{kind}_logits_percent"] < 6.0
    assert peer["logits_error_percent"] < 3.0 < metrics["logits_error_percent"] < 10.0
    assert metrics["top1_agreement"] > 0.8 and 0 < metrics["kl_nats"] < 0.03  # so few tokens say nothing of the perplexity
