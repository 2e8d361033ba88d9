"""The cold-start bench without its GPU: fresh processes, their caches, the record; and the plan of `make bench`."""

from __future__ import annotations

import sys

import pytest
from click.testing import CliRunner

from engine.bench import coldstart
from engine.bench.coldstart import VLLM, describe, main, make_record, run_fresh, start_command, time_starts
from engine.bench.plan import Bench, plan_for, run_plan
from launch.environment import cache_folder, with_cache_base
from tests.cpu.tiny import make_model, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer

CASE = {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 32, "prompt": 512, "output": 1,
        "backend": "graph", "comm": "none"}  # fmt: skip
# Stands for a run: "seconds" are the number of earlier runs that left something in the cache folder.
CHILD = """
import json, os, pathlib
folder = pathlib.Path(os.environ["XDG_CACHE_HOME"])
seen = len(list(folder.iterdir()))
(folder / f"entry{seen}").touch()
print("a line that is not for us")
print(json.dumps({"seconds": {"first_token": seen}, "folder": str(folder)}))
"""


def stand_in(monkeypatch, code: str) -> None:
    monkeypatch.setattr(coldstart, "start_command", lambda *args: [sys.executable, "-c", code])


def test_fresh_processes_on_a_cpu(tmp_path):
    """Two real ones, reading the weights of a model folder."""
    folder = tmp_path / "tiny"
    save_model(make_model("qwen2", vocab_size=512), folder)
    build_tiny_tokenizer(folder)
    options = {"model": folder, "device": "cpu", "dtype": "fp32", "batch": 2, "prompt": 4, "load-format": "auto", "repeats": 1}
    done = CliRunner().invoke(main, [f"--{name}={value}" for name, value in options.items()], catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["cold", "warm"]
    for line in lines[:2]:
        seconds = dict(part.split() for part in line.strip().removesuffix(" s").split("  ", 1)[1].split(", "))
        assert list(seconds) == ["first_token", "imports", "blueprint", "comm", "weights", "graphs", "answer"]
        parts = sum(float(value) for name, value in seconds.items() if name != "first_token")
        assert 0 < parts <= float(seconds["first_token"]) + 0.1 and float(seconds["imports"]) > 0.1
    assert lines[2].startswith("tiny fp32, TP=1") and lines[2].endswith("caches cold") and "first token after" in lines[3]


def test_the_cold_run_finds_nothing_and_the_warm_one_what_it_left(monkeypatch, tmp_path):
    stand_in(monkeypatch, CHILD)
    runs = time_starts(1, {}, repeats=2, timeout_s=30)
    assert [run["seconds"]["first_token"] for run in runs["cold"]] == [0, 0]
    assert [run["seconds"]["first_token"] for run in runs["warm"]] == [1, 1]
    assert len({run["folder"] for run in runs["cold"]}) == 2


def test_our_caches_follow_the_variable(tmp_path):
    environ = with_cache_base(tmp_path, {"HOME": "/home/x", "XDG_CACHE_HOME": "/elsewhere", "OTHER": "kept"})
    assert cache_folder(environ) == tmp_path / "doorbell" and environ["OTHER"] == "kept"


def test_a_run_that_fails_or_hangs_ends_the_bench(monkeypatch, tmp_path):
    stand_in(monkeypatch, "import sys; sys.exit(3)")
    with pytest.raises(SystemExit) as ended:
        run_fresh(1, {}, tmp_path, timeout_s=30)
    assert ended.value.code == 3
    stand_in(monkeypatch, "import time; time.sleep(60)")
    with pytest.raises(SystemExit, match=r"no first token after 0.5 s"):
        run_fresh(1, {}, tmp_path, timeout_s=0.5)


def test_several_ranks_are_started_by_torchrun():
    alone, four = (start_command(tp, {"model": "m"}, 12.5) for tp in (1, 4))
    assert alone == [sys.executable, "-m", "engine.bench.first_token", "--model=m", "--started=12.5"]
    assert four[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"] and four[6:] == alone[1:]


def run_of(first_token: float, **changes) -> dict:
    return {"case": {**CASE, **changes}, "seconds": {"first_token": first_token, "graphs": 1.0}, "weight_bytes": 14_400_000_000}


def test_record():
    found = make_record("cold", "dummy", [run_of(30.0), run_of(20.0), run_of(90.0)])
    assert found.case == {**CASE, "caches": "cold", "weights": "random"}
    assert found.metrics == {"first_token_s": 30.0, "graphs_s": 1.0}
    assert found.ceiling == pytest.approx({"first_token_s": 3e-3})
    assert found.peer == {"name": VLLM, "first_token_s": 160.0}
    assert "first token after 30.00 s" in "\n".join(describe(found)) and "160 s" in "\n".join(describe(found))
    assert not make_record("warm", "dummy", [run_of(30.0)]).peer
    assert not make_record("cold", "auto", [run_of(30.0)]).peer
    assert not make_record("cold", "dummy", [run_of(30.0, ranks_per_gpu=2)]).peer


def test_what_the_command_refuses():
    refused = CliRunner().invoke(main, ["--device", "cpu", "--record", "x.jsonl"])
    assert refused.exit_code == 2 and "keeps numbers of GPUs" in refused.output
    refused = CliRunner().invoke(main, ["--load-format", "gguf"])
    assert refused.exit_code == 2 and "dummy" in refused.output and "auto" in refused.output


def test_the_plan_fits_the_machine():
    assert [bench.target for bench in plan_for(0)] == ["bench-cpu"]
    one = [bench.target for bench in plan_for(1)]
    wanted = ("decode", "prefill", "stages", "throughput", "coldstart", "attention", "products", "prefill-products")
    assert one == [f"bench-{name}" for name in wanted]
    names = [bench.name for bench in plan_for(4)]
    assert names[: len(one)] == one and "bench-comm TP=4" in names and "bench-signal" in names and "bench-soak TP=4 MPS=" in names
    assert "bench-ways" in names and "bench-comm TP=8" in [bench.name for bench in plan_for(16)]


def test_the_plan_goes_on_after_a_failure():
    done = []

    def run(bench: Bench) -> int:
        done.append(bench.target)
        return 2 if bench.target == "b" else 0

    assert run_plan([Bench("a", 1), Bench("b", 1, ("TP=2",)), Bench("c", 1)], run) == ["make b TP=2: exit code 2"]
    assert done == ["a", "b", "c"]


def test_every_planned_bench_is_a_target(request):
    makefile = (request.config.rootpath / "Makefile").read_text()
    assert all(f"\n{bench.target}:" in makefile for num_gpus in (0, 1, 8) for bench in plan_for(num_gpus))
