"""`--profile` of the command: the same rows with and without, the table, the trace file, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_forks import CommandForks
from command_harness import read_rows, run, tiny_folder, write_rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with CommandForks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture
def arguments(model, tmp_path) -> list[object]:
    rows = write_rows(tmp_path / "in.jsonl", ({"prompt": f"count to {number}"} for number in range(5)))
    return ["--model", model, "--input", rows, "--max-tokens", 8, "--kv-memory", "16M", "--ignore-eos", "--seed", 1,
            "--temperature", 1, "--overwrite"]  # fmt: skip


def by_index(path: Path) -> list[dict]:
    return sorted(read_rows(path), key=lambda row: row["index"])


def test_rows_are_the_same_and_a_table_and_a_trace_are_made(forks, arguments, tmp_path):
    plain, profiled, trace = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "trace.json"
    assert forks.start([*arguments, "--output", plain]).wait().code == 0
    ended = forks.start([*arguments, "--output", profiled, "--profile", trace]).wait()
    assert ended.code == 0, ended.stderr
    assert by_index(plain) == by_index(profiled)
    for words in ("doorbell: profile of rank 0", "decode, one step at a time: mean of", "attention", "stages sum"):
        assert words in ended.stderr
    document = json.loads(trace.read_text())
    assert {"prefill", "decode"} <= set(document["otherData"]) and len(document["traceEvents"]) > 50
    quiet = forks.start([*arguments, "--output", profiled, "--profile", trace, "--quiet"]).wait()
    assert (quiet.code, quiet.stderr) == (0, "")


def test_ranks_give_the_same_rows_and_one_trace(arguments, forks, tmp_path):
    plain, profiled, trace = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "trace.json"
    assert forks.start([*arguments, "--output", plain]).wait().code == 0
    ended = run(tmp_path, [*arguments, "--output", profiled, "--profile", trace], ranks=2)
    assert ended.code == 0, ended.stderr
    assert by_index(plain) == by_index(profiled)
    assert ended.stderr.count("profile of rank") == 1
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0}


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "is a folder"),
        ("none/trace.json", "no such folder"),
        ("in.jsonl", "--input name the same"),
        ("out.jsonl", "--output name the same"),
    ],
)
def test_places_that_are_refused(forks, arguments, tmp_path, name, words):
    ended = forks.start([*arguments, "--output", tmp_path / "out.jsonl", "--profile", tmp_path / name]).wait()
    assert ended.code == 2 and words in ended.sentence and not (tmp_path / "out.jsonl").exists()


def test_a_profile_that_cannot_be_written_costs_no_row(forks, arguments, tmp_path):
    output = tmp_path / "out.jsonl"
    ended = forks.start([*arguments, "--output", output, "--profile", "/dev/full"]).wait()
    assert ended.code == 6 and "the profile could not be written to /dev/full: No space left" in ended.sentence
    assert len(read_rows(output)) == 5
