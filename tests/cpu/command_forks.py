"""Runs the command in a fork of a process that has imported everything already: a real process in a tenth of the time.

Run as a program, this file is that process. It reads one request a line from standard input, forks, and answers with the
child's pid and, once it has ended, its exit code (negative: the signal that ended it).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


class CommandForks:
    """Starts one run of the command at a time. Use in a `with` block."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._number = 0
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> CommandForks:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.kill()
        self._server.wait(10)

    def start(
        self,
        arguments: Sequence[object],
        stdin: Path | str = os.devnull,
        stdout: Path | str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ForkedCommand:
        self._number += 1
        paths = {
            "stdin": str(stdin),
            "stdout": str(stdout or self._folder / f"{self._number}.stdout"),
            "stderr": str(self._folder / f"{self._number}.stderr"),
        }
        request = {"argv": [str(argument) for argument in arguments], "environ": dict(environ or {}), **paths}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return ForkedCommand(self, int(self._read()), Path(paths["stdout"]), Path(paths["stderr"]))

    def _read(self) -> str:
        line = self._server.stdout.readline()
        if not line:
            raise AssertionError("the server of forks has ended")
        return line


class ForkedCommand:
    """A run in the making. Read `stderr` whenever you like, `wait` exactly once."""

    def __init__(self, forks: CommandForks, pid: int, stdout: Path, stderr: Path):
        self._forks, self.pid, self._stdout, self._stderr = forks, pid, stdout, stderr
        self._started = time.monotonic()

    @property
    def stderr(self) -> str:
        return self._stderr.read_text(encoding="utf-8", errors="surrogateescape")

    def is_over(self) -> bool:
        """Whether it has ended; its parent may not have taken notice yet."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
        except OSError:
            return True

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        from command_harness import Ended

        code = int(self._forks._read())
        stdout = self._stdout.read_bytes() if self._stdout.is_file() else b""
        return Ended(code, stdout, self.stderr, time.monotonic() - self._started)


def _serve() -> None:
    sys.path.insert(0, str(ROOT))
    # What takes the time, with no thread started yet. engine.text imports transformers when it needs it.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import engine.run  # noqa: F401
    from engine.generate import main

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(request)
            main(request["argv"])
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(request: dict) -> None:
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        flags = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        opened = os.open(request[name], flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8")  # the server's own has read ahead
    os.environ.update(request["environ"])


if __name__ == "__main__":
    _serve()
