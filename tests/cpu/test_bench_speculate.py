"""The bench of speculation without its GPU: what it times, what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner

from engine.bench import speculate
from engine.bench.acceptance import SetAcceptance
from engine.bench.drafted import Bench, DraftSource, LoadTiming, Timing, Trial, steady_tok_s
from engine.bench.load import Case, make_prompts, open_engine
from engine.bench.roof import Reads
from engine.bench.speculate import describe, main, make_record, measure, measure_loads
from engine.bench.speculate_load import MIN_REFILLS, describe_load, draw_load, make_load_record
from engine.bench.throughput import STEADY, TokenLog
from engine.drafts.speculation import DraftStats
from engine.graph.drafters import NgramDrafts
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from tests.cpu.engine_harness import CPU, twin_bursts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(**changes) -> Case:
    fixed = {"model": "tiny", "tp": 1, "ranks_per_gpu": 1, "dtype": "fp32", "batch": 2, "prompt": 5, "output": 60}
    return Case(**{**fixed, **changes})


def test_a_trial_is_a_rate_and_a_number():
    assert Trial.parse("0.8:5") == Trial(0.8, 5) and Trial.parse("0:adaptive") == Trial(0.0, None)
    for text in ("0.8", "5:0.8:1", "a:3", "1.5:3", "0.5:0", "0.5:9", "0.5:some"):
        with pytest.raises(click.BadParameter, match="RATE:DRAFTS|a rate is 0 to 1"):
            Trial.parse(text)


@contextmanager
def open_bench(wanted: Case, **settings):
    """(the engine, its bench) on a CPU, with steps that are not captured."""
    with open_engine(wanted, "tiny", "cpu", is_ngram=True, **settings) as engine:
        engine.replica.burst_backend = twin_bursts(engine.replica, lambda _: NgramDrafts(), max_drafts=8)
        yield engine, Bench(engine, repeats=1)


def test_what_is_accepted_is_what_was_set():
    wanted = case()
    prompts = make_prompts(wanted, 300)
    with open_bench(wanted) as (engine, bench):
        assert bench.time_plain(prompts, 60) > 0 and engine.draft_stats is None
        right, wrong = (bench.time_trial(Trial(rate, 4), prompts, 60) for rate in (1.0, 0.0))
        assert right.tpot_ms > 0 and right.stats.tokens_per_step > 4.5 and wrong.stats.num_accepted == 0
        assert bench.time_verification(3, prompts, 60) > 0 and engine.draft_stats.num_accepted == 0
        assert engine.replica.burst_backend.drafter.description == "n-grams of the row", "it guesses again"
        assert 0 < bench.time_trial(Trial(0.0, None), prompts, 60).stats.num_proposals < 2 * 59


@pytest.mark.parametrize("rate", (0.0, 0.3, 0.6, 0.9, 1.0))
def test_drafts_hold_at_the_rate_whatever_they_are(rate):
    wanted = case(batch=4, output=200)
    with open_bench(wanted, max_model_len=300) as (_, bench):
        stats = bench.time_load(Trial(rate, 3), draw_load(wanted, 3, 300)).stats
    expected = 1 + rate + rate**2 + rate**3
    assert abs(stats.tokens_per_step - expected) < 0.08 * expected


def test_every_place_of_every_row_is_judged_for_itself():
    judge, rows = SetAcceptance(50, CPU), SimpleNamespace(positions=torch.arange(64) * 3 % 7)
    drafts, ids = torch.zeros(64, 8, dtype=torch.int64), torch.arange(64 * 9) % 50
    chosen = ids.view(64, 9)[:, :8]
    for rate in (0.0, 0.25, 0.8, 1.0):
        judge.set_rate(rate)
        holds = judge(rows, drafts, ids) == chosen
        assert abs(holds.double().mean().item() - rate) < 0.06 and holds.shape == (64, 8)
        for part in (holds.double().mean(0), holds.double().mean(1)):
            assert rate in (0.0, 1.0) or part.unique().numel() > 1, "no row and no place is like all others"
        assert torch.equal(judge(rows, drafts, ids) == chosen, holds), "all ranks say the same"
    assert not drafts.any() and torch.equal(ids, torch.arange(64 * 9) % 50)


def test_a_load_has_mixed_answers_and_is_the_same_every_time():
    requests = draw_load(case(batch=8, prompt=6, output=40), 5, 300)
    assert requests == draw_load(case(batch=8, prompt=6, output=40), 5, 300) and len(requests.outputs) == 40
    assert {len(prompt) for prompt in requests.prompts} == {6} and len(set(map(tuple, requests.prompts))) == 40
    assert min(requests.outputs) >= 20 and max(requests.outputs) < 60 and len(set(requests.outputs)) > 10


@pytest.mark.parametrize("num_drafts", (None, 3))
@pytest.mark.parametrize("batch", (1, 4))
def test_in_the_steady_part_the_batch_is_full(monkeypatch, batch, num_drafts):
    """With as few requests as are allowed, step by step: where a tenth lies is a matter of tokens alone."""
    wanted = case(batch=4, output=60)
    with open_bench(wanted, max_model_len=300) as (engine, bench):
        engine.limit_batch(batch)
        scheduler, seen, mark = engine.replica.scheduler, [], TokenLog._mark

        def note(log, num_tokens):
            mark(log, num_tokens)
            seen.append((log.marks[-1][1], len(scheduler.running)))

        monkeypatch.setattr(TokenLog, "_mark", note)
        requests = draw_load(replace(wanted, batch=batch), MIN_REFILLS, 300)
        timing = bench.time_load(None if num_drafts is None else Trial(0.7, num_drafts), requests)
    assert timing.output_tok_s > 0 and (timing.stats is None) == (num_drafts is None)
    num_tokens, begin, end = requests.output_tokens, STEADY.start / 10, STEADY.stop / 10
    steady = [num_running for count, num_running in seen if begin * num_tokens < count < end * num_tokens]
    assert max(num_running for _, num_running in seen) == batch, "a limit of its own"
    assert steady.count(batch) > 0.9 * len(steady) > 0, "a row that has ended leaves with the next message"


def test_the_steady_rate_is_that_of_its_tokens_and_their_time():
    assert steady_tok_s([1.0, 1.0, *[10.0] * 6, 1.0, 1.0]) == pytest.approx(10.0)
    assert steady_tok_s([9.0, 9.0, 20.0, *[10.0] * 5, 9.0, 9.0]) == pytest.approx(6 / 0.55)


def test_several_batches_of_one_engine():
    cases = [case(batch=batch, output=24) for batch in (1, 3)]
    source, trials = DraftSource("small", "all", "kernel"), [Trial(1.0, 3), Trial(0.0, None)]
    with open_bench(case(batch=3, output=24), max_model_len=300) as (engine, _):
        found = list(measure_loads(engine, cases, source, trials, 3))
        with pytest.raises(ValueError, match="3 rows at once cannot take 4"):
            engine.limit_batch(4)
    assert [(r.case["batch"], r.case["requests"], r.case["rate"], r.case["num_drafts"]) for r in found] == [
        (1, 3, 1.0, 3), (1, 3, 0.0, "adaptive"), (3, 9, 1.0, 3), (3, 9, 0.0, "adaptive"),
    ]  # fmt: skip
    assert found[0].metrics["tokens_per_step"] > 3 and found[0].peer == found[1].peer != found[2].peer
    with open_bench(case(batch=3, output=24)) as (engine, _):
        object.__setattr__(engine.blueprint, "graph_draft", engine.blueprint)
        found = list(measure(engine, cases, source, trials, repeats=1))
    assert [(r.case["batch"], r.case["num_drafts"]) for r in found] == [(1, 3), (1, "adaptive"), (3, 3), (3, "adaptive")]
    assert "verify_ms" in found[0].metrics and "verify_ms" not in found[1].metrics and "requests" not in found[0].case


def test_a_record_and_its_words(tmp_path):
    stats = DraftStats(num_proposals=10, num_proposed=40, num_accepted=20, num_decodes=10, num_decoded=30)
    reads = Reads(4_800_000_000, 0)
    timing, draft_bytes = Timing(2.0, stats), 480_000_000
    source = DraftSource("small", "all", "kernel")
    record = make_record(case(), source, Trial(0.5, 4), timing, 5.0, 5.5, reads, draft_bytes, "graph", "ipc")
    metrics = record.metrics
    assert metrics["speedup"] == 2.5 and metrics["step_ms"] == 6.0 and metrics["draft_ms"] == 0.5
    assert metrics["verify_ratio"] == 1.1 and metrics["tokens_per_step"] == 3.0 and metrics["mean_accepted"] == 2.0
    assert record.ceiling["tpot_ms"] == pytest.approx(1.4 / (1 + 0.5 + 0.25 + 0.125 + 0.0625))
    assert record.case["acceptance"] == "set" and record.case["num_drafts"] == 4
    words = "\n".join(describe(record))
    assert "2.50 x" in words and "drafts 0.500, verification 5.500, which is 1.100 plain steps" in words
    record.append_to(tmp_path / "speculate.jsonl", "1 x Test GPU", "engine.bench.speculate")
    assert json.loads((tmp_path / "speculate.jsonl").read_text())["bench"] == "speculate"
    handed = [
        make_record(case(tp=2), DraftSource("small", "first", wait), Trial(0.5, 4), timing, 5.0, 5.5, reads, 1, "graph", "ipc")
        for wait in ("kernel", "stream")
    ]
    assert [one.case["wait"] for one in handed] == ["kernel", "stream"] and "wait" not in record.case
    assert "placement all)" in words and "placement first, waits by stream)" in describe(handed[1])[0]
    source = DraftSource("small", "split", "kernel")
    adaptive = make_record(case(), source, Trial(0.0, None), timing, 5.0, None, reads, 1, "graph", "ipc")
    assert adaptive.ceiling == {} and "verify_ms" not in adaptive.metrics and len(describe(adaptive)) == 3


def test_a_record_of_a_load_and_its_words():
    stats = DraftStats(num_proposals=10, num_proposed=40, num_accepted=20, num_decodes=10, num_decoded=30)
    requests, plain = draw_load(case(), 4, 300), LoadTiming(400.0, None)
    source = DraftSource("small", "all", "kernel")
    record = make_load_record(case(), requests, source, Trial(0.5, 4), LoadTiming(300.0, stats), plain, "graph", "none")
    assert record.metrics == {"output_tok_s": 300.0, "speedup": 0.75, "acceptance": 0.5, "tokens_per_step": 3.0}
    assert record.peer == {"name": "without drafts", "output_tok_s": 400.0} and record.bench == "speculate"
    assert record.case["requests"] == 8 and record.case["rate"] == 0.5 and record.case["batch"] == 2
    words = "\n".join(describe_load(record))
    assert "8 requests" in words and "300 tok/s, 400 without: 0.75 x" in words and "50.0 %, 3.00 tokens" in words


def test_the_engine_takes_as_many_rows_with_drafts_as_are_measured(monkeypatch):
    asked = {}
    monkeypatch.setattr(speculate, "open_engine", lambda *args, **settings: asked.update(case=args[0], **settings) or 1 / 0)
    arguments = ["--model", "tiny", "--batch", "4", "--batch", "48", "--batch", "8", "--refills", "3", "--prompt", "10"]
    assert isinstance(CliRunner().invoke(main, [*arguments, "--output", "20"]).exception, ZeroDivisionError)
    assert asked.pop("case").batch == 48
    assert EngineSettings("tiny", **asked).max_speculative_rows == 48 and asked["max_model_len"] == 40


def test_refusals(monkeypatch):
    monkeypatch.setattr(speculate, "open_engine", lambda *args, **more: pytest.fail("it was to be refused before"))
    for arguments, words in (
        (["--model", "tiny", "--device", "cpu"], "graphs on GPUs"),
        (["--model", "tiny", "--eager"], "graphs on GPUs"),
        (["--model", "tiny", "--trial", "half"], "RATE:DRAFTS"),
        (["--batch", "257"], "257"),
        (["--refills", "2"], "x>=3"),
        (["--refills", "3", "--repeats", "2"], "--repeats is of a batch that is not filled up again"),
        (["--draft-placement", "half"], "'all', 'first', 'split'"),
        (["--draft-wait", "host"], "'kernel', 'stream'"),
        (["--draft-placement", "first", "--draft-wait", "stream"], "this process is alone"),
    ):
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 2 and words in result.output


def make(*arguments: str) -> subprocess.CompletedProcess:
    """A make of its own, also where make has started the tests."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=own, capture_output=True, text=True)


def test_the_target_takes_its_variables_and_others_refuse_them():
    found = make("bench-speculate", "TP=8", "TRIALS=0.8:5 0:adaptive", "DRAFT=qwen2.5-1.5b", "OUTPUT=129", "REPEATS=1")
    words = " ".join(found.stdout.replace("\\", "").split())
    assert found.returncode == 0 and "--nproc-per-node 8 -m engine.bench.speculate --model qwen2.5-72b" in words
    assert words.endswith("--output 129 --repeats 1 --draft qwen2.5-1.5b --trial 0.8:5 --trial 0:adaptive")
    assert " --batch 1 --prompt 512 " in words
    found = make("bench-speculate", "BATCH=1 8 64", "REFILLS=4")
    words = " ".join(found.stdout.replace("\\", "").split())
    assert " --batch 1 --batch 8 --batch 64 --prompt 512 " in words and words.endswith("--draft qwen2.5-0.5b --refills 4")
    for target, variable in (
        ("bench-decode", "TRIALS=0.8:5"), ("bench-drift", "DRAFT=tiny"), ("bench-speculate", "EAGER=1"),
        ("bench-decode", "REFILLS=4"), ("bench", "REFILLS=4"), ("bench-speculate", "REQUESTS=9"),
    ):  # fmt: skip
        refused = make(target, variable)
        assert refused.returncode == 2 and f"{variable.split('=')[0]}= has no part in {target}" in refused.stderr
