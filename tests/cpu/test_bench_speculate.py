"""The bench of speculation without its GPU: what it times, what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from engine.bench import speculate
from engine.bench.load import Case, open_engine
from engine.bench.roof import Reads
from engine.bench.speculate import Bench, Timing, Trial, describe, main, make_record
from engine.drafts.speculation import DraftStats
from engine.graph.drafters import NgramDrafts
from engine.shapes import SHAPES
from tests.cpu.engine_harness import twin_bursts

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(**changes) -> Case:
    fixed = {"model": "tiny", "tp": 1, "ranks_per_gpu": 1, "dtype": "fp32", "batch": 2, "prompt": 5, "output": 60}
    return Case(**{**fixed, **changes})


def test_a_trial_is_a_rate_and_a_number():
    assert Trial.parse("0.8:5") == Trial(0.8, 5) and Trial.parse("0:adaptive") == Trial(0.0, None)
    for text in ("0.8", "5:0.8:1", "a:3", "1.5:3", "0.5:0", "0.5:17", "0.5:some"):
        with pytest.raises(click.BadParameter, match="RATE:DRAFTS|a rate is 0 to 1"):
            Trial.parse(text)


def test_what_is_accepted_is_what_was_set():
    """On a CPU, with steps that are not captured."""
    wanted = case()
    with open_engine(wanted, "tiny", "cpu", is_ngram=True) as engine:
        engine.replica.burst_backend = twin_bursts(engine.replica, lambda _: NgramDrafts())
        bench = Bench(engine, wanted, repeats=1)
        assert bench.time_plain() > 0 and engine.draft_stats is None
        right, wrong = bench.time_trial(Trial(1.0, 4)), bench.time_trial(Trial(0.0, 4))
        assert right.tpot_ms > 0 and right.stats.tokens_per_step > 4.5 and wrong.stats.num_accepted == 0
        assert bench.time_verification(3) > 0 and engine.draft_stats.num_accepted == 0
        assert 0 < bench.time_trial(Trial(0.0, None)).stats.num_proposals < 2 * 59


def test_a_record_and_its_words(tmp_path):
    stats = DraftStats(num_proposals=10, num_proposed=40, num_accepted=20, num_decodes=10, num_decoded=30)
    reads = Reads(4_800_000_000, 0)
    timing, draft_bytes = Timing(2.0, stats), 480_000_000
    record = make_record(case(), "small", "all", "kernel", Trial(0.5, 4), timing, 5.0, 5.5, reads, draft_bytes, "graph", "ipc")
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
        make_record(case(tp=2), "small", "first", wait, Trial(0.5, 4), timing, 5.0, 5.5, reads, 1, "graph", "ipc")
        for wait in ("kernel", "stream")
    ]
    assert [one.case["wait"] for one in handed] == ["kernel", "stream"] and "wait" not in record.case
    assert "placement all)" in words and "placement first, waits by stream)" in describe(handed[1])[0]
    adaptive = make_record(case(), "small", "split", "kernel", Trial(0.0, None), timing, 5.0, None, reads, 1, "graph", "ipc")
    assert adaptive.ceiling == {} and "verify_ms" not in adaptive.metrics and len(describe(adaptive)) == 3


def test_refusals(monkeypatch):
    monkeypatch.setattr(speculate, "open_engine", lambda *args, **more: pytest.fail("it was to be refused before"))
    for arguments, words in (
        (["--model", "tiny", "--device", "cpu"], "graphs on GPUs"),
        (["--model", "tiny", "--eager"], "graphs on GPUs"),
        (["--model", "tiny", "--trial", "half"], "RATE:DRAFTS"),
        (["--batch", "17"], "17"),
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
    for target, variable in (("bench-decode", "TRIALS=0.8:5"), ("bench-drift", "DRAFT=tiny"), ("bench-speculate", "EAGER=1")):
        refused = make(target, variable)
        assert refused.returncode == 2 and f"{variable.split('=')[0]}= has no part in {target}" in refused.stderr
