"""Under torchrun: one voice, torchrun's summary knows the cause, a bug on one rank ends all, idle ranks stay alive and idle."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
from command_harness import ROOT, Run, read_rows, run, shared_memory, strict_json, tiny_folder, write_rows

from launch.threads import count_cores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]
FAULTS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    return write_rows(path, ({"prompt": f"count to {number}"} for number in range(4000)))


def run_faulty(tmp_path: Path, model: Path, rows: Path, fault: str, **environ: str):
    """The run must end within ten seconds of the fault; with start-up on a busy machine that is a minute at most."""
    command = ["--model", model, "--input", rows, "--output", tmp_path / "out.jsonl", "--max-tokens", 30, "--max-batch", 4]
    before = shared_memory()
    environ = {**FAULTS, **environ, "DOORBELL_TEST_FAULT": fault}
    ended = run(tmp_path, command, ranks=2, environ=environ, module="command_faults")
    assert ended.code != 0
    assert shared_memory() <= before
    return ended


def test_missing_model_is_said_once(tmp_path, rows):
    ended = run(tmp_path, ["--model", tmp_path / "nowhere", "--input", rows], ranks=2, timeout_s=40)
    assert ended.code == 1  # torchrun's
    assert [line for line in ended.said if "nowhere" in line] == [ended.sentence]
    assert ended.last_line == "doorbell: exit code 3 (model or configuration)"
    assert "Traceback (most recent call last):\n" not in ended.stderr.split("torch/distributed", 1)[0]
    summary = ended.stderr.rsplit("Root Cause", 1)[1]
    assert "exit code 3 (model or configuration): model folder" in summary
    assert ended.stdout == b""


def test_output_that_only_rank_zero_refuses(tmp_path, model, rows):
    """Rank 1 waits for rank 0 inside gloo when that happens; it must not hold the run up for torchrun's half minute."""
    output = tmp_path / "out.jsonl"
    output.write_text("{}\n")
    started = time.monotonic()
    ended = run(tmp_path, ["--model", model, "--input", rows, "--output", output], ranks=2, timeout_s=25)
    assert time.monotonic() - started < 25
    assert "--overwrite" in ended.sentence and ended.last_line == "doorbell: exit code 2 (usage)"
    assert len([line for line in ended.said if "exit code" in line]) == 1
    assert output.read_text() == "{}\n"


def test_bug_on_one_rank(tmp_path, model, rows):
    ended = run_faulty(tmp_path, model, rows, "step:1", OMP_NUM_THREADS="2")
    assert ended.stderr.count("[rank 1] ZeroDivisionError: a bug of this rank\n") == 1, ended.stderr
    assert "[rank 0]" not in ended.stderr
    assert [line for line in ended.said if "a bug of this rank" in line] == [ended.sentence], ended.stderr
    assert "rank 1" in ended.sentence
    assert ended.last_line == "doorbell: exit code 1 (internal error)"
    assert "threads         2 a rank (set by OMP_NUM_THREADS)" in ended.stderr
    assert all(row["status"] == "ok" for row in read_rows(tmp_path / "out.jsonl"))


def test_rank_killed_while_it_loads(tmp_path, model, rows):
    ended = run_faulty(tmp_path, model, rows, "load:1")
    assert [line for line in ended.said if "rank 1" in line] == [ended.sentence], ended.stderr
    assert "was killed or crashed" in ended.sentence
    assert ended.last_line == "doorbell: exit code 5 (a peer was lost)"


def test_rank_killed_before_the_ranks_met(tmp_path, model, rows):
    started = time.monotonic()
    ended = run_faulty(tmp_path, model, rows, "meet:1")
    assert time.monotonic() - started < 25
    # Rank 0 has either been told by torchrun, in its way, or noticed that a connection to be made was not.
    possible = {
        "doorbell: exit code 143 (terminated)": "torchrun names it below",
        "doorbell: exit code 5 (a peer was lost)": "connect",
    }
    assert possible[ended.last_line] in ended.sentence, ended.stderr
    assert "rank      : 1" in ended.stderr.rsplit("Root Cause", 1)[1]


def test_error_that_only_one_rank_meets(tmp_path, model, rows):
    ended = run_faulty(tmp_path, model, rows, "refuse:1")
    assert ended.sentence == "doorbell: rank 1 ended with exit code 3: the shard is unreadable here", ended.stderr
    assert ended.last_line == "doorbell: exit code 3 (model or configuration)"


def test_rows_that_trickle_in(tmp_path, model):
    """Ranks that wait for input stay alive through it, use next to no CPU, and answer every row soon."""
    output = tmp_path / "out.jsonl"
    command = ["--model", model, "--input", "-", "--output", output, "--max-tokens", 4, "--raw"]
    with Run(tmp_path, command, ranks=2, stdin=subprocess.PIPE, environ={"OMP_NUM_THREADS": None}) as running:
        running.until(lambda: "all-reduce" in running.stderr, 90)
        for number in range(3):
            running.process.stdin.write(b'{"prompt": "count %d"}\n' % number)
            running.process.stdin.flush()
            running.until_rows(output, number + 1, 5)
        # Longer than the 5 s after which a silent rank counts as stuck.
        ranks = [running.rank(0), running.rank(1)]
        before = [sum(process.cpu_times()[:2]) for process in ranks]
        time.sleep(6)
        used = [sum(process.cpu_times()[:2]) - start for process, start in zip(ranks, before)]
        running.process.stdin.write(b'{"prompt": "the last"}')
        running.process.stdin.close()
        ended = running.wait(30)
        assert running.survivors() == []
    assert ended.code == 0, ended.stderr
    assert [row["index"] for row in read_rows(output)] == [0, 1, 2, 3]
    assert max(used) < 6 * 0.3, f"CPU seconds of the ranks in 6 s of waiting: {used}"
    cores = count_cores()
    assert f"threads         {max(1, cores // 2)} a rank ({cores} core" in ended.stderr


def test_one_prompt_prints_text_once(tmp_path, model):
    command = ["--model", model, "--prompt", "hello", "--max-tokens", 5, "--ignore-eos", "--threads", 1, "--quiet"]
    alone, together = run(tmp_path, command), run(tmp_path, command, ranks=2)
    assert together.code == 0 and together.said == []
    assert together.stdout == alone.stdout and together.stdout.count(b"\n") >= 1


def test_dry_run_prints_each_row_once(tmp_path, model, rows):
    """Only rank 0 has rows to show; the other must not wait for it, nor fail."""
    ended = run(tmp_path, ["--model", model, "--input", rows, "--limit", 3, "--dry-run"], ranks=2)
    assert ended.code == 0, ended.stderr
    assert [strict_json(line)["index"] for line in ended.stdout.splitlines()] == [0, 1, 2]


def test_full_disk_ends_all_ranks(tmp_path, model, rows):
    started = time.monotonic()
    ended = run(tmp_path, ["--model", model, "--input", rows, "--output", "/dev/full", "--max-tokens", 4], ranks=2)
    assert time.monotonic() - started < 40 and ended.code == 1
    assert [line for line in ended.said if "No space left" in line] == [ended.sentence], ended.stderr
    assert ended.last_line == "doorbell: exit code 6 (output not written)"
