"""The decode bench without its GPU: what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from engine.bench.decode import Timing, describe, main, make_record, time_decode
from engine.bench.load import VLLM, Case, make_prompts, open_engine, run_once
from engine.bench.roof import Reads
from engine.loading import draw_blueprint
from engine.profile.host_syncs import count_host_copies
from engine.settings import EngineSettings
from engine.shapes import SHAPES, named_config
from launch.world import World


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(model: str = "tiny", **changes) -> Case:
    return Case(**{"model": model, "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 3, "prompt": 5, "output": 4, **changes})


@pytest.mark.parametrize("dtype, shard_of", [("fp32", None), ("fp8", None), ("fp32", 3)])
def test_a_run_on_a_cpu(dtype, shard_of):
    wanted = case(dtype=dtype, output=40)  # so many steps that a hiccup of the machine is short against them
    with open_engine(wanted, "tiny", "cpu", shard_of) as engine:
        assert engine.blueprint.is_fp8 == (dtype == "fp8")
        assert engine.backend == "eager"
        stats = run_once(engine, make_prompts(wanted, 300), [4] * 3).stats
        assert (stats.prefill_tokens, stats.decode_tokens) == (15, 9)  # prefill in one step, then three steps of three
        timing = time_decode(engine, wanted, repeats=3)
    assert timing.tpot_ms > 0


def test_a_row_too_few_or_too_short_fails_loudly(monkeypatch):
    with open_engine(case(), "tiny", "cpu") as engine:
        prompts = make_prompts(case(), 300)
        whole = engine.generate
        monkeypatch.setattr(engine, "generate", lambda *args, **more: whole(*args, **more)[:2])
        with pytest.raises(SystemExit, match="3 rows were asked for, and the engine gave 2"):
            run_once(engine, prompts, [4, 4, 4])
        short = [{"max_tokens": count, "ignore_eos": True} for count in (4, 2, 4)]
        monkeypatch.setattr(engine, "generate", lambda prompts, params, on_done: whole(prompts, short))
        with pytest.raises(SystemExit, match="row 1 was to have 4 tokens, and the engine gave 2"):
            run_once(engine, prompts, [4, 4, 4])


def test_prompts_are_distinct_and_the_same_every_time():
    prompts = make_prompts(case(), 300)
    assert [len(prompt) for prompt in prompts] == [5] * 3 and len({tuple(prompt) for prompt in prompts}) == 3
    assert prompts == make_prompts(case(), 300)


def reads(wanted: Case, **settings) -> Reads:
    blueprint = draw_blueprint(EngineSettings(wanted.model, load_format="dummy", **settings), World())
    return Reads.of(wanted, blueprint)


def test_bytes_read_are_those_of_the_roof():
    """Qwen2.5-7B: 7.07e9 weights without the embedding, 28672 bytes of KV cache a token in bf16."""
    blueprint = draw_blueprint(EngineSettings("qwen2.5-7b", load_format="dummy", dtype="bfloat16"), World())
    params = blueprint.config.num_parameters - 152064 * 3584
    found = Reads.of(case("qwen2.5-7b", batch=2, prompt=512, output=128), blueprint)
    assert found == Reads(2 * params, 2 * 576 * 2 * 28 * 4 * 128 * 2)
    # A tied head is the embedding, and all of it is read.
    tied = reads(case("qwen2.5-0.5b"), dtype="bfloat16")
    assert tied.weight_bytes == 2 * named_config("qwen2.5-0.5b").num_parameters
    assert reads(case("tiny", ranks_per_gpu=2)).total == 2 * reads(case("tiny")).total
    fp8 = reads(case("qwen2.5-72b", tp=2, batch=1, dtype="fp8"), dtype="fp8", shard_of=2)
    assert 0.5 < fp8.weight_bytes / reads(case("qwen2.5-72b", tp=2, batch=1), dtype="bfloat16", shard_of=2).weight_bytes < 0.53


def test_record(tmp_path, monkeypatch):
    wanted = case("qwen2.5-7b", batch=1, prompt=512, output=129)
    found = make_record(wanted, Timing(4.0, 0), Reads(14_000_000_000, 400_000_000), 28, "graph", "none")
    assert found.case == {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512,
                          "output": 129, "backend": "graph", "comm": "none"}  # fmt: skip
    assert found.metrics == pytest.approx({
        "tpot_ms": 4.0, "decode_tok_s": 250.0, "hbm_tb_s": 3.6, "layer_residual_us": (4000 - 14e9 / 4.59e6) / 28,
        "host_syncs_per_token": 0.0,
    })  # fmt: skip
    assert found.ceiling == pytest.approx({"tpot_ms": 3.0, "decode_tok_s": 333.333, "hbm_tb_s": 4.8}, rel=1e-5)
    assert found.peer == {"name": VLLM, "tpot_ms": 4.71, "decode_tok_s": 212.3}
    lines = "\n".join(describe(found, Reads(14_000_000_000, 400_000_000)))
    wanted = ("TPOT      4.000 ms, floor 3.000", "4.71 ms", "250.0 tok/s of 333.3", "3.60 TB/s, 75 % of 4.8",
              "of the host a step: 0.000; inside torch: not counted")  # fmt: skip
    assert all(words in lines for words in wanted)
    monkeypatch.setattr("sys.argv", ["x", "--model", "qwen2.5-7b"])
    found.append_to(tmp_path / "decode.jsonl", "1 x H200", "engine.bench.decode")
    assert json.loads((tmp_path / "decode.jsonl").read_text())["bench"] == "decode"


def test_waits_that_are_not_counted_are_not_recorded():
    found = make_record(case(batch=2), Timing(4.0, None), Reads(1, 1), 28, "eager", "none")
    assert "host_syncs_per_token" not in found.metrics and "not counted" in "\n".join(describe(found, Reads(1, 1)))
    assert make_record(case(batch=2), Timing(4.0, 6), Reads(1, 1), 28, "eager", "none").metrics["host_syncs_per_token"] == 2.0
    counted = make_record(case(batch=2), Timing(4.0, 0, 1.0, 3.0), Reads(1, 1), 28, "eager", "none")
    assert (counted.metrics["torch_syncs_per_token"], counted.metrics["host_copies_per_token"]) == (1.0, 3.0)
    assert "inside torch: 1.000; copies to the host a step: 3.000" in "\n".join(describe(counted, Reads(1, 1)))


def test_copies_are_counted_by_the_profilers_names(monkeypatch):
    """With a stand-in for the profiler, which needs a GPU to see any copy."""
    names = ["Memcpy DtoH (Device -> Pageable)", "Memcpy HtoD (Pinned -> Device)", "copy_", "Memcpy DtoH (Device -> Pinned)"]
    done = []
    assert count_host_copies(lambda: done.append(1)) is None and done == [1]

    class Profiler:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

        def events(self):
            return [type("Event", (), {"name": name}) for name in names]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(*shape))
    monkeypatch.setattr(torch.profiler, "profile", Profiler)
    assert count_host_copies(lambda: done.append(2)) == 1 and done == [1, 2], "its own copy does not count"
    names.clear()
    assert count_host_copies(lambda: None) is None, "a profiler that sees nothing"


@pytest.mark.parametrize("changes, comm", [({"ranks_per_gpu": 4}, "ipc"), ({}, "loopback"), ({"prompt": 100}, "none")])
def test_no_peer_where_the_work_is_another(changes, comm):
    wanted = case("qwen2.5-7b", **{"batch": 1, "prompt": 512, "output": 129, **changes})
    assert not make_record(wanted, Timing(4.0, 0), Reads(1, 1), 28, "graph", comm).peer


def test_the_command():
    run = CliRunner().invoke
    options = {"model": "tiny", "device": "cpu", "dtype": "fp32", "prompt": 4, "output": 3, "repeats": 1}
    done = run(main, [f"--{name}={value}" for name, value in options.items()])
    assert done.exit_code == 0 and "ms a step of 1 rows" in done.output
    refused = run(main, ["--device", "cpu", "--record", "x.jsonl"])
    assert refused.exit_code == 2 and "keeps numbers of GPUs" in refused.output
    refused = run(main, ["--dtype", "int4"])
    assert refused.exit_code == 2 and all(name in refused.output for name in ("bf16", "fp8", "fp32"))
    refused = run(main, ["--model", "qwen2.5-8b", "--device", "cpu"])
    assert refused.exit_code == 3 and "qwen2.5-7b" in refused.output
