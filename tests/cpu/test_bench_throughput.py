"""The throughput bench without its GPU: the load, the tenths, the floor, the record."""

from __future__ import annotations

import random

import pytest
from click.testing import CliRunner

from engine.bench.load import VLLM, Case, open_engine
from engine.bench.throughput import (
    Requests,
    Timing,
    TokenLog,
    describe,
    main,
    make_record,
    tenths_tok_s,
    throughput_floor_s,
    time_throughput,
)
from engine.loading import draw_blueprint
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from launch.world import World


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(model: str = "tiny", **changes) -> Case:
    return Case(**{"model": model, "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 4, "prompt": 8, "output": 6, **changes})


def draw(count: int, prompt: int = 8, output: int = 6, vocab: int = 300, seed: int = 0) -> Requests:
    return Requests.draw(random.Random(seed), count, prompt, output, vocab)


def test_requests_are_mixed_and_the_same_every_time():
    found = draw(200)
    assert found == draw(200) and found != draw(200, seed=1)
    assert {len(prompt) for prompt in found.prompts} == set(range(4, 12)) and set(found.outputs) == set(range(3, 9))
    assert all(100 <= token_id < 300 for prompt in found.prompts for token_id in prompt)
    assert draw(50, prompt=2, output=2).outputs.count(0) == 0 and min(map(len, draw(50, prompt=2).prompts)) == 1


def test_the_default_load_is_the_peers():
    """1024 requests in 19.13 s at 6,927 output and 34,161 total tok/s, behind a warm-up of 16."""
    rng = random.Random(0)
    Requests.draw(rng, 16, 512, 128, 152064)
    found = Requests.draw(rng, 1024, 512, 128, 152064)
    assert (found.prompt_tokens, found.output_tokens) == (520_945, 132_499)
    seconds = found.output_tokens / 6927
    assert (found.prompt_tokens + found.output_tokens) / seconds == pytest.approx(34161, abs=2)


def test_a_run_on_a_cpu(monkeypatch):
    wanted, requests = case(dtype="fp32"), draw(12)
    with open_engine(wanted, "tiny", "cpu", max_model_len=21, max_step_tokens=None) as engine:
        timing = time_throughput(engine, draw(2, seed=1), requests)
        log = engine.stats
        assert log.prefill_tokens == requests.prompt_tokens
        assert log.decode_tokens == requests.output_tokens - 12
        assert log.marks[-1][1] == requests.output_tokens
    assert timing.seconds > 0 and len(timing.tenths_tok_s) == 10 and timing.drift_percent >= 0
    assert sum(requests.output_tokens / 10 / rate for rate in timing.tenths_tok_s) == pytest.approx(timing.seconds, rel=0.2)


def test_steps_of_a_burst_are_marked():
    log = TokenLog()
    log.add_burst_step(3, 0.1)
    log.add_burst_step(2, 0.1)
    assert [count for _, count in log.marks] == [3, 5] and log.decode_tokens == 5 and log.marks[0][0] <= log.marks[1][0]


def test_tenths_share_out_the_steps_between_them():
    # 5 tokens in the first second, 15 in the next two. A tenth has 2: the third takes one of each step, 1/5 s and 2/15 s.
    found = tenths_tok_s(100.0, [(101.0, 5), (103.0, 20)])
    assert found == pytest.approx([5.0, 5.0, 2 / (1 / 5 + 2 / 15), *[7.5] * 7])


def test_tenths_of_an_even_run_are_even():
    found = tenths_tok_s(0.0, [(0.5 * step, 7 * step) for step in range(1, 40)])
    assert found == pytest.approx([14.0] * 10)


def test_drift_leaves_out_filling_and_draining():
    assert Timing(1.0, (1, 2, 10, 11, 10, 10, 12, 10, 3, 1)).drift_percent == pytest.approx(20.0)


def test_the_floor():
    blueprint = draw_blueprint(EngineSettings("qwen2.5-7b", load_format="dummy", dtype="bfloat16"), World())
    # One row of 1000 steps: reading. Its rows of keys and values grow from 11 to 1009 tokens.
    alone = throughput_floor_s(case("qwen2.5-7b"), Requests(([5] * 10,), (1000,)), blueprint)
    weights = 2 * (blueprint.config.num_parameters - 152064 * 3584)
    assert alone == pytest.approx((1000 * weights + sum(range(11, 1010)) * 57344) / 4.8e12)
    # Four at once cost one reading; five do not fit.
    rows = [throughput_floor_s(case("qwen2.5-7b"), Requests(([5],) * n, (1,) * n), blueprint) for n in (1, 4, 5)]
    assert rows == pytest.approx([weights / 4.8e12, weights / 4.8e12, 2 * weights / 4.8e12])
    # Long prompts: multiplying.
    long = throughput_floor_s(case("qwen2.5-7b"), Requests(([5] * 4096,) * 8, (1,) * 8), blueprint)
    assert long == pytest.approx(2 * 6.525e9 * 8 * 4096 / 989e12, rel=0.1)


def test_record():
    requests, tenths = draw(1024, 512, 128, 152064), tuple(float(rate) for rate in range(100, 110))
    wanted = case("qwen2.5-7b", batch=256, prompt=512, output=128)
    found = make_record(wanted, requests, Timing(20.0, tenths), 10.0, "graph", "none")
    assert found.case == {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 256, "prompt": 512,
                          "output": 128, "requests": 1024, "backend": "graph", "comm": "none"}  # fmt: skip
    total = requests.prompt_tokens + requests.output_tokens
    assert found.metrics["output_tok_s"] == requests.output_tokens / 20 and found.metrics["total_tok_s"] == total / 20
    assert found.metrics["drift_percent"] == pytest.approx(100 * 5 / 102) and found.metrics["tenth_10_tok_s"] == 109.0
    assert found.ceiling == {"output_tok_s": requests.output_tokens / 10, "total_tok_s": total / 10, "seconds": 10.0}
    assert found.peer == {"name": VLLM, "output_tok_s": 6927.0, "total_tok_s": 34161.0}
    lines = "\n".join(describe(found, requests))
    assert all(words in lines for words in ("1024 requests", "in 20.00 s", "6927", "drift 4.9 %"))
    fewer = draw(100, 512, 128, 152064)
    assert not make_record(wanted, fewer, Timing(20.0, tenths), 10.0, "graph", "none").peer


def test_the_command():
    run = CliRunner().invoke
    options = {"model": "tiny", "device": "cpu", "dtype": "fp32", "prompt": 4, "output": 3, "requests": 9, "batch": 4}
    done = run(main, [f"--{name}={value}" for name, value in options.items()])
    assert done.exit_code == 0 and "output tok/s of 9 requests" in done.output
    refused = run(main, ["--device", "cpu", "--record", "x.jsonl"])
    assert refused.exit_code == 2 and "keeps numbers of GPUs" in refused.output
    refused = run(main, ["--prompt", "1"])
    assert refused.exit_code == 2 and "x>=2" in refused.output
