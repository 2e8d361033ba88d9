"""The prefill bench without its GPU, the roofs it is held against, and the count of host waits."""

from __future__ import annotations

import warnings

import pytest
import torch
from click.testing import CliRunner

from engine.bench.load import VLLM, Case, open_engine
from engine.bench.prefill import DEFAULT_WAYS, Timing, describe, main, make_record, prefill_floor_s, time_prefill
from engine.bench.roof import floor_s, num_operations, num_pairs
from engine.loading import draw_blueprint
from engine.profile.host_syncs import count_host_syncs
from engine.settings import EngineSettings
from engine.shapes import SHAPES, named_config
from launch.world import World


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(model: str = "tiny", **changes) -> Case:
    fixed = {"model": model, "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512, "output": 1}
    return Case(**{**fixed, **changes})


def test_a_run_on_a_cpu():
    wanted = case(dtype="fp32", batch=3, prompt=5)
    with open_engine(wanted, "tiny", "cpu", max_model_len=5 + 129) as engine:
        seen = []
        generate = engine.generate
        engine.generate = lambda prompts, params, **more: seen.append((prompts, params)) or generate(prompts, params, **more)
        timing = time_prefill(engine, wanted, repeats=4)
        assert (engine.stats.prefill_tokens, engine.stats.decode_tokens) == (15, 0)
    assert len(timing.ttft_ms) == 4 and min(timing.ttft_ms) > 0 and timing.num_syncs is None
    assert len(seen) == 2 + 1 + 4  # warm-up, count of waits, repeats
    assert len({tuple(row) for prompts, _ in seen for row in prompts}) == 7 * 3  # no prompt twice
    assert [[row["max_tokens"] for row in params] for _, params in seen] == [[count] * 3 for count in (1, 1, 129, 1, 1, 1, 1)]


def test_percentiles():
    timing = Timing(tuple(float(ms) for ms in range(21)), None)
    assert [timing.percentile(percent) for percent in (10, 50, 90)] == pytest.approx([2.0, 10.0, 18.0])
    assert Timing((7.0,), None).percentile(90) == 7.0


@pytest.mark.parametrize("length, window", [(1, None), (7, None), (7, 7), (7, 3), (2, 5)])
def test_pairs_are_those_of_the_mask(length, window):
    mask = torch.ones(length, length).tril()
    if window is not None:
        mask = mask.triu(1 - window)
    assert num_pairs(length, window) == int(mask.sum())


def test_operations_are_two_a_weight_and_token():
    """Qwen2.5-7B: 6.525e9 weights in the matrices of the layers, 0.545e9 in the head; attention apart."""
    config = named_config("qwen2.5-7b")
    layers = 28 * (2 * 3584 * 128 * 32 + 3 * 3584 * 18944)
    attention = 28 * 4 * 3584 * (512 * 513 // 2 + 3 * 4 // 2)
    assert num_operations(config, [512, 3], 2) == 2 * layers * 515 + 2 * 2 * 152064 * 3584 + attention


def test_the_floor_is_the_larger_of_two():
    both = {"operations": 989 * 10**9, "num_bytes": 48 * 10**8}
    assert floor_s(case(), **both) == pytest.approx(1e-3)
    assert floor_s(case(), 2 * 989 * 10**9, 48 * 10**8) == pytest.approx(2e-3)
    assert floor_s(case(), 989 * 10**9, 144 * 10**8) == pytest.approx(3e-3)
    # Two of four ranks on each of two GPUs: each GPU does half.
    assert floor_s(case(tp=4, ranks_per_gpu=2), 4 * 989 * 10**9, 0) == pytest.approx(2e-3)
    assert floor_s(case(dtype="fp8"), 1979 * 10**9, 0) == pytest.approx(1e-3)


def test_the_floors_of_a_7b():
    blueprint = draw_blueprint(EngineSettings("qwen2.5-7b", load_format="dummy", dtype="bfloat16"), World())
    assert prefill_floor_s(case("qwen2.5-7b", prompt=16), blueprint) == pytest.approx(14.14e9 / 4.8e12, rel=1e-3)  # the weights
    assert prefill_floor_s(case("qwen2.5-7b", prompt=2048), blueprint) == pytest.approx(2 * 6.525e9 * 2048 / 989e12, rel=0.05)


def test_record():
    found = make_record(case("qwen2.5-7b"), Timing((20.0, 21.0, 28.0), 9), 7e-3, "graph", "none", "graph")
    assert found.case == {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512,
                          "output": 1, "backend": "graph", "comm": "none", "step": "graph"}  # fmt: skip
    assert found.metrics == pytest.approx({
        "ttft_ms": 21.0, "ttft_p10_ms": 20.2, "ttft_p90_ms": 26.6, "prefill_tok_s": 512e3 / 21, "host_syncs_per_request": 9.0,
    })  # fmt: skip
    assert found.ceiling == pytest.approx({"ttft_ms": 7.0, "prefill_tok_s": 512e3 / 7})
    assert found.peer == {"name": VLLM, "ttft_ms": 25.5, "prefill_tok_s": 20078.4}
    lines = "\n".join(describe(found))
    wanted = ("TTFT      21.00 ms (p10 20.20, p90 26.60), floor 7.00", "25.5 ms", "9.0 of the host")
    assert all(words in lines for words in wanted)


def test_what_is_not_counted_or_not_comparable_is_not_recorded():
    found = make_record(case("qwen2.5-7b", batch=2), Timing((20.0,), None), 7e-3, "graph", "none", "graph")
    assert "host_syncs_per_request" not in found.metrics and "not counted" in "\n".join(describe(found)) and not found.peer
    assert make_record(case(batch=2), Timing((20.0,), 6), 7e-3, "graph", "none", "graph").metrics["host_syncs_per_request"] == 3.0
    assert not make_record(case("qwen2.5-7b"), Timing((20.0,), 6), 7e-3, "graph", "loopback", "graph").peer
    assert not make_record(case("qwen2.5-7b", ranks_per_gpu=2), Timing((20.0,), 6), 7e-3, "graph", "ipc", "graph").peer


def test_cudnns_attention_is_named():
    found = make_record(case("qwen2.5-7b"), Timing((20.0,), 6), 7e-3, "graph", "none", "kernels")
    assert "kernels, attention by cudnn\n" in "\n".join(describe(found, "cudnn"))
    assert "step      kernels\n" in "\n".join(describe(found))


def test_ways_that_are_not_the_default_are_recorded():
    ways = {**DEFAULT_WAYS, "graph_tokens": 0, "fp8_products": "widened"}
    found = make_record(case("qwen2.5-7b"), Timing((20.0,), 6), 7e-3, "graph", "none", "kernels", ways)
    assert {name: found.case.get(name) for name in ways} == ways


def test_waits_are_counted_by_torchs_own_warnings(monkeypatch):
    modes = ["default"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def body() -> None:
        assert modes[-1] == "warn"
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    assert count_host_syncs(body) == 3
    waits = []

    def synchronize(device=None):
        assert modes[-1] == "default", "or a torch that warns of it would count it twice"
        waits.append(device)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    modes.clear()
    modes.append("default")
    assert count_host_syncs(lambda: (torch.cuda.synchronize(), body(), torch.cuda.synchronize("cuda:1"))) == 5
    assert waits == [None, "cuda:1"] and torch.cuda.synchronize is synchronize
    modes[:] = ["default", "warn", "default"]
    with pytest.raises(KeyError):
        count_host_syncs(lambda: {}["absent"])
    assert modes == ["default", "warn", "default", "warn", "default"]


def test_the_command():
    run = CliRunner().invoke
    done = run(main, ["--model=tiny", "--device=cpu", "--dtype=fp32", "--batch=2", "--prompt=4", "--repeats=1"])
    assert done.exit_code == 0 and "ms to the first token of 2 rows" in done.output
    refused = run(main, ["--device", "cpu", "--record", "x.jsonl"])
    assert refused.exit_code == 2 and "keeps numbers of GPUs" in refused.output
    refused = run(main, ["--batch", "257"])
    assert refused.exit_code == 2 and "1<=x<=256" in refused.output
