"""Writing the output file: cases C 49 and D 53, 59."""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine import output
from engine.output import OutputWriter, ReaderGone
from engine.result_row import encode_row
from launch.errors import EXIT_OUTPUT, OutputError, UsageError

LINE = b'{"index": 0}\n'


def strict(line: bytes) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(line.decode("utf-8"), parse_constant=refuse)


def test_rows_are_on_disk_as_they_finish_and_end_in_newline_only(tmp_path):
    path = tmp_path / "ausgabe-é.jsonl"
    writer = OutputWriter(path)
    for number in range(3):
        writer.write(LINE)
        assert path.read_bytes() == LINE * (number + 1)
    assert writer.close_at_boundary() and writer.close_at_boundary()
    with pytest.raises(OutputError, match="closed already"):
        writer.write(LINE)
    assert path.read_bytes() == LINE * 3


def test_existing_output_is_refused_naming_both_flags(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(LINE)
    with pytest.raises(UsageError, match="--resume.*--overwrite"):
        OutputWriter(path)
    assert path.read_bytes() == LINE
    writer = OutputWriter(path, mode="resume")
    writer.write(LINE)
    writer.close_at_boundary()
    assert path.read_bytes() == LINE * 2
    OutputWriter(path, mode="overwrite").close_at_boundary()
    assert path.read_bytes() == b""
    OutputWriter(path).close_at_boundary()  # an empty file holds nothing to lose


def test_a_folder_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is a folder"):
        OutputWriter(tmp_path)
    with pytest.raises(OutputError, match="No such file or directory"):
        OutputWriter(tmp_path / "none" / "out.jsonl")


@pytest.mark.parametrize("link", ["same", "symbolic", "hard", "descriptor"])
def test_the_input_is_never_written_to(tmp_path, link):
    source = tmp_path / "in.jsonl"
    source.write_bytes(LINE)
    target = source
    if link == "symbolic":
        target = tmp_path / "s"
        target.symlink_to(source)
    elif link == "hard":
        target = tmp_path / "h"
        target.hardlink_to(source)
    with source.open("rb") as stream, pytest.raises(UsageError, match="is the input file"):
        OutputWriter(target, mode="overwrite", input_source=stream.fileno() if link == "descriptor" else source)
    assert source.read_bytes() == LINE


def test_a_second_run_on_the_same_file_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = OutputWriter(path)
    writer.write(LINE)
    with pytest.raises(UsageError, match="another run"):
        OutputWriter(path, mode="overwrite")
    assert path.read_bytes() == LINE
    writer.close_at_boundary()
    OutputWriter(path, mode="resume").close_at_boundary()


def test_full_device_names_path_and_reason():
    writer = OutputWriter("/dev/full")
    with pytest.raises(OutputError, match="/dev/full: No space left on device") as caught:
        writer.write(LINE)
    assert caught.value.exit_code == EXIT_OUTPUT
    with pytest.raises(OutputError, match="No space left"):
        writer.write(LINE)
    assert writer.close_at_boundary()


class FakeDisk:
    """`os.write` of a disk with `free` bytes, which takes at most `piece` bytes a call."""

    def __init__(self, free: int, piece: int = 1 << 30):
        self.free, self.piece, self.write = free, piece, os.write

    def __call__(self, fd: int, data: bytes) -> int:
        if not self.free:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = self.write(fd, data[: min(self.free, self.piece, len(data))])
        self.free -= count
        return count


@pytest.mark.parametrize("free", [len(LINE) * 2 + extra for extra in range(len(LINE))])
def test_full_disk_leaves_whole_rows(tmp_path, monkeypatch, free):
    path = tmp_path / "out.jsonl"
    writer = OutputWriter(path)
    monkeypatch.setattr(output.os, "write", FakeDisk(free))
    with pytest.raises(OutputError, match="No space left on device .rows written: 2"):
        for _ in range(5):
            writer.write(LINE)
    monkeypatch.undo()
    with pytest.raises(OutputError):
        writer.write(LINE)  # also when there is room again
    writer.close_at_boundary()
    assert path.read_bytes() == LINE * 2


def test_short_writes_are_continued(tmp_path, monkeypatch):
    path = tmp_path / "out.jsonl"
    writer = OutputWriter(path)
    monkeypatch.setattr(output.os, "write", FakeDisk(10**6, piece=3))
    writer.write(LINE)
    writer.write(LINE)
    assert path.read_bytes() == LINE * 2


def test_full_file_system(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted: {mounted.stderr.decode().strip()}")
    try:
        writer = OutputWriter(disk / "out.jsonl")
        line = encode_row({"index": 0, "text": "x" * 3000})
        with pytest.raises(OutputError, match="No space left"):
            for _ in range(100):
                writer.write(line)
        writer.close_at_boundary()
        lines = (disk / "out.jsonl").read_bytes().split(b"\n")
        assert lines.pop() == b"" and len(lines) == writer.num_rows > 10 and all(strict(item) for item in lines)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("kind", ["deleted", "folder", "replaced"])
def test_a_vanished_file_is_noticed_at_the_next_row(tmp_path, kind):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "out.jsonl"
    writer = OutputWriter(path)
    writer.write(LINE)
    path.unlink()
    if kind == "folder":
        folder.rmdir()
    elif kind == "replaced":
        path.write_bytes(b"other\n")
    with pytest.raises(OutputError, match="replaced" if kind == "replaced" else "No such file"):
        writer.write(LINE)
    assert kind != "replaced" or path.read_bytes() == b"other\n"


def test_a_file_system_that_is_made_read_only_stops_the_run(tmp_path, monkeypatch):
    writer = OutputWriter(tmp_path / "out.jsonl")

    def refuse(fd: int, data: bytes) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(output.os, "write", refuse)
    with pytest.raises(OutputError, match="Read-only file system"):
        writer.write(LINE)


def test_a_reader_that_left_is_not_an_error(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = OutputWriter(fifo)
    writer.write(LINE)
    assert os.read(reader, 100) == LINE
    os.close(reader)
    for _ in range(2):
        with pytest.raises(ReaderGone):
            writer.write(LINE)
    assert writer.close_at_boundary()


def test_standard_output_without_a_locale():
    program = (
        "from engine.output import OutputWriter, ReaderGone\n"
        "from engine.result_row import encode_row\n"
        "writer = OutputWriter('-')\n"
        "try:\n"
        "    for number in range(100000): writer.write(encode_row({'index': number, 'text': '\\u4f60\\u597d'}))\n"
        "except ReaderGone: raise SystemExit(7)\n"
    )
    environ = {"PATH": os.defpath, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ
    )
    assert strict(process.stdout.readline()) == {"index": 0, "text": "你好"}
    process.stdout.close()
    assert process.wait(timeout=60) == 7 and process.stderr.read() == b""
    process.stderr.close()
    with pytest.raises(UsageError, match="--resume"):
        OutputWriter("-", mode="resume")


def test_closing_from_another_thread_ends_at_a_row(tmp_path):
    path = tmp_path / "out.jsonl"
    writer = OutputWriter(path)
    line = encode_row({"index": 0, "text": "x" * 5000})
    started = threading.Event()

    def write() -> None:
        try:
            while True:
                writer.write(line)
                started.set()
        except OutputError:
            pass

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert started.wait(10)
    assert writer.close_at_boundary(timeout_s=10)
    size = path.stat().st_size
    for thread in threads:
        thread.join(10)
    assert path.read_bytes() == line * writer.num_rows and size == len(line) * writer.num_rows


def test_closing_gives_up_on_a_pipe_that_nobody_reads(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = OutputWriter(fifo)

    def write() -> None:
        with pytest.raises(ReaderGone):
            writer.write(b"x" * (1 << 20))

    thread = threading.Thread(target=write)
    thread.start()
    assert select.select([reader], [], [], 10)[0]  # the write has begun; the pipe holds less than the line
    assert writer.close_at_boundary(timeout_s=0.2) is False
    os.close(reader)
    thread.join(10)
    assert not thread.is_alive()


def test_rows_are_brought_to_the_disk_now_and_then(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(output.os, "fsync", synced.append)
    writer = OutputWriter(tmp_path / "out.jsonl")
    writer.write(LINE)
    assert not synced
    monkeypatch.setattr(output, "SYNC_EVERY_S", 0.0)
    writer.write(LINE)
    assert len(synced) == 1
    writer.close_at_boundary()
    assert len(synced) == 2
