"""A rank that dies or stops ends the run on all ranks: soon, in one sentence, with every finished row on disk."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from command_harness import Run, read_rows, shared_memory, side_record, tiny_folder, write_rows

LIMIT_S = 10.0  # from the signal to the end of the last process
NUM_ROWS = 4000  # more than any of these runs can answer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    return write_rows(path, ({"prompt": f"count to {number}"} for number in range(NUM_ROWS)))


def arguments(model: Path, rows: Path, output: Path, comm: str) -> list[object]:
    return [
        *("--model", model, "--input", rows, "--output", output, "--comm", comm),
        *("--max-tokens", 30, "--ignore-eos", "--max-batch", 4, "--kv-memory", "16M"),
    ]


@pytest.mark.parametrize(
    "ranks, victim, number, comm",
    [
        (2, 1, signal.SIGKILL, "one_shot"),
        (2, 1, signal.SIGKILL, "gloo"),
        (2, 0, signal.SIGKILL, "one_shot"),
        (2, 0, signal.SIGKILL, "gloo"),
        (2, 1, signal.SIGSTOP, "one_shot"),
        (2, 1, signal.SIGSTOP, "gloo"),
        (3, 1, signal.SIGKILL, "one_shot"),
    ],
)
def test_lost_rank_ends_the_run_everywhere(tmp_path, model, rows, ranks, victim, number, comm):
    output = tmp_path / "out.jsonl"
    before = shared_memory()
    with Run(tmp_path, arguments(model, rows, output, comm), ranks) as running:
        running.until_rows(output, 3, 90)
        sent = time.monotonic()
        running.rank(victim).send_signal(number)
        ended = running.wait(30)
        seconds = time.monotonic() - sent
        assert running.survivors() == []
    assert seconds < LIMIT_S, ended.stderr
    assert ended.code != 0
    assert ended.last_line == "doorbell: exit code 5 (a peer was lost)", ended.stderr
    naming = [line for line in ended.said if f"rank {victim}" in line]
    assert len(naming) == 1 and naming[0] == ended.sentence, ended.stderr
    assert "Traceback" not in ended.stderr.split("torch/distributed", 1)[0], ended.stderr
    assert shared_memory() <= before
    finished = read_rows(output)
    assert len(finished) >= 3 and len({row["index"] for row in finished}) == len(finished)
    assert all(row["status"] == "ok" and row["completion_tokens"] == 30 for row in finished)
    record = side_record(output)
    if victim != 0:
        assert record["exit"]["code"] == 5 and f"rank {victim}" in record["exit"]["reason"]
        assert record["counts"]["ok"] == len(finished)
    else:
        assert record["exit"] is None  # rank 0 alone writes it, and had no time to
