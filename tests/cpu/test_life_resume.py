"""`kill -9` at random moments and `--resume`: in the end the file is the one of an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from command_forks import CommandForks
from command_harness import Run, read_rows, run, shared_memory, side_record, tiny_folder, write_rows

NUM_KILLS = 30
NUM_ROWS = 300
NUM_BAD = 10  # every thirtieth row cannot be answered; its error is a result like any other

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    lines = [
        "{not json" if number % 30 == 7 else {"id": f"row-{number}", "prompt": f"count to {number}", "max_tokens": 4 + number % 9}
        for number in range(NUM_ROWS)
    ]
    return write_rows(tmp_path_factory.mktemp("rows") / "in.jsonl", lines)


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with CommandForks(tmp_path_factory.mktemp("forks")) as server:
        yield server


def arguments(model: Path, rows: Path, output: Path) -> list[object]:
    return [
        *("--model", model, "--input", rows, "--output", output, "--max-batch", 4, "--kv-memory", "16M"),
        *("--temperature", 1, "--seed", 5, "--ignore-eos", "--resume"),
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, forks, model, rows) -> list[dict]:
    output = tmp_path_factory.mktemp("uninterrupted") / "out.jsonl"
    ended = forks.start(arguments(model, rows, output)).wait()
    assert ended.code == 4, ended.stderr
    results = in_order(output)
    assert [row["index"] for row in results] == list(range(NUM_ROWS))
    assert sum(row["status"] == "error" for row in results) == NUM_BAD
    assert len({row.get("text") for row in results}) > NUM_ROWS / 2  # rows that could stand for one another prove nothing
    return results


def in_order(output: Path) -> list[dict]:
    return sorted(read_rows(output), key=lambda row: row["index"])


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_thirty_kills(tmp_path, forks, model, rows, uninterrupted):
    random_ = random.Random(20)
    whole = sum(len(str(row)) for row in uninterrupted)
    kills, num_files, growths = 0, 0, []
    while kills < NUM_KILLS:
        num_files += 1
        output = tmp_path / f"out{num_files}.jsonl"
        is_done = False
        while not is_done:
            is_killed = kills < NUM_KILLS and live_a_while(forks, arguments(model, rows, output), output, random_, whole, growths)
            kills += is_killed
            if not is_killed:
                ended = forks.start(arguments(model, rows, output)).wait()
                assert ended.code == 4, ended.stderr
                is_done = True
        assert in_order(output) == uninterrupted
        record = side_record(output)
        assert record["counts"] == {
            "rows": NUM_ROWS, "ok": NUM_ROWS - NUM_BAD, "failed": NUM_BAD, "resumed": record["counts"]["resumed"]
        }  # fmt: skip
    assert kills == NUM_KILLS
    assert sum(growth > 0 for growth in growths) >= NUM_KILLS / 2, "most kills should strike while rows are written"


def live_a_while(forks, command, output: Path, random_, whole: int, growths: list[int]) -> bool:
    """Start, kill at a random moment. False when the run ended by itself before."""
    before = size(output)
    running = forks.start(command)
    target = before + random_.randint(-1, max(1, whole // 12))
    while size(output) < target and not running.is_over():
        time.sleep(0.001)
    time.sleep(random_.random() * (0.3 if target < before else 0.01))
    is_killed = not running.is_over()
    if is_killed:
        running.kill()
    ended = running.wait()
    assert ended.code == (-signal.SIGKILL if is_killed else 4) or ended.code == 4, ended.stderr
    growths.append(size(output) - before)
    return ended.code == -signal.SIGKILL


@pytest.mark.slow
def test_same_command_again_and_again_on_two_ranks(tmp_path, model, rows, uninterrupted):
    """Five starts of one command: rank 0, rank 1, and every process at once are killed; then it finishes, then has no work."""
    output, before = tmp_path / "out.jsonl", shared_memory()
    command = arguments(model, rows, output)
    for victims in ([0], [1], [0, 1, None]):
        done = read_rows_so_far(output)
        with Run(tmp_path, command, ranks=2) as running:
            running.until(lambda done=done: read_rows_so_far(output) >= done + 5, 90)
            processes = [running.process if victim is None else running.rank(victim) for victim in victims]
            for process in processes:
                process.kill()
            assert running.wait(10).code != 0
            deadline = time.monotonic() + 5
            while running.survivors() and time.monotonic() < deadline:
                time.sleep(0.05)
            assert running.survivors() == []
    ended = run(tmp_path, command, ranks=2)
    assert ended.last_line == "doorbell: exit code 4 (some rows failed)", ended.stderr
    assert in_order(output) == uninterrupted  # of one rank
    written = output.read_bytes()
    ended = run(tmp_path, command, ranks=2)
    assert ended.last_line == "doorbell: exit code 4 (some rows failed)", ended.stderr
    assert output.read_bytes() == written
    assert shared_memory() <= before


def read_rows_so_far(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


@pytest.mark.slow
def test_two_runs_side_by_side(tmp_path, model, rows, uninterrupted):
    outputs = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    runs = [Run(tmp_path, arguments(model, rows, output), ranks=2) for output in outputs]
    with runs[0], runs[1]:
        ended = [running.wait(120) for running in runs]
        assert [running.survivors() for running in runs] == [[], []]
    for each, output in zip(ended, outputs):
        assert each.last_line == "doorbell: exit code 4 (some rows failed)", each.stderr
        assert in_order(output) == uninterrupted


def test_a_second_run_on_the_same_output_is_refused(tmp_path, forks, model, rows):
    output = tmp_path / "out.jsonl"
    with Run(tmp_path, [*arguments(model, rows, output), "--max-tokens", 200]) as running:
        running.until_rows(output, 1)
        os.kill(running.process.pid, signal.SIGSTOP)  # so that it cannot finish meanwhile
        ended = forks.start(arguments(model, rows, output)).wait()
    assert ended.code == 2
    assert ended.sentence.startswith("doorbell: ") and str(output) in ended.sentence
