"""Continuing a run: what the output file already holds, its tail repaired, and one row per index kept."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from engine.output import STDOUT, OutputWriter, check_not_input, lock_file
from engine.side_file import RunIdentity, SideFile, check_same_run, replace_durably
from launch.errors import OutputError, UsageError

# One bit an index: 256 MiB at this bound, which only a foreign file would reach.
MAX_INDEX = 2**31


class IndexSet:
    """A set of row indices, one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def add(self, index: int) -> None:
        byte, bit = index >> 3, 1 << (index & 7)
        if byte >= len(self._bits):
            self._bits.extend(bytes(byte + 1 - len(self._bits)))
        self._count += not self._bits[byte] & bit
        self._bits[byte] |= bit

    def union(self, other: IndexSet) -> IndexSet:
        return self._combined(int.from_bytes(self._bits, "little") | int.from_bytes(other._bits, "little"))

    def minus(self, other: IndexSet) -> IndexSet:
        return self._combined(int.from_bytes(self._bits, "little") & ~int.from_bytes(other._bits, "little"))

    @staticmethod
    def _combined(bits: int) -> IndexSet:
        result = IndexSet()
        result._bits = bytearray(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))
        result._count = bits.bit_count()
        return result

    def __contains__(self, index: int) -> bool:
        byte = index >> 3
        return byte < len(self._bits) and bool(self._bits[byte] & (1 << (index & 7)))

    def __len__(self) -> int:
        return self._count


@dataclass
class ResumeState:
    """What is done. `index in state.done` tells whether a row needs no more work.

    `num_ok`, `num_failed`: rows of the file, by outcome. `torn_bytes`: cut off the end. `num_dropped`: lines removed
    because another line has their index, or because they failed and are tried again.
    """

    done: IndexSet
    num_ok: int = 0
    num_failed: int = 0
    torn_bytes: int = 0
    num_dropped: int = 0

    @classmethod
    def load(cls, output: Path | str, *, retry_failed: bool = False) -> ResumeState:
        """Read the output of an earlier run and make it fit to be appended to.

        A tail without a line end, or a last line that is not JSON, is cut off: its row is made again. Failed rows are
        done, unless `retry_failed`. If rows have to go (failed ones to retry, or two lines of one index, of which an
        answered one is kept), the file is rewritten beside itself and renamed over, so that a crash leaves the old or
        the new one. A missing file is an empty one.

        *Who*: the writing process, before it opens its `OutputWriter`.

        *Raises*: UsageError when the file is not an output of Doorbell or another run writes to it; OutputError when it
        cannot be changed.
        """
        path = Path(os.path.realpath(output))  # the file behind a link is rewritten, not the link
        try:
            with path.open("r+b") as file:
                lock_file(file.fileno(), str(output))
                return _load(file, path, retry_failed)
        except FileNotFoundError:
            return cls(IndexSet())
        except IsADirectoryError:
            raise UsageError(f"the output {output} is a folder; name a file in it") from None
        except OSError as error:
            raise OutputError(f"cannot resume {output}: {error.strerror or error}") from None


def open_output(
    output: Path | str,
    *,
    mode: str,
    identity: RunIdentity,
    engine_version: str,
    command: Mapping[str, object],
    run_seed: int,
    input_source: Path | int | None = None,
    retry_failed: bool = False,
) -> tuple[OutputWriter, SideFile | None, ResumeState]:
    """Everything a run needs to write its rows, checked and opened in the order that loses nothing.

    The side file is None when the output is standard output, a pipe or a device: there is nothing to continue then.

    `run_seed`: kept in the side file; a resumed run goes on with the one it finds there (`SideFile.run_seed`).
    `mode`: as for `OutputWriter`. With `resume`, the stored identity must equal `identity`; a missing or empty output
    starts anew. The side file is written before this returns, hence before the first row.

    *Raises*: UsageError, OutputError.
    """
    if not _is_continuable(output):
        return OutputWriter(output, mode=mode, input_source=input_source), None, ResumeState(IndexSet())
    side = SideFile(output)
    if input_source is not None:
        check_not_input(Path(output), input_source)
        check_not_input(side.path, input_source)
    record = side.read() if mode == "resume" and _has_rows(output) else None
    state = ResumeState(IndexSet())
    if mode == "resume" and _has_rows(output):
        if record is None:
            remedy = "use --overwrite to start anew"
            raise UsageError(f"cannot resume {output}: its side file {side.path.name} is missing; {remedy}")
        if identity.input.get("sha256") is None:
            raise UsageError("--resume needs an input file: standard input cannot be compared with the first run's")
        check_same_run(record, identity, output)
        state = ResumeState.load(output, retry_failed=retry_failed)
    writer = OutputWriter(output, mode=mode, input_source=input_source)
    try:
        if record is None:
            side.start(identity, engine_version=engine_version, command=command, run_seed=run_seed)
        else:
            side.resume(record, engine_version=engine_version, command=command)
    except BaseException:
        writer.close_at_boundary()
        raise
    return writer, side, state


def _is_continuable(output: Path | str) -> bool:
    return str(output) != STDOUT and (Path(output).is_file() or not Path(output).exists())


def _has_rows(output: Path | str) -> bool:
    try:
        return Path(output).stat().st_size > 0
    except OSError:
        return False


def _load(file: BinaryIO, path: Path, retry_failed: bool) -> ResumeState:
    ok, failed, num_lines, end = _scan(file, path)
    state = ResumeState(IndexSet(), torn_bytes=os.fstat(file.fileno()).st_size - end)
    if state.torn_bytes:
        file.truncate(end)
        os.fsync(file.fileno())
    failed_only = failed.minus(ok)
    state.num_ok, state.num_failed = len(ok), 0 if retry_failed else len(failed_only)
    state.num_dropped = num_lines - state.num_ok - state.num_failed
    kept = _KeptLines(ok, IndexSet() if retry_failed else failed_only)
    if state.num_dropped:
        _rewrite(file, path, kept)
    state.done = kept.indices
    return state


def _scan(file: BinaryIO, path: Path) -> tuple[IndexSet, IndexSet, int, int]:
    """Answered and failed indices, number of lines, and the offset where the last whole row ends.

    Only the last line can be torn. A bad line before it was not made by a crash, and then nothing is changed.
    """
    ok, failed = IndexSet(), IndexSet()
    num_lines = end = 0
    is_torn = False
    for line in file:
        if is_torn:
            place = f"line {num_lines + 1} of {path}"
            raise UsageError(f"{place} is not a result of Doorbell; remove that line, or use --overwrite to start anew")
        result = _parse(line) if line.endswith(b"\n") else None
        if result is None:
            is_torn = True
            continue
        (ok if result[1] else failed).add(result[0])
        num_lines += 1
        end += len(line)
    return ok, failed, num_lines, end


class _KeptLines:
    """Which lines stay: for each index the first answered one, else the first failed one where failures stay."""

    def __init__(self, ok: IndexSet, failed_only: IndexSet):
        self._ok, self._failed_only = ok, failed_only
        self._written = IndexSet()

    @property
    def indices(self) -> IndexSet:
        return self._ok.union(self._failed_only)

    def takes(self, index: int, is_ok: bool) -> bool:
        if index not in (self._ok if is_ok else self._failed_only) or index in self._written:
            return False
        self._written.add(index)
        return True


def _rewrite(file: BinaryIO, path: Path, kept: _KeptLines) -> None:
    temporary = path.with_name(f".{path.name}.doorbell-tmp")
    try:
        with temporary.open("wb") as target:
            os.fchmod(target.fileno(), os.fstat(file.fileno()).st_mode & 0o7777)
            file.seek(0)
            for line in file:
                result = _parse(line)
                if result is not None and kept.takes(*result):
                    target.write(line)
            target.flush()
            os.fsync(target.fileno())
        replace_durably(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _parse(line: bytes) -> tuple[int, bool] | None:
    """Index and outcome of an output line, in the plain or the OpenAI shape; None when it is neither."""
    try:
        value = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    index = value.get("index") if isinstance(value, dict) else None
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < MAX_INDEX:
        return None
    if "status" in value:
        return index, value["status"] == "ok"
    response = value.get("response")
    return index, isinstance(response, dict) and response.get("status_code") == 200
