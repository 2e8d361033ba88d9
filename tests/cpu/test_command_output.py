"""Where the answers go: a terminal, a pipe, a machine without a locale, a full disk, a folder that vanishes."""

from __future__ import annotations

import codecs
import os
import pty
import shutil
import subprocess
import threading
import time
import tty
from pathlib import Path

import pytest
from command_forks import CommandForks
from command_harness import Run, read_rows, run, side_record, strict_json, tiny_folder, write_rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with CommandForks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture(scope="module")
def many_rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    return write_rows(path, ({"prompt": f"count to {number}"} for number in range(4000)))


# -- streaming -------------------------------------------------------------------------------------------------------


def on_a_terminal(tmp_path: Path, arguments: list[object]) -> tuple[list[bytes], object]:
    """What each read of a terminal gave, while the command wrote to it, and how it ended."""
    master, slave = pty.openpty()
    tty.setraw(slave)  # or the terminal would turn \n into \r\n
    pieces: list[bytes] = []

    def read() -> None:
        while True:
            try:
                piece = os.read(master, 1 << 16)
            except OSError:  # EIO: the last writer has closed it
                return
            if not piece:
                return
            pieces.append(piece)

    with Run(tmp_path, arguments, stdout=slave) as running:
        os.close(slave)
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        ended = running.wait()
    reader.join(5)
    os.close(master)
    return pieces, ended


def test_a_terminal_shows_text_as_it_grows(tmp_path, forks, model):
    prompt = ["--model", model, "--prompt", "count", "--ignore-eos", "--temperature", 1, "--seed", 3, "--max-tokens", 150]
    whole = forks.start([*prompt, "--quiet"]).wait()
    text = whole.stdout.decode("utf-8").removesuffix("\n")
    assert len(text) > 100 and not text.isascii()
    stop = text[60:66]
    cut = text[: text.index(stop)]
    pieces, ended = on_a_terminal(tmp_path, [*prompt, "--stop", stop])
    assert ended.code == 0, ended.stderr
    assert b"".join(pieces).decode("utf-8") == cut + "\n"
    assert len(pieces) > 5, "it should come in pieces"
    for piece in pieces:
        codecs.decode(piece, "utf-8", "strict")
    assert "all-reduce" in ended.stderr  # the summary went elsewhere


def test_streamed_text_equals_the_whole(forks, model):
    prompt = ["--model", model, "--prompt", "count", "--ignore-eos", "--temperature", 1, "--seed", 9, "--quiet"]
    assert forks.start([*prompt, "--stream"]).wait().stdout == forks.start([*prompt, "--no-stream"]).wait().stdout


# -- no locale -------------------------------------------------------------------------------------------------------


def test_without_a_locale(tmp_path, forks, model):
    """`LC_ALL=C PYTHONUTF8=0`: Python then takes ASCII for everything that does not say otherwise."""
    folder = tmp_path / "数据 é"
    folder.mkdir()
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "LANG": None, "PYTHONIOENCODING": None, "LC_CTYPE": None}
    prompt = ["--model", model, "--raw", "--max-tokens", 8, "--ignore-eos", "--temperature", 1, "--seed", 4]
    rows = write_rows(folder / "行.jsonl", [{"id": "你好", "prompt": "今天天气很好。"}])
    output = folder / "出.jsonl"
    ended = run(tmp_path, [*prompt, "--input", rows, "--output", output], environ=plain)
    assert ended.code == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    (row,) = read_rows(output)
    assert row["id"] == "你好"
    assert side_record(output)["exit"]["code"] == 0
    expected = forks.start([*prompt, "--quiet", "--input", rows]).wait()
    assert strict_json(expected.stdout)["text"] == row["text"]
    ended = run(tmp_path, [*prompt, "--prompt", "今天天气很好。", "--stream"], environ=plain)
    assert ended.code == 0, ended.stderr
    assert ended.stdout.decode("utf-8") == row["text"] + "\n"


def test_message_about_a_foreign_path_without_a_locale(tmp_path):
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "LANG": None}
    ended = run(tmp_path, ["--model", "/没有/模型", "--prompt", "a"], environ=plain)
    assert ended.code == 3 and ended.last_line == "doorbell: exit code 3 (model or configuration)", ended.stderr
    assert "Traceback" not in ended.stderr


# -- output that cannot be written: exit code 6 ----------------------------------------------------------------------


def check_output_failed(ended, *words: str) -> None:
    assert ended.code == 6, ended.stderr
    assert ended.last_line == "doorbell: exit code 6 (output not written)"
    assert "Traceback" not in ended.stderr
    assert len([line for line in ended.said if words[0] in line]) == 1
    for word in words:
        assert word in ended.sentence, ended.stderr


@pytest.mark.parametrize("place", ["--output", "standard output", "single prompt"])
def test_dev_full(forks, model, many_rows, place):
    arguments = ["--model", model, "--quiet", "--max-tokens", 4]
    arguments += ["--prompt", "a"] if place == "single prompt" else ["--input", many_rows]
    if place == "--output":
        ended = forks.start([*arguments, "--output", "/dev/full"]).wait()
    else:
        ended = forks.start(arguments, stdout="/dev/full").wait()
    check_output_failed(ended, "No space left", "/dev/full" if place == "--output" else "standard output")
    assert ended.seconds < 20


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount is not allowed here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_full_disk_and_resume(forks, model, many_rows, small_disk):
    output = small_disk / "out.jsonl"
    command = ["--model", model, "--quiet", "--max-tokens", 4, "--seed", 1, "--ignore-eos", "--limit", 600]
    command += ["--input", many_rows, "--output", output]
    check_output_failed(forks.start(command).wait(), "No space left", str(output))
    assert sorted(path.name for path in small_disk.iterdir()) == ["out.jsonl", "out.jsonl.meta.json"]
    written = read_rows(output)
    assert 50 < len(written) < 600
    subprocess.run(["mount", "-o", "remount,size=1m", small_disk], check=True)
    ended = forks.start([*command, "--resume"]).wait()
    assert ended.code == 0, ended.stderr
    assert sorted(row["index"] for row in read_rows(output)) == list(range(600))
    assert read_rows(output)[: len(written)] == written


@pytest.mark.parametrize("change", ["folder removed", "file replaced"])
def test_output_that_vanishes(tmp_path, forks, model, many_rows, change):
    folder = tmp_path / "folder"
    folder.mkdir()
    output = folder / "out.jsonl"
    running = forks.start(["--model", model, "--quiet", "--max-tokens", 4, "--input", many_rows, "--output", output])
    deadline = time.monotonic() + 30
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.005)
    if change == "folder removed":
        folder.rename(tmp_path / "gone")  # in one step, whatever is being written in it
        shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    else:
        (folder / "other").write_text("mine\n")
        (folder / "other").rename(output)
    ended = running.wait()
    check_output_failed(ended, str(output), "No such file" if change == "folder removed" else "replaced")
    if change == "file replaced":
        assert output.read_text() == "mine\n"
        assert side_record(output)["exit"]["code"] == 6


def test_folder_that_does_not_exist(tmp_path, forks, model, many_rows):
    ended = forks.start(["--model", model, "--input", many_rows, "--output", tmp_path / "none" / "out.jsonl"]).wait()
    check_output_failed(ended, str(tmp_path / "none"), "No such file")
