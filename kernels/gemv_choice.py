"""Which way a product is made, and at what pace: by a measured table where the shape is in it, else by what measurements suggest.

`gemv_choices.json` is made from a run: `python -m engine.bench.gemv --choices kernels/gemv_choices.json`. Its keys are those of
`Product.key`, its values names of `WAYS`, or `LIBRARY`. Those of the steps in `refined` were put right by what
`engine.bench.step_products` timed in the step itself, and so was all of `paces`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "gemv_choices.json"
LIBRARY = "library"  # cuBLAS through torch
ROW_BUCKETS = (1, 2, 4, 8, 16)  # a number of rows counts as the next of these


@dataclass(frozen=True)
class Way:
    """A kernel, how many of its CTAs an SM holds, and the dynamic shared memory of each.

    Of one product, 200 KiB an SM keep memory busy, in one CTA or in two: with half of that it is read at 9/10 of its rate. Of two
    CTAs, the next kernel's can take the first's place while the second is at work.
    """

    kernel: str
    ctas_per_sm: int
    shared_bytes: int
    groups: int = 2  # warpgroups of `gemv_groups`


@dataclass(frozen=True)
class Pace:
    """KiB of weights that are asked for at once, for each SM: `first` until the ring is full for the first time, when small
    kernels may still run before the product, and `later` behind that."""

    first: int = 64  # an H200 brings 34 KB an SM in a us, and takes about one to answer
    later: int = 64


WAYS = {
    "rows": Way("rows", 1, 200 << 10),
    "rows2": Way("rows", 2, 112 << 10),
    "half_rows": Way("rows", 1, 112 << 10),
    "groups": Way("groups", 1, 200 << 10),
    "groups2": Way("groups", 2, 103 << 10),  # beside 9 KiB static
    "half_groups": Way("groups", 1, 103 << 10),
    "groups4": Way("groups", 1, 192 << 10, 4),  # beside 17 KiB static
    "tiles": Way("tiles", 1, 192 << 10),
}


@dataclass(frozen=True)
class Product:
    """`rows` of x `[rows, inner]` with a weight `[out, inner]`, `[2 * out, inner]` for gate and up."""

    rows: int
    out: int
    inner: int
    elem_bytes: int
    is_gate_up: bool

    @property
    def key(self) -> str | None:
        bucket = next((bucket for bucket in ROW_BUCKETS if bucket >= self.rows), None)
        if bucket is None:
            return None
        dtype, halves = "fp8" if self.elem_bytes == 1 else "bf16", "2x" if self.is_gate_up else ""
        return f"{dtype} {bucket} {halves}{self.out}x{self.inner}"


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text())


def measured_way(product: Product) -> str | None:
    """The fastest way for this shape, or None if it was not measured."""
    return _table()["ways"].get(product.key)


def measured_pace(product: Product) -> Pace:
    """That at which a step with this shape was fastest; the usual one if that was not measured."""
    return Pace(*_table().get("paces", {}).get(product.key, ()))


def likely_ways(product: Product) -> tuple[str, ...]:
    """The ways to try for a shape that was not measured, the likeliest first."""
    if product.elem_bytes == 2:
        return ("rows", "groups", "tiles") if product.rows <= 2 else ("tiles", "groups")
    # e4m3: `gemv_groups` has no conversions, but it wants many rows a CTA.
    is_wide = product.out * (2 if product.is_gate_up else 1) >= 48 * 132
    return ("groups", "rows", "tiles") if is_wide else ("rows", "groups", "tiles")
