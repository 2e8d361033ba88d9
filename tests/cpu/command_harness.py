"""Starts the command as a user would, alone or under torchrun, and sees what becomes of every process of it.

Each run carries a mark in its environment, which every process it starts inherits: that is how a test finds a rank to kill,
and how it knows that nothing is left.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tiny import make_model, save_model
from tiny_tokenizer import build_tiny_tokenizer

ROOT = Path(__file__).parents[2]
SHM = Path("/dev/shm")
MARK = "DOORBELL_TEST_MARK"
END_OF_TEXT_ID = 511  # the tiny tokenizer's <|im_end|>


def tiny_folder(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """A complete model folder: random Qwen2 of vocabulary 512 with tokenizer and chat template."""
    options = {"vocab_size": 512, "eos_token_id": END_OF_TEXT_ID, "max_position_embeddings": 2048}
    save_model(make_model("qwen2", seed, **{**options, **overrides}), folder)
    return build_tiny_tokenizer(folder)


def write_rows(path: Path, rows: Iterable[Mapping[str, object] | str]) -> Path:
    """A JSONL file; a string is written as it is, which makes bad lines possible."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole file, which must consist of whole JSON lines."""
    data = path.read_bytes()
    assert not data or data.endswith(b"\n"), f"torn tail: {data[-80:]!r}"
    return [strict_json(line) for line in data.splitlines()]


def strict_json(line: bytes | str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(line, parse_constant=refuse)


def side_record(output: Path) -> dict[str, Any]:
    return json.loads(Path(f"{output}.meta.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Ended:
    """How a run ended. `code`: of the process that was started, so torchrun's own under torchrun."""

    code: int
    stdout: bytes
    stderr: str
    seconds: float

    @property
    def said(self) -> list[str]:
        """What the engine itself said in sentences, its start summary left out."""
        return [line for line in self.stderr.splitlines() if line.startswith("doorbell: ")]

    @property
    def last_line(self) -> str:
        return self.said[-1] if self.said else ""

    @property
    def sentence(self) -> str:
        """The one sentence before the last line: why the run ended."""
        return self.said[-2] if len(self.said) > 1 else ""


class Run:
    """A run of the command with `arguments`, under torchrun with `ranks` processes if given. Use in a `with` block."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[object],
        ranks: int | None = None,
        environ: Mapping[str, str | None] | None = None,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | None = None,
        cwd: Path = ROOT,
        module: str = "engine.generate",
    ):
        self.mark = secrets.token_hex(8)
        self._out, self._err = folder / f"{self.mark}.stdout", folder / f"{self.mark}.stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                _command_line(arguments, ranks, module),
                cwd=cwd,
                env=_environment(self.mark, environ or {}),
                stdin=stdin,
                stdout=out if stdout is None else stdout,
                stderr=err,
            )
        self.started = time.monotonic()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.survivors():
            process.kill()
        self.process.wait(10)

    def wait(self, timeout_s: float = 60.0) -> Ended:
        """*Raises* `AssertionError` when it did not end in time, with what it said so far."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s\n{self.stderr}") from None
        return Ended(code, self._out.read_bytes(), self.stderr, time.monotonic() - self.started)

    @property
    def stderr(self) -> str:
        return self._err.read_text(encoding="utf-8", errors="surrogateescape")

    def survivors(self) -> list[psutil.Process]:
        """Processes of the run, of whatever parent, that have not ended."""
        return [process for process in psutil.process_iter() if _environ(process).get(MARK) == self.mark]

    def rank(self, rank: int) -> psutil.Process:
        """The process of `rank`. *Raises* `AssertionError` when there is none."""
        for process in self.survivors():
            if _environ(process).get("RANK") == str(rank):
                return process
        raise AssertionError(f"rank {rank} is not running\n{self.stderr}")

    def until(self, condition: Callable[[], Any], timeout_s: float = 60.0) -> None:
        """Wait for `condition`, while the run goes on."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(f"it ended with {self.process.returncode} before the condition\n{self.stderr}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the condition was not met within {timeout_s} s\n{self.stderr}")
            time.sleep(0.02)

    def until_rows(self, output: Path, number: int, timeout_s: float = 60.0) -> None:
        self.until(lambda: output.exists() and output.read_bytes().count(b"\n") >= number, timeout_s)


def run(folder: Path, arguments: Sequence[object], ranks: int | None = None, timeout_s: float = 90.0, **how: Any) -> Ended:
    """Run to the end; nothing may be left of it."""
    with Run(folder, arguments, ranks, **how) as running:
        ended = running.wait(timeout_s)
        assert running.survivors() == []
    return ended


def shared_memory() -> set[str]:
    """Segments in /dev/shm whose creators, whose pid is in the name, are gone. Those of other tests' ranks come and go."""
    names = {path.name for path in SHM.glob("doorbell-*")}
    return {name for name in names if not psutil.pid_exists(int(name.split("-")[2]))}


def _command_line(arguments: Sequence[object], ranks: int | None, module: str) -> list[str]:
    torchrun = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, *torchrun, "-m", module, *map(str, arguments)]


def _environment(mark: str, changes: Mapping[str, str | None]) -> dict[str, str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **changes, MARK: mark}
    return {name: value for name, value in environ.items() if value is not None}


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}
