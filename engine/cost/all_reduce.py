"""What an all-reduce takes, from the measured records: by bytes for 2 ranks, and by the shape of 8 ranks for more."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from engine.cost.constants import Constant, Values
from engine.cost.gpus import GPUS, H200, Gpu
from launch.errors import UsageError

# What a sum does besides, and the algorithms of it; all others of ours sum alone, and the fastest of them counts.
PLAIN, NORM, ROWS_NORM = "alone", "with a norm", "of many rows with a norm"
KINDS = {"all_reduce_lamport_norm": NORM, "all_reduce_two_shot_norm": ROWS_NORM}
PAIR, OCTET = (2, 1), (8, 4)  # ranks and ranks a GPU of the two kinds of records
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class AllReduceTable:
    """(bytes, us) by rising bytes, bf16 on H200s: by kind, then by (ranks, ranks a GPU). Kinds: `PLAIN`; `NORM`, with residual
    and norm; `ROWS_NORM`, the same by the algorithm for many rows, which may have no records yet.

    Eight ranks were measured on two GPUs under MPS, where they share SMs and links.
    """

    curves: Mapping[str, Mapping[tuple[int, int], Curve]]

    @classmethod
    def load(cls, path: Path) -> AllReduceTable:
        """*Raises* `UsageError` where `path` cannot be read or lacks records of 2 or of 8 ranks, alone or with a norm."""
        try:
            records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise UsageError(f"the times of all-reduces cannot be read from {path}: {error}") from None
        curves: dict[str, dict[tuple[int, int], Curve]] = {PLAIN: {}, NORM: {}, ROWS_NORM: {}}
        for world in (PAIR, OCTET):
            newest = _newest(records, world)
            for kind, of_kind in curves.items():
                curve = _curve((size, us) for (name, size), us in newest.items() if KINDS.get(name, PLAIN) == kind)
                if curve:
                    of_kind[world] = curve
                elif kind != ROWS_NORM:
                    what = f"bf16 all-reduce {kind} of {world[0]} ranks, {world[1]} a GPU"
                    raise UsageError(f"{path} has no {what}; `make bench-comm TP={world[0]}` adds it")
        return cls(curves)

    def has(self, kind: str, size: int) -> bool:
        """Whether `us` has records to go by: of 2 ranks, and for more ranks of 8 as well."""
        return PAIR in self.curves[kind] and (size == PAIR[0] or OCTET in self.curves[kind])

    def us(self, num_bytes: int, size: int, kind: str) -> float:
        """us a call of `num_bytes` among `size` ranks, 2 or more, on H200s with NVLink. `kind`: one that the table `has`.

        Between and beyond 2 and 8 ranks: in proportion to the logarithm of the number.
        """
        curves = self.curves[kind]
        two = _at(curves[PAIR], num_bytes)
        if size == PAIR[0]:
            return two
        last = curves[OCTET][-1][0]
        eight = _at(curves[OCTET], min(num_bytes, last))
        if num_bytes > last:  # a two-shot of n ranks moves 2 (n - 1) / n of the bytes: 1 of 2 ranks, 1.75 of 8
            eight += 1.75 * (two - _at(curves[PAIR], last))
        return two + max(0.0, eight - two) * (log2(size) - 1) / 2

    def use(self, values: Values, gpu: Gpu, num_bytes: int, size: int, kind: str) -> float:
        """us a call on `gpu`; what it rests on is noted in `values`.

        The smallest message is taken to be latency, what larger ones take beyond it to be the link's.
        """
        latency = self.us(0, size, kind)
        us = latency + (self.us(num_bytes, size, kind) - latency) * GPUS[H200].link_gb_s / gpu.link_gb_s + gpu.link_extra_us
        source = "results/all_reduce.jsonl, 2 ranks on two H200"
        if size != 2:
            source += f", and its 8 ranks on two H200 under MPS as the shape for {size}"
        if not gpu.is_measured:
            source += f"; by the links' datasheets on {gpu.name}"
        what = {PLAIN: "", NORM: "_norm", ROWS_NORM: "_rows_norm"}[kind]
        name = f"all_reduce{what}_{size}_ranks_{num_bytes}_bytes_us"
        return values.take(name, Constant(us, "us a call", source, gpu.is_measured and size == 2))


def _newest(records: Iterable[Mapping[str, Any]], world: tuple[int, int]) -> dict[tuple[str, int], float]:
    """us by (algorithm, bytes) of our own algorithms; a later record replaces an earlier one."""
    found = {}
    for record in records:
        case = record["case"]
        is_wanted = (case["world"], case["ranks_per_gpu"], case["dtype"], case["heap"]) == (*world, "bf16", "ipc")
        if is_wanted and record["kind"] == "measured" and record["checked"] and case["algorithm"].startswith("all_reduce_"):
            found[case["algorithm"], case["bytes"]] = record["metrics"]["all_reduce_us"]
    return found


def _curve(points: Iterable[tuple[int, float]]) -> Curve:
    """The fastest at each size; a larger message is never taken to be faster than a smaller one."""
    fastest: dict[int, float] = {}
    for size, us in points:
        fastest[size] = min(us, fastest.get(size, us))
    curve, so_far = [], 0.0
    for size in sorted(fastest):
        so_far = max(so_far, fastest[size])
        curve.append((size, so_far))
    return tuple(curve)


def _at(curve: Curve, num_bytes: int) -> float:
    """Between two measured sizes on the line through them; below the first as the first; above the last on the last line."""
    if num_bytes <= curve[0][0] or len(curve) == 1:
        return curve[0][1]
    idx = next((idx for idx in range(1, len(curve)) if num_bytes <= curve[idx][0]), len(curve) - 1)
    (low, low_us), (high, high_us) = curve[idx - 1], curve[idx]
    return low_us + (high_us - low_us) * (num_bytes - low) / (high - low)
