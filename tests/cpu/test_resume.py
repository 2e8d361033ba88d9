"""Resuming a run: cases D 40, 52, 53, 55, 56 and 59."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.openai_format import openai_error_row
from engine.output import OutputWriter
from engine.result_row import encode_row
from engine.resume import IndexSet, ResumeState, open_output
from engine.rows import RowError
from engine.side_file import RunIdentity, SideFile, differences, fingerprint, input_identity
from launch.errors import OutputError, UsageError


def line_of(index: int, status: str = "ok", text: str = "a\u2028b") -> bytes:
    """As the writer writes it, but for the raw U+2028, which an older or foreign writer may have left."""
    return json.dumps({"index": index, "status": status, "text": text}, ensure_ascii=False).encode() + b"\n"


def indices_of(path: Path) -> Counter:
    return Counter(json.loads(line)["index"] for line in path.read_bytes().split(b"\n") if line)


def finish(path: Path, state: ResumeState, num_rows: int) -> None:
    writer = OutputWriter(path, mode="resume")
    for index in range(num_rows):
        if index not in state.done:
            writer.write(line_of(index))
    writer.close_at_boundary()


def identity(**sampling: object) -> RunIdentity:
    return RunIdentity(
        model={"config": "c0ffee", "dtype": "float32"},
        input={"bytes": 5, "sha256": "ab"},
        sampling={"temperature": 0.0, "stop": ("x",), **sampling},
        settings={"chat_template": "auto"},
    )


def open_run(path: Path, mode: str, who: RunIdentity | None = None, **options: object):
    return open_output(path, mode=mode, identity=who or identity(), engine_version="1", command={"tp": 2}, run_seed=7, **options)


def test_every_cut_in_the_last_two_lines_gives_one_row_per_index(tmp_path):
    path = tmp_path / "out.jsonl"
    order = [2, 0, 3, 1]  # rows finish in any order
    lines = [line_of(index, "error" if index == 3 else "ok") for index in order]
    whole = b"".join(lines)
    first = len(lines[0]) + len(lines[1])
    for cut in range(first, len(whole) + 1):
        path.write_bytes(whole[:cut])
        state = ResumeState.load(path)
        kept = [
            index for index, end in zip(order, (len(lines[0]), first, first + len(lines[2]), len(whole))) if end <= cut
        ]
        assert {index for index in range(6) if index in state.done} == set(kept), cut
        assert state.num_ok + state.num_failed == len(state.done) == len(kept)
        assert path.stat().st_size == cut - state.torn_bytes
        finish(path, state, 6)
        assert indices_of(path) == Counter(range(6)), cut


@pytest.mark.parametrize(
    "tail", [b"\x00" * 20 + b"\n", b'{"index": 9, "sta\n', b"\xff\n", b"\n", b"{}\n", b"[" * 99999 + b"\n"]
)
def test_a_last_line_that_is_no_result_is_cut_off(tmp_path, tail):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of(0) + tail)
    state = ResumeState.load(path)
    assert state.torn_bytes == len(tail) and path.read_bytes() == line_of(0)


@pytest.mark.parametrize(
    "middle", [b"notes\n", b'{"index": -1}\n', b'{"index": true}\n', b'{"index": 9999999999}\n', b"\n"]
)
def test_a_bad_line_before_the_last_is_refused_and_nothing_is_changed(tmp_path, middle):
    path = tmp_path / "out.jsonl"
    data = line_of(0) + middle + line_of(1) + b'{"torn'
    path.write_bytes(data)
    with pytest.raises(UsageError, match="line 2 of"):
        ResumeState.load(path)
    assert path.read_bytes() == data


def test_missing_and_empty_outputs_are_fresh_starts(tmp_path):
    path = tmp_path / "out.jsonl"
    assert len(ResumeState.load(path).done) == 0 and not path.exists()
    writer, side, state = open_run(path, "resume")
    assert len(state.done) == 0 and side.read()["resumed"] == []
    writer.close_at_boundary()
    _, side, _ = open_run(path, "resume", identity(temperature=1.0))  # no row was written under the first settings
    assert side.read()["identity"]["sampling"]["temperature"] == 1.0


def test_failed_rows_are_done_unless_they_are_to_be_retried(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of(0) + line_of(1, "error") + line_of(2) + line_of(3, "error"))
    before = path.read_bytes()
    for _ in range(2):
        state = ResumeState.load(path)
        assert (len(state.done), state.num_ok, state.num_failed, state.num_dropped) == (4, 2, 2, 0)
        assert path.read_bytes() == before
    path.chmod(0o640)
    state = ResumeState.load(path, retry_failed=True)
    assert (len(state.done), state.num_ok, state.num_failed, state.num_dropped) == (2, 2, 0, 2)
    assert path.read_bytes() == line_of(0) + line_of(2) and path.stat().st_mode & 0o777 == 0o640
    assert [item.name for item in tmp_path.iterdir()] == ["out.jsonl"]
    finish(path, state, 4)
    assert indices_of(path) == Counter(range(4))


def test_openai_rows_are_read_back(tmp_path):
    path = tmp_path / "out.jsonl"
    good = {"id": "x", "custom_id": "a", "index": 0, "response": {"status_code": 200, "body": {}}, "error": None}
    path.write_bytes(encode_row(good) + encode_row(openai_error_row(RowError(1, 2, "c", "m"), "c", "m")))
    state = ResumeState.load(path)
    assert (state.num_ok, state.num_failed) == (1, 1)
    state = ResumeState.load(path, retry_failed=True)
    assert 0 in state.done and 1 not in state.done


@settings(max_examples=200, deadline=None, database=None)
@given(lines=st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=12), retry=st.booleans())
def test_one_row_per_index_is_kept_an_answered_one_if_there_is_one(tmp_path_factory, lines, retry):
    path = tmp_path_factory.mktemp("resume") / "out.jsonl"
    data = [line_of(index, "ok" if is_ok else "error", f"{place}") for place, (index, is_ok) in enumerate(lines)]
    path.write_bytes(b"".join(data))
    state = ResumeState.load(path, retry_failed=retry)
    wanted = {}
    for place, (index, is_ok) in enumerate(lines):
        if is_ok and not wanted.get(index, (0, False))[1]:
            wanted[index] = (place, True)
        elif not is_ok and not retry:
            wanted.setdefault(index, (place, False))
    kept = sorted(place for place, _ in wanted.values())
    assert path.read_bytes() == b"".join(data[place] for place in kept)
    assert {index for index in range(13) if index in state.done} == set(wanted) and len(state.done) == len(wanted)
    assert state.num_ok == sum(is_ok for _, is_ok in wanted.values())
    assert state.num_dropped == len(lines) - len(kept) and state.num_failed == len(kept) - state.num_ok


def test_a_crash_while_rewriting_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of(0) + line_of(1, "error"))

    def full(temporary: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.resume.replace_durably", full)
    with pytest.raises(OutputError, match="No space left"):
        ResumeState.load(path, retry_failed=True)
    assert path.read_bytes() == line_of(0) + line_of(1, "error")
    assert [item.name for item in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_link_to_the_output_stays_a_link(tmp_path):
    path, link = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    path.write_bytes(line_of(0) + line_of(0))
    link.symlink_to(path)
    assert ResumeState.load(link).num_dropped == 1
    assert link.is_symlink() and path.read_bytes() == line_of(0)


def test_a_run_that_still_writes_is_not_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = OutputWriter(path)
    writer.write(line_of(0))
    with pytest.raises(UsageError, match="another run"):
        ResumeState.load(path)
    writer.close_at_boundary()


def test_resume_goes_on_and_the_side_file_tells_the_whole_story(tmp_path):
    path = tmp_path / "out.jsonl"
    writer, side, _ = open_run(path, "create")
    started = side.read()
    assert side.path == tmp_path / "out.jsonl.meta.json" and started["exit"] is None
    writer.write(line_of(0))
    writer.close_at_boundary()
    side.finish(counts={"ok": 1, "failed": 0}, exit_code=130, reason="interrupted")
    assert side.read()["exit"] == {"code": 130, "reason": "interrupted"}
    writer, side, state = open_run(path, "resume")
    assert 0 in state.done and side.read()["exit"] is None and side.read()["started"] == started["started"]
    assert len(side.read()["resumed"]) == 1 and side.read()["fingerprint"] == started["fingerprint"]
    writer.close_at_boundary()
    side.finish(counts={"ok": 2, "failed": 0}, exit_code=0, reason="all rows answered")
    assert side.read()["counts"] == {"ok": 2, "failed": 0} and side.read()["command"] == {"tp": 2}
    assert sorted(item.name for item in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"config": "other", "dtype": "float32"}}, 'model.config (then "c0ffee", now "other")'),
        ({"model": {"config": "c0ffee", "dtype": "bfloat16"}}, "model.dtype"),
        ({"input": {"bytes": 9, "sha256": "cd"}}, "input.sha256"),
        ({"sampling": {"temperature": 1.0, "stop": ["x"]}}, "sampling.temperature (then 0.0, now 1.0)"),
        ({"sampling": {"temperature": 0.0}}, 'sampling.stop (then ["x"], now not given)'),
        ({"settings": {"chat_template": "auto", "system": None}}, "settings.system (then not given, now null)"),
    ],
)
def test_another_run_is_not_continued_and_what_differs_is_named(tmp_path, change, words):
    path = tmp_path / "out.jsonl"
    writer, side, _ = open_run(path, "create")
    writer.write(line_of(0))
    writer.close_at_boundary()
    before = path.read_bytes(), side.path.read_bytes()
    with pytest.raises(UsageError) as caught:
        open_run(path, "resume", replace(identity(), **change))
    assert words in str(caught.value) and "--overwrite" in str(caught.value)
    assert (path.read_bytes(), side.path.read_bytes()) == before


def test_resume_without_a_usable_side_file_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(line_of(0))
    with pytest.raises(UsageError, match="side file out.jsonl.meta.json is missing"):
        open_run(path, "resume")
    for text in ("{", "[]", "{}", '{"format": 1, "identity": 5}', "[" * 99999):
        SideFile(path).path.write_text(text)
        with pytest.raises(UsageError, match="--overwrite"):
            open_run(path, "resume")
    assert path.read_bytes() == line_of(0)


def test_standard_input_cannot_be_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    who = replace(identity(), input={"bytes": None, "sha256": None})
    writer, _, _ = open_run(path, "create", who)
    writer.write(line_of(0))
    writer.close_at_boundary()
    with pytest.raises(UsageError, match="needs an input file"):
        open_run(path, "resume", who)


def test_refusals_leave_the_files_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    writer, side, _ = open_run(path, "create")
    writer.write(line_of(0))
    writer.close_at_boundary()
    before = side.path.read_bytes()
    with pytest.raises(UsageError, match="--resume"):
        open_run(path, "create", identity(temperature=1.0))
    with pytest.raises(UsageError, match="is the input file"):
        open_run(path, "overwrite", input_source=path)
    with pytest.raises(UsageError, match="is the input file"):
        open_run(path, "overwrite", input_source=side.path)
    assert path.read_bytes() == line_of(0) and side.path.read_bytes() == before


@pytest.mark.parametrize("place", ["-", "/dev/null", "/dev/full"])
def test_streams_and_devices_have_no_side_file(place):
    writer, side, state = open_run(Path(place), "create")
    assert side is None and len(state.done) == 0 and not os.path.exists(f"{place}.meta.json")
    writer.close_at_boundary()


def test_side_file_that_cannot_be_written_is_an_output_error(tmp_path):
    side = SideFile(tmp_path / "gone" / "out.jsonl")
    with pytest.raises(OutputError, match="meta.json"):
        side.start(identity(), engine_version="1", command={}, run_seed=7)


def test_fingerprints(tmp_path):
    assert fingerprint({"a": 1, "b": {"c": 2, "d": 3}}) == fingerprint({"b": {"d": 3, "c": 2}, "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5}) and len(fingerprint({})) == 64
    with pytest.raises(ValueError):
        fingerprint({"a": float("nan")})
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"abc")
    first = input_identity(path)
    assert first["bytes"] == 3 and first["sha256"].startswith("ba7816bf")  # FIPS 180-2, the example "abc"
    path.write_bytes(b"abd")
    assert input_identity(path) != first
    with pytest.raises(UsageError, match="cannot read"):
        input_identity(tmp_path / "none")
    assert differences(identity().plain(), identity()) == []


@settings(max_examples=200, deadline=None, database=None)
@given(left=st.sets(st.integers(0, 99)), right=st.sets(st.integers(0, 99)))
def test_index_set_is_a_set(left, right):
    def of(values: set[int]) -> IndexSet:
        result = IndexSet()
        for value in [*values, *values]:
            result.add(value)
        return result

    for ours, theirs in (
        (of(left), left),
        (of(left).union(of(right)), left | right),
        (of(left).minus(of(right)), left - right),
    ):
        assert len(ours) == len(theirs) and {index for index in range(120) if index in ours} == theirs
