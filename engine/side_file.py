"""The side file `<output>.meta.json`: which run made the output, with what, and how it ended.

Written whole and atomically, before the first row and at the end, so that it is there for `--resume` after any crash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from launch.errors import OutputError, UsageError

FORMAT = 1
_SHOWN_DIFFERENCES = 6


@dataclass(frozen=True)
class RunIdentity:
    """All that decides the answers; two runs may write to one file only when it is equal. JSON values only.

    `model`: folder's fingerprint, dtype. `input`: see `input_identity`. `sampling`: effective defaults of the rows.
    `settings`: whatever else changes answers or rows (chat template, system text, prompt field, output format, limits).
    Leave out what does not: batch size, device, number of ranks, paths.
    """

    model: Mapping[str, object]
    input: Mapping[str, object]
    sampling: Mapping[str, object]
    settings: Mapping[str, object]

    def plain(self) -> dict[str, dict[str, object]]:
        """As JSON gives it back: tuples are lists, keys are strings."""
        return json.loads(json.dumps(asdict(self), allow_nan=False))


class SideFile:
    """The side file of one output file; keeps its contents in memory and rewrites it whole."""

    def __init__(self, output: Path | str):
        self.path = Path(f"{output}.meta.json")
        self._record: dict[str, object] = {}

    def read(self) -> dict[str, object] | None:
        """Its contents, or None when there is none.

        *Raises*: UsageError when it cannot be read or was not written by Doorbell.
        """
        try:
            record = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise UsageError(f"cannot read the side file {self.path}: {error}; use --overwrite to start anew") from None
        if (
            not isinstance(record, dict)
            or record.get("format") != FORMAT
            or not isinstance(record.get("identity"), dict)
            or not isinstance(record.get("run_seed"), int)
        ):
            raise UsageError(
                f"{self.path} is not a side file of this version of Doorbell; use --overwrite to start anew"
            )
        return record

    @property
    def run_seed(self) -> int:
        """Seed of the rows that bring none: drawn once, and kept by every part of a resumed run."""
        return self._record["run_seed"]

    def start(self, identity: RunIdentity, *, engine_version: str, command: Mapping[str, object], run_seed: int) -> None:
        """Write the beginning of a new run. `command`: everything as given, for people; it is not compared.

        *Raises*: OutputError.
        """
        plain = identity.plain()
        self._record = {
            "format": FORMAT,
            "engine_version": engine_version,
            "fingerprint": fingerprint(plain),
            "identity": plain,
            "command": dict(command),
            "run_seed": run_seed,
            "started": _now(),
            "resumed": [],
            "finished": None,
            "counts": None,
            "speculation": None,
            "exit": None,
        }
        self._write()

    def resume(self, record: Mapping[str, object], *, engine_version: str, command: Mapping[str, object]) -> None:
        """Write that the run of `record` (from `read`) goes on.

        *Raises*: OutputError.
        """
        resumed = record.get("resumed")
        self._record = {
            **record,
            "engine_version": engine_version,
            "command": dict(command),
            "resumed": [*(resumed if isinstance(resumed, list) else []), _now()],
            "finished": None,
            "counts": None,
            "speculation": None,
            "exit": None,
        }
        self._write()

    def finish(
        self,
        *,
        counts: Mapping[str, int],
        exit_code: int,
        reason: str,
        speculation: Mapping[str, int | float] | None = None,
    ) -> None:
        """Write how the run ended. `counts`: rows by outcome, over all parts of a resumed run. `speculation`: how many drafts
        were accepted, in this part; None without speculation.

        *Raises*: OutputError.
        """
        self._record |= {"finished": _now(), "counts": dict(counts), "exit": {"code": exit_code, "reason": reason}}
        self._record["speculation"] = None if speculation is None else dict(speculation)
        self._write()

    def _write(self) -> None:
        text = json.dumps(self._record, indent=2, allow_nan=False, ensure_ascii=True)
        write_atomically(self.path, text.encode("ascii") + b"\n")


def fingerprint(value: Mapping[str, object]) -> str:
    """SHA-256 (hex) of JSON data, the same for any order of keys."""
    text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def input_identity(path: Path | str) -> dict[str, object]:
    """Size in bytes and SHA-256 of a whole input file (about a second per GB), held a megabyte at a time.

    *Raises*: UsageError when it cannot be read.
    """
    digest, num_bytes = hashlib.sha256(), 0
    try:
        with Path(path).open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
                num_bytes += len(piece)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the input file {path}: {getattr(error, 'strerror', None) or error}") from None
    return {"bytes": num_bytes, "sha256": digest.hexdigest()}


def differences(then: Mapping[str, object], now: RunIdentity) -> list[str]:
    """What differs, as `section.key: then … , now …`, for a stored identity and a new one."""
    found = []
    for section, values in now.plain().items():
        old = then.get(section)
        old = old if isinstance(old, dict) else {}
        for key in sorted(old.keys() | values.keys()):
            if old.get(key) != values.get(key) or (key in old) != (key in values):
                found.append(f"{section}.{key} (then {_short(old, key)}, now {_short(values, key)})")
    return found


def check_same_run(record: Mapping[str, object], now: RunIdentity, output: Path | str) -> None:
    """Refuse to continue `output` under another model, input, sampling or setting.

    *Raises*: UsageError naming what differs.
    """
    found = differences(record["identity"], now)
    if found:
        more = f" and {len(found) - _SHOWN_DIFFERENCES} more" if len(found) > _SHOWN_DIFFERENCES else ""
        what = ", ".join(found[:_SHOWN_DIFFERENCES]) + more
        remedy = "repeat the first run's settings, or use --overwrite to start anew"
        raise UsageError(f"cannot resume {output}: another run made it, with other {what}; {remedy}")


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step: after a crash it holds the old bytes or the new ones.

    *Raises*: OutputError.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        replace_durably(temporary, path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            temporary.unlink()  # on a full disk it would take the room that --resume needs
        raise OutputError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def replace_durably(temporary: Path, path: Path) -> None:
    """Rename `temporary` over `path` and bring the folder's entry to the disk."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _short(values: Mapping[str, object], key: str) -> str:
    if key not in values:
        return "not given"
    text = json.dumps(values[key], ensure_ascii=True)
    return text if len(text) <= 40 else text[:37] + "..."


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
