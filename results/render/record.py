"""One line of `results/<bench>.jsonl`, read and checked. `engine/bench/records.py` writes them; nothing is corrected here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

KINDS = ("measured", "projected")
TYPES = {
    "bench": str, "case": dict, "metrics": dict, "ceiling": dict, "peer": dict, "kind": str, "checked": bool, "device": str,
    "versions": dict, "commit": str, "command": str, "date": str,
}  # fmt: skip
NAMES = {str: "a string", dict: "an object", bool: "true or false"}


class BadRecord(ValueError):
    """A line that is no record; the message is one sentence with its file and line."""


@dataclass(frozen=True)
class Record:
    """`metrics` and `ceiling` hold finite numbers with the unit in the key; `peer` holds what others reach, and a `name`."""

    bench: str
    case: Mapping[str, object]
    metrics: Mapping[str, float]
    ceiling: Mapping[str, float]
    peer: Mapping[str, object]
    kind: str
    checked: bool
    device: str
    versions: Mapping[str, str]
    commit: str
    command: str
    date: str

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """Equal for two records of one piece of work: the newer replaces the older."""
        return self.bench, self.kind, self.device, json.dumps(self.case, sort_keys=True)


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def parse_record(line: str) -> Record:
    """*Raises* ValueError with what is wrong, without the place."""
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(found, dict):
        raise ValueError("a record is a JSON object")
    for name, kind in TYPES.items():
        if name not in found:
            raise ValueError(f"{name!r} is missing")
        if not isinstance(found[name], kind):
            raise ValueError(f"{name!r} must be {NAMES[kind]}")
    if unknown := sorted(found.keys() - TYPES.keys()):
        raise ValueError(f"unknown key {unknown[0]!r}")
    for name in ("metrics", "ceiling"):
        for key, value in found[name].items():
            if not is_number(value):
                raise ValueError(f"{key!r} in {name!r} must be a finite number")
    if not found["metrics"]:
        raise ValueError("'metrics' is empty")
    if found["kind"] not in KINDS:
        raise ValueError(f"'kind' must be one of {', '.join(KINDS)}")
    try:
        date.fromisoformat(found["date"])
    except ValueError:
        raise ValueError("'date' must be year-month-day") from None
    return Record(**{field.name: found[field.name] for field in fields(Record)})


def read_records(folder: Path) -> Iterator[Record]:
    """All records of `folder/*.jsonl`, by file name and line; blank lines are passed over. *Raises* BadRecord."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                try:
                    yield parse_record(line)
                except ValueError as error:
                    raise BadRecord(f"{path}, line {number}: {error}") from None
