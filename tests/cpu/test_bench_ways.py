"""The bench of ways without its GPUs: what it starts, what it counts, what it writes and says, what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.bench import one_way, ways
from engine.bench.fresh import world_command
from engine.bench.load import Case, make_prompts, open_engine, run_once
from engine.bench.one_way import METRICS, measure, try_way
from engine.bench.ways import WAYS, Way, describe, equal_tokens, main, make_record, measure_ways, table
from engine.shapes import SHAPES
from launch.errors import CommUnavailable, ModelError
from results.render.page import render
from results.render.record import read_records
from tests.cpu.test_bench_speculate import make
from tests.cpu.tiny import make_model, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer

NAIVE, NCCL_GRAPH, ONE_SHOT_GRAPH = WAYS[0], WAYS[2], WAYS[4]
CASE = {"model": "qwen2.5-7b", "tp": 2, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 2, "prompt": 512, "output": 4}


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def tiny_case(**changes) -> Case:
    fixed = {"model": "tiny", "tp": 1, "ranks_per_gpu": 1, "dtype": "fp32", "batch": 2, "prompt": 5, "output": 4}
    return Case(**{**fixed, **changes})


def found(ttft_ms: float, tpot_ms: float, backend: str = "eager", comm: str = "ipc", rows=((1, 2, 3, 4), (5, 6, 7, 8))) -> dict:
    """What a world of one way prints."""
    counts = {"host_syncs_per_request": 3.0, "torch_syncs_per_token": 0.25, "host_copies_per_token": 1.0}
    return {
        "case": {**CASE, "backend": backend, "comm": comm},
        "metrics": {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, **counts},
        "ceiling": {"ttft_ms": 5.0, "tpot_ms": 1.5},
        "token_ids": [list(row) for row in rows],
        "device": "2 x Test GPU",
    }


def measured(*outcomes: dict, which=(NAIVE, NCCL_GRAPH, ONE_SHOT_GRAPH)) -> list:
    by_way = dict(zip(which, outcomes, strict=True))
    return measure_ways(which, by_way.__getitem__, lambda record, device: None)


def test_every_way_that_is_asked_for_is_there_once():
    assert [way.label for way in WAYS] == [
        "host_loop-eager", "nccl-eager", "nccl-graph", "one_shot-eager", "one_shot-graph", "lamport-eager", "lamport-graph",
        "auto-graph",
    ]  # fmt: skip
    for way in WAYS:
        assert way.all_reduce == (way.name if way.name in ("one_shot", "lamport") else "auto")
        assert way.comm == (way.name if way.name in ("host_loop", "nccl") else "auto")


def test_one_way_on_a_cpu_is_what_the_benches_of_prefill_and_decode_measure():
    wanted = tiny_case()
    with open_engine(wanted, "tiny", "cpu", max_model_len=5 + 129) as engine:
        numbers = measure(engine, wanted, repeats=1)
        tokens = run_once(engine, make_prompts(wanted, 300), [4, 4]).token_ids
    assert numbers["case"] == {**vars(wanted), "backend": "eager", "comm": "none"} and numbers["token_ids"] == tokens
    timed = {"ttft_ms", "tpot_ms"}
    assert set(numbers["metrics"]) == timed | {"host_syncs_per_token"}, "torch counts nothing without a GPU"
    assert numbers["metrics"]["host_syncs_per_token"] == 1.0 and set(numbers["ceiling"]) == timed <= set(METRICS)


def test_counts_of_a_gpu_are_passed_on(monkeypatch):
    """Stand-ins count a fixed number of waits, and three copies for each token of a row."""
    runs = []

    def copies(body):
        body()
        return 3 * runs[-1]

    def remember(engine, prompts, num_tokens, **more):
        runs.append(num_tokens[0])
        return run_once(engine, prompts, num_tokens, **more)

    monkeypatch.setattr(one_way.prefill, "count_host_syncs", lambda body: (body(), 8)[1])
    monkeypatch.setattr(one_way.decode, "run_once", remember)
    monkeypatch.setattr(one_way.decode, "count_host_syncs", lambda body: 2 * copies(body))
    monkeypatch.setattr(one_way.decode, "count_host_copies", copies)
    with open_engine(tiny_case(), "tiny", "cpu", max_model_len=5 + 129) as engine:
        metrics = measure(engine, tiny_case(), repeats=1)["metrics"]
    assert set(metrics) == set(METRICS)
    assert metrics["host_syncs_per_request"] == 4.0  # of each of two rows
    assert metrics["torch_syncs_per_token"] == 6.0 and metrics["host_copies_per_token"] == 3.0


def test_an_answer_that_is_too_short_fails_loudly(monkeypatch):
    with open_engine(tiny_case(), "tiny", "cpu", max_model_len=5 + 129) as engine:
        whole = engine.generate
        monkeypatch.setattr(engine, "generate", lambda prompts, params, **more: whole(prompts, {"max_tokens": 1}, **more))
        with pytest.raises(SystemExit, match="row 0 was to have 129 tokens, and the engine gave 1"):
            measure(engine, tiny_case(), repeats=1)


def test_what_there_is_not_here_is_absent_with_the_reason(monkeypatch):
    assert try_way(tiny_case(), "tiny", "cpu", "graph", 1) == {"absent": "its steps are not captured: on a CPU"}

    def refuse(*args, **settings):
        raise settings["error"]

    monkeypatch.setattr(one_way, "open_engine", refuse)
    assert try_way(tiny_case(), "tiny", "cpu", "eager", 1, error=CommUnavailable("NCCL refuses")) == {"absent": "NCCL refuses"}
    with pytest.raises(ModelError):  # nothing else is a way that there is not
        try_way(tiny_case(), "tiny", "cpu", "eager", 1, error=ModelError("no such shape"))


def test_records_have_the_naive_way_beside_them_and_how_many_tokens_agree(capsys):
    other = ((1, 2, 9, 4), (5, 6, 7, 8))  # from the third token on, whatever comes
    naive, ours = measured(found(30.0, 20.0, comm="host_loop"), {"absent": "not captured"}, found(10.0, 2.5, "graph", rows=other))
    assert naive.case == {**CASE, "backend": "eager", "comm": "host_loop", "way": "host_loop"} and naive.checked
    assert not naive.peer and "equal_tokens" not in naive.metrics
    assert (ours.case["way"], ours.case["backend"], ours.case["comm"]) == ("one_shot", "graph", "ipc")
    assert ours.peer == {"name": "host_loop", "ttft_ms": 30.0, "tpot_ms": 20.0}
    assert (ours.metrics["equal_tokens"], ours.ceiling["equal_tokens"]) == (6, 8)
    said = capsys.readouterr().out
    assert "[2/3] nccl-graph\n  absent: not captured\n" in said
    assert "other tokens than the first way: 6 of 8 equal before the first difference" in said
    same = make_record(ONE_SHOT_GRAPH, found(10.0, 2.5), found(30.0, 20.0), [])
    assert same.metrics["equal_tokens"] == 8 and not same.peer and len(describe(same)) == 1


def test_equal_tokens_end_at_the_first_difference_and_rows_have_one_length():
    assert equal_tokens([(1, 2, 3)], [(1, 9, 3)]) == 1
    assert equal_tokens([(1, 2), (3, 4)], [(1, 2), (9, 4)]) == 2
    with pytest.raises(ValueError):
        equal_tokens([(1, 2)], [(1,)])


def test_the_table(tmp_path):
    records = measured(found(30.0, 20.0, comm="host_loop"), {"absent": "no"}, found(10.0, 2.5, "graph"))
    heading, naive, ours, *note = table(records)
    assert heading.split("  ") != [heading] and len({len(line) for line in (heading, naive, ours)}) == 1
    assert heading.split()[:2] == ["way", "steps"] and "steps waited for" not in heading  # nobody counted it
    assert naive.split() == ["host_loop", "eager", "30.000", "20.000", "3", "0.250", "1.000", "-"]
    assert ours.split() == ["one_shot", "graph", "10.000", "2.500", "3", "0.250", "1.000", "8", "of", "8"]
    assert "128 tokens more" in " ".join(note)
    for record in records:
        record.append_to(tmp_path / "ways.jsonl", "2 x Test GPU", "engine.bench.ways")
    assert json.loads((tmp_path / "ways.jsonl").read_text().splitlines()[0])["command"].startswith("python -m engine.bench.ways")
    page, _ = render(read_records(tmp_path))
    first, second = (line for line in page.splitlines() if line.startswith(("| eager", "| graph")))
    assert "| host_loop | host_loop | 30 |" in first and "| ipc | one_shot | 10 |" in second
    assert "30 (3.00x)" in second and "20 (8.00x)" in second


def test_each_way_is_kept_as_soon_as_it_is_measured():
    kept = []

    def measure_or_fail(way: Way) -> dict:
        if way is ONE_SHOT_GRAPH:
            sys.exit(7)
        return found(30.0, 20.0)

    with pytest.raises(SystemExit):
        measure_ways((NAIVE, ONE_SHOT_GRAPH), measure_or_fail, lambda record, device: kept.append((record.case["way"], device)))
    assert kept == [("host_loop", "2 x Test GPU")]


def test_two_real_worlds_on_a_cpu(tmp_path):
    """One that there is, on two ranks, and one that there is not."""
    folder = tmp_path / "tiny"
    save_model(make_model("qwen2", vocab_size=512), folder)
    build_tiny_tokenizer(folder)
    options = {"model": folder, "device": "cpu", "dtype": "fp32", "prompt": 4, "output": 3, "repeats": 1}
    chosen = ["--way=lamport-eager", "--way=host_loop-eager"]
    command = [sys.executable, "-m", "engine.bench.ways", *(f"--{name}={value}" for name, value in options.items()), *chosen]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[1/2] host_loop-eager" and lines[1].startswith("  TTFT ")
    refusal = "--all-reduce lamport is not possible here: not ipc or nvshmem: it needs GPUs, and this run computes on cpu"
    assert lines[2:4] == ["[2/2] lamport-eager", f"  absent: {refusal}"]
    assert "tiny fp32, TP=2 (1 a GPU, host_loop), all ways; batch 1, prompts of 4, 3 tokens each" in done.stdout
    assert any(line.startswith("host_loop  eager") for line in lines)


def test_what_a_way_is_started_with(monkeypatch):
    commands = []

    def run(command, timeout_s, wanted):
        commands.append((command, timeout_s, wanted))
        return {"absent": "a stand-in"}

    monkeypatch.setattr(ways, "run_world", run)
    done = CliRunner().invoke(main, ["--tp=4", "--way=one_shot-graph", "--way=nccl-eager", "--timeout=9"])
    assert done.exit_code == 1 and "none of these ways can be had here" in done.output
    assert [wanted for _, _, wanted in commands] == ["numbers of nccl-eager", "numbers of one_shot-graph"]
    options = {"model": "qwen2.5-7b", "dtype": "bf16", "batch": 1, "prompt": 512, "output": 129, "comm": "auto",
               "all-reduce": "one_shot", "steps": "graph", "device": "cuda", "repeats": 5}  # fmt: skip
    assert commands[1][:2] == (world_command("engine.bench.one_way", 4, options), 9)
    accepted = {parameter.opts[0] for parameter in one_way.main.params}
    assert accepted == {f"--{name}" for name in options}


def test_what_the_command_refuses():
    for arguments, words in (
        (["--device=cpu", "--record=x.jsonl"], "keeps numbers of GPUs"),
        (["--tp=1"], "2<=x<=8"),
        (["--way=gloo-eager"], "'host_loop-eager'"),
    ):
        refused = CliRunner().invoke(main, arguments)
        assert refused.exit_code == 2 and words in refused.output, refused.output


def test_the_target_takes_its_variables_and_others_refuse_them():
    done = make("bench-ways", "WAYS=nccl-eager lamport-graph", "REPEATS=3", "MODEL=qwen2.5-0.5b")
    words = " ".join(done.stdout.replace("\\", "").split())
    assert done.returncode == 0 and "-m engine.bench.ways --model qwen2.5-0.5b --tp 2 --dtype bf16 --batch 1" in words
    assert words.endswith("--output 129 --repeats 3 --way nccl-eager --way lamport-graph --record results/ways.jsonl")
    for target, variable in (("bench-decode", "WAYS=x"), ("bench-ways", "EAGER=1"), ("bench-ways", "SHARD_OF=2")):
        refused = make(target, variable)
        assert refused.returncode == 2 and f"{variable.split('=')[0]}= has no part in {target}" in refused.stderr
    assert "may be one of: 2 3 4" in make("bench-ways", "TP=1").stderr
