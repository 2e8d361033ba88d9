"""Leaving: one sentence, one code, the same for whoever looks (terminal, torchrun's summary, scripts)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import NoReturn, TextIO

from launch.environment import Environment
from launch.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_MODEL,
    EXIT_OK,
    EXIT_OUTPUT,
    EXIT_PEER_LOST,
    EXIT_ROWS_FAILED,
    EXIT_TERMINATED,
    EXIT_USAGE,
)
from launch.signals import give_up_signals

MEANINGS = {
    EXIT_OK: "all rows answered",
    EXIT_BUG: "internal error",
    EXIT_USAGE: "usage",
    EXIT_MODEL: "model or configuration",
    EXIT_ROWS_FAILED: "some rows failed",
    EXIT_PEER_LOST: "a peer was lost",
    EXIT_OUTPUT: "output not written",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_TERMINATED: "terminated",
}

# torchrun polls its processes ten times a second and then ends the others: rank 0 has this long to say what happened.
WAIT_FOR_SPEAKER_S = 5.0


class LastingStderr:
    """Standard error that outlives its reader: `2>&1 | head` must not end a run whose rows go to a file."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _point_to_null(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _point_to_null(self._stream)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _point_to_null(stream: TextIO) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def report(code: int, environment: Environment, message: str | None = None, is_speaker: bool | None = None) -> None:
    """Say once how the run ended. The last line on stderr names the code, which torchrun would otherwise turn into 1."""
    if is_speaker if is_speaker is not None else environment.rank == 0:
        if message is not None:
            _say(f"doorbell: {message}")
        if code != EXIT_OK:
            _say(f"doorbell: exit code {code} ({MEANINGS.get(code, 'unknown')})")
    if code != EXIT_OK and environment.error_file:
        _record_for_torchrun(Path(environment.error_file), code, message)


def leave(code: int, environment: Environment, message: str | None = None) -> NoReturn:
    """Report and exit, from the main thread, before any peer waits for us."""
    report(code, environment, message)
    if code != EXIT_OK and environment.is_torchrun and environment.rank != 0:
        wait_for_speaker()
    sys.exit(code)


def describe_signal(code: int, environment: Environment, has_met: bool) -> str:
    """Why a signal's `code` ended us, in a sentence. `has_met`: whether this rank is connected to the others already.

    torchrun also sends SIGTERM when a rank has died, and before the ranks have met nobody but torchrun can tell.
    """
    what = MEANINGS[code]
    if environment.is_torchrun and environment.world_size > 1 and code == EXIT_TERMINATED and not has_met:
        return f"{what} before all ranks had met; if a rank failed, torchrun names it below"
    return what


def wait_for_speaker() -> None:
    """Give rank 0 time to print: torchrun ends every rank as soon as it sees the first one leave."""
    give_up_signals()
    time.sleep(WAIT_FOR_SPEAKER_S)


def end_process(code: int) -> NoReturn:
    """Exit without the interpreter's tear-down, once everything is said and saved.

    A thread that still waits for a line of standard input would make the tear-down abort ("could not acquire lock for stdin").
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _say(line: str) -> None:
    # A closed or full stderr must not hide the exit code behind a traceback.
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        pass


def _record_for_torchrun(path: Path, code: int, message: str | None) -> None:
    """The file whose text torchrun's failure summary shows in place of `error_file: <N/A>`."""
    text = f"exit code {code} ({MEANINGS.get(code, 'unknown')}): {message or 'see the output above'}"
    # Without a "py_callstack": torchrun would show that in place of the text, even an empty one.
    record = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        path.write_text(json.dumps(record), encoding="utf-8")
    except OSError as error:
        print(f"doorbell: torchrun's error file could not be written: {os.strerror(error.errno or 0)}", file=sys.stderr)
