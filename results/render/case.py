"""The case of a record as text: which keys tell records apart, how values are written and in which order they stand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from results.render.metric import words


def show(key: str, value: object) -> str:
    """A value for a table; sizes in KB and MB of 1024."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " to ".join(str(item) for item in value)
    if key == "bytes" and isinstance(value, int):
        for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
        return f"{value} B"
    return str(value)


def natural(value: object) -> tuple[object, ...]:
    """An order in which 7b comes before 72b, and 8192 before 16384."""
    return tuple(float(part) if part[:1].isdigit() else part for part in re.split(r"(\d+(?:\.\d+)?)", str(value)))


def order(keys: Iterable[str], case: Mapping[str, object]) -> list[tuple[object, ...]]:
    return [natural(case.get(key, "")) for key in keys]


def split_keys(cases: Sequence[Mapping[str, object]]) -> tuple[list[str], list[str]]:
    """The keys that all of `cases` share with one value, and those in which they differ, in the order of appearance."""
    keys = list(dict.fromkeys(key for case in cases for key in case))
    alike = [key for key in keys if all(key in case and case[key] == cases[0][key] for case in cases)]
    return alike, [key for key in keys if key not in alike]


def describe(keys: Iterable[str], case: Mapping[str, object]) -> str:
    return ", ".join(f"{words(key)} {show(key, case[key])}" for key in keys if key in case)
