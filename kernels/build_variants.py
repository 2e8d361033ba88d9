"""Which cubins there are: every `.cu` under some folders, in the variants that the table beside it names.

The table `<stem>.variants.json` (absent: one variant, no macros):

    {"include_dirs": ["../../kernels/cuda"],
     "options": ["--use_fast_math"],
     "variants": [{"WORLD": [2, 4, 8], "DTYPE": ["bf16", "fp16"]}, {"WORLD": 1, "DTYPE": "bf16"}],
     "spills_allowed": true}

Each row of `variants` maps macros to a value or to a list of values, and stands for every combination. Folders are
relative to the table.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.build import DEFAULT_ARCH, Build, Defines
from kernels.build_cache import Built
from launch.errors import KernelBuildError

_KEYS = {"include_dirs", "options", "variants", "spills_allowed"}


@dataclass(frozen=True)
class Variant:
    """One cubin to be: the arguments of `Build.cubin`, and whether its kernels may spill registers."""

    source: Path
    include_dirs: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
    defines: tuple[tuple[str, str | int], ...] = ()
    is_spilling_allowed: bool = False

    @property
    def label(self) -> str:
        """The macros, for people and file names; empty without macros."""
        return ",".join(f"{name}={value}" for name, value in self.defines)

    def built_by(self, build: Build, arch: str = DEFAULT_ARCH) -> Built:
        """Its cubin and log. *Raises* `KernelBuildError`."""
        return build.built(self.source, self.include_dirs, dict(self.defines), arch, self.options)


def find_variants(roots: Iterable[Path]) -> list[Variant]:
    """The variants of every `.cu` under `roots`, by path. *Raises* `KernelBuildError` for a table that is not one."""
    tables = {path for root in roots for path in root.rglob("*.variants.json")}
    sources = sorted(path for root in roots for path in root.rglob("*.cu"))
    for table in sorted(tables - {_table_of(source) for source in sources}):
        raise KernelBuildError(f"{table} has no source beside it; rename or remove it")
    return [variant for source in sources for variant in variants_of(source)]


def variants_of(source: Path) -> list[Variant]:
    """The variants of one source, in the order of its table. *Raises* `KernelBuildError` for a table that is not one."""
    path = _table_of(source)
    if not path.exists():
        return [Variant(source)]
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return list(_rows(source, table))
    except (OSError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise KernelBuildError(f"{path} is not a table of variants: {error}") from error


def variant_of(source: Path, defines: Defines) -> Variant:
    """The variant of `source` with exactly these macros, in any order: what a launcher asks for at run time.

    Going through the table keeps `make kernels` honest: nothing is launched that it does not compile. *Raises*
    `KernelBuildError` when the table has no such row.
    """
    wanted = {name: str(value) for name, value in defines.items()}
    for variant in variants_of(source):
        if {name: str(value) for name, value in variant.defines} == wanted:
            return variant
    label = ",".join(f"{name}={value}" for name, value in wanted.items()) or "no macros"
    raise KernelBuildError(f"{_table_of(source)} has no variant {label}; add it, so that it is compiled ahead as well")


def _table_of(source: Path) -> Path:
    return source.with_suffix(".variants.json")


def _rows(source: Path, table: Any) -> Iterator[Variant]:
    if not isinstance(table, dict) or set(table) - _KEYS:
        raise ValueError(f"expected an object with the keys {', '.join(sorted(_KEYS))}")
    include_dirs = tuple(source.parent / folder for folder in _texts(table, "include_dirs"))
    options = tuple(_texts(table, "options"))
    is_spilling_allowed = table.get("spills_allowed", False)
    if not isinstance(is_spilling_allowed, bool):
        raise ValueError("spills_allowed must be true or false")
    rows = table.get("variants", [{}])
    if not isinstance(rows, list) or not rows:
        raise ValueError("variants must be a list of at least one row")
    for row in rows:
        for defines in _combinations(row):
            yield Variant(source, include_dirs, options, defines, is_spilling_allowed)


def _texts(table: Mapping[str, Any], key: str) -> list[str]:
    texts = table.get(key, [])
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{key} must be a list of strings")
    return texts


def _combinations(row: Any) -> Iterator[tuple[tuple[str, str | int], ...]]:
    if not isinstance(row, dict):
        raise ValueError(f"a row of variants must map macros to values, not be {row!r}")
    choices = [value if isinstance(value, list) else [value] for value in row.values()]
    for value in itertools.chain(*choices):
        if not isinstance(value, (str, int)):
            raise ValueError(f"a macro's value must be a string or a whole number, not {value!r}")
    for values in itertools.product(*choices):
        yield tuple(zip(row, values))
