"""A CUDA source and every header of ours that it reaches, as the bytes that are hashed and compiled.

Not a preprocessor: the text is scanned for `#include "..."`, whatever `#if` stands around it. The compiler is given
these bytes and no folder to search, so a header that the scan missed cannot be compiled in unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import KernelBuildError

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@dataclass(frozen=True)
class SourceSet:
    """`text` of the source at `path`; `headers`: the text of each header by the name that it is included by."""

    path: Path
    text: bytes
    headers: Mapping[str, bytes]


def read_sources(source: Path, include_dirs: Iterable[Path] = ()) -> SourceSet:
    """Read `source` and, recursively, what it includes in quotes.

    A name is looked up beside the file that includes it, then in `include_dirs` in order. A name found nowhere is left
    to the compiler, which complains if the line is live. *Raises* `KernelBuildError` for a file that cannot be read,
    one name that stands for two files, and one file under two names (`#pragma once` would not see that they are one).
    """
    folders = tuple(Path(folder) for folder in include_dirs)
    files: dict[str, Path] = {}
    headers: dict[str, bytes] = {}
    text = _read(source, source)
    pending = [(source, text)]
    while pending:
        includer, body = pending.pop()
        for name in (match.decode("utf-8", "replace") for match in _INCLUDE.findall(body)):
            found = _find(name, (includer.parent, *folders))
            if found is None or files.get(name) == found:
                continue
            _refuse_ambiguity(source, name, found, files)
            files[name] = found
            headers[name] = _read(found, source)
            pending.append((found, headers[name]))
    return SourceSet(source, text, headers)


def _find(name: str, folders: Iterable[Path]) -> Path | None:
    candidates = ((folder / name).resolve() for folder in folders)
    return next((path for path in candidates if path.is_file()), None)


def _refuse_ambiguity(source: Path, name: str, found: Path, files: Mapping[str, Path]) -> None:
    if name in files:
        raise KernelBuildError(f'{source}: "{name}" stands for both {files[name]} and {found}; rename one of them')
    for other, path in files.items():
        if path == found:
            raise KernelBuildError(f'{source}: {found} is included as "{other}" and as "{name}"; use one spelling')


def _read(path: Path, source: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise KernelBuildError(f"{source}: {path} cannot be read ({error.strerror})") from error
