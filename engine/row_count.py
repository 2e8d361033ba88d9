"""What can be known of an input before its rows are read: whether it can be read twice, and how many rows it has."""

from __future__ import annotations

import codecs
import stat
from pathlib import Path


def count_rows(path: str) -> int | None:
    """Lines of `path` that are not blank; None for what can be read only once. A pass over the bytes, without parsing."""
    if is_read_once(path):
        return None
    with Path(path).open("rb") as file:
        return sum(1 for line in file if line.removeprefix(codecs.BOM_UTF8).strip())


def is_read_once(path: str) -> bool:
    """Whether `path` is standard input, a pipe (`<(zcat ...)` in a shell) or a device: whoever reads it takes its rows.

    False for a file that does not exist.
    """
    try:
        return path == "-" or not (stat.S_ISREG(mode := Path(path).stat().st_mode) or stat.S_ISDIR(mode))
    except (OSError, ValueError):
        return False
