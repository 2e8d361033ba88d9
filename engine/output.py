"""The output file: finished rows appended one by one, each whole or not at all.

What a row holds is in `engine.result_row`; how a run is continued is in `engine.resume`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import stat
import threading
import time
from pathlib import Path

from launch.errors import EXIT_OK, DoorbellError, OutputError, UsageError

STDOUT = "-"
SYNC_EVERY_S = 5.0  # rows reach the kernel at once and the disk within this time: a power cut loses no more
MODES = ("create", "overwrite", "resume")


class ReaderGone(DoorbellError):
    """The program that read our standard output has closed it (`| head`). Not a failure: stop quietly."""

    exit_code = EXIT_OK

    def __init__(self) -> None:
        super().__init__("the reader of standard output has closed it")


class OutputWriter:
    """Appends lines to a file, a pipe or standard output (`-`).

    `mode`: `create` refuses a file that holds something, `overwrite` empties it, `resume` appends (call
    `engine.resume.ResumeState.load` first, it repairs the tail). `input_source`: the input's path, or its file
    descriptor for standard input, which is never written to.

    *Who*: one process writes; any thread may call `write` and `close_at_boundary`. The file is locked against a
    second run.

    *Raises*: UsageError when the place must not be written, OutputError when it cannot be.
    """

    def __init__(self, path: Path | str, *, mode: str = "create", input_source: Path | int | None = None):
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}")
        self._lock = threading.Lock()
        self._is_closed = False
        self._is_reader_gone = False
        self._failure: str | None = None
        self._last_sync = time.monotonic()
        self.num_rows = 0
        self._path = None if str(path) == STDOUT else Path(path)
        self.name = "standard output" if self._path is None else str(self._path)
        if self._path is None:
            if mode == "resume":
                raise UsageError("--resume needs an output file; standard output cannot be continued")
            self._fd, self._is_regular, self._end = 1, False, 0
            return
        if input_source is not None:
            check_not_input(self._path, input_source)
        self._fd = self._open(mode)

    def _open(self, mode: str) -> int:
        if self._path.is_dir():
            raise UsageError(f"the output {self.name} is a folder; name a file in it")
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except (OSError, ValueError) as error:
            raise OutputError(f"cannot open the output file {self.name}: {_reason(error)}") from None
        try:
            lock_file(fd, self.name)
            status = os.fstat(fd)
            self._is_regular = stat.S_ISREG(status.st_mode)
            if mode == "create" and self._is_regular and status.st_size:
                remedy = "use --resume to continue it or --overwrite to replace it"
                raise UsageError(f"the output file {self.name} exists and is not empty; {remedy}")
            if mode == "overwrite" and self._is_regular:
                os.ftruncate(fd, 0)
            self._end = os.fstat(fd).st_size if self._is_regular else 0
        except BaseException:
            os.close(fd)
            raise
        return fd

    def write(self, line: bytes) -> None:
        """Append one line (with its `\\n`) and hand it to the operating system.

        *Raises*: OutputError when it cannot be written; the file then ends with the last whole row, and every later
        call raises it again. ReaderGone when standard output or a pipe has lost its reader.
        """
        with self._lock:
            if self._failure is not None:
                raise OutputError(self._failure)
            if self._is_reader_gone:
                raise ReaderGone
            if self._is_closed:
                raise OutputError(f"the output {self.name} is closed already; the row was not written")
            try:
                self._check_in_place()
                self._write_all(line)
                self._end += len(line)
                self.num_rows += 1
                if time.monotonic() - self._last_sync >= SYNC_EVERY_S:
                    self._sync()
            except BrokenPipeError:
                self._is_reader_gone = True
                raise ReaderGone from None
            except OSError as error:
                raise OutputError(self._fail(_reason(error))) from None

    def close_at_boundary(self, timeout_s: float = 2.0) -> bool:
        """Finish the row that is being written, if any, bring all rows to the disk and accept no more.

        *Who*: any thread, any number of times; not a signal handler of the writing thread, which may hold the lock.
        Returns False when a write did not end within `timeout_s` (a pipe nobody reads).

        *Raises*: OutputError when the last rows did not reach the disk.
        """
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            if self._is_closed:
                return True
            self._is_closed = True
            try:
                if self._failure is None:
                    self._check_in_place()
                    self._sync()
            except OSError as error:
                raise OutputError(self._fail(_reason(error))) from None
            finally:
                if self._path is not None:
                    os.close(self._fd)
        finally:
            self._lock.release()
        return True

    def _check_in_place(self) -> None:
        """Writing to a file that was deleted or replaced succeeds and loses the rows: look whether it is there."""
        if not self._is_regular:
            return
        ours, named = os.fstat(self._fd), os.stat(self._path)
        if (ours.st_dev, ours.st_ino) != (named.st_dev, named.st_ino):
            raise OSError(errno.ESTALE, "the file was replaced by another one during the run")

    def _write_all(self, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # standard output can be non-blocking: it is shared with the shell
                select.select([], [self._fd], [])

    def _sync(self) -> None:
        self._last_sync = time.monotonic()
        if self._is_regular:
            os.fsync(self._fd)

    def _fail(self, reason: str) -> str:
        """Cut a torn row off and remember why nothing more can be written."""
        torn = ""
        if self._is_regular:
            try:
                os.ftruncate(self._fd, self._end)
            except OSError:
                torn = "; its last line may be torn, --resume repairs that"
        self._failure = f"cannot write the output {self.name}: {reason} (rows written: {self.num_rows}){torn}"
        return self._failure


def check_not_input(path: Path, input_source: Path | int) -> None:
    """Refuse an output that is the input: by another name, through a link, or as redirected standard input.

    *Raises*: UsageError.
    """
    try:
        theirs, ours = os.stat(input_source), os.stat(path)
    except (OSError, ValueError):
        return  # one of them does not exist, so they are not the same file
    if stat.S_ISREG(ours.st_mode) and (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino):
        raise UsageError(f"the output {path} is the input file; name another output")


def lock_file(fd: int, name: str) -> None:
    """Keep a second run off the file, for as long as `fd` is open. File systems without locks go without.

    *Raises*: UsageError when another process holds it.
    """
    with contextlib.suppress(OSError):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another run is writing to {name}; wait for it or name another output") from None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
