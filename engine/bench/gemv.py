"""The products of a decode step, each kind alone, by every way that there is and by the library: us and TB/s of weights read.

Each kind has distinct weights for every launch, so that nothing is read from a cache; a graph runs through them, each product
with programmatic launch behind the one before. What is timed was compared with the twin before. One GPU.

`--choices` writes the fastest way of every shape to the table that the engine chooses by.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F

from engine.bench.records import Record, commit
from engine.shapes import SHAPES, named_config
from engine.shard_plan import ShardPlan
from kernels.build import Build, default_cache_folder
from kernels.gemv import Gemv, gemv_twin, load_gemv
from kernels.gemv_choice import LIBRARY, ROW_BUCKETS, WAYS, Pace, Product
from kernels.quantize import Fp8Weight
from kernels.silu_mul import launch_silu_mul, load_silu_mul

POOL_BYTES, MAX_LAUNCHES = 5 << 30, 48
PEAK_TB_S = 4.59  # bulk copies from HBM, one kernel reading 16 GiB, as measured on an H200
TOLERANCE = {2: 4e-3, 1: 6e-3}  # of a product in bf16, by bytes of a weight: rounding at 2^-9, twice for gate and up


@dataclass(frozen=True)
class Kind:
    """A product of one rank's step. `out`: of each half if it is gate and up."""

    model: str
    tp: int
    name: str
    out: int
    inner: int
    dtype: str

    def product(self, rows: int) -> Product:
        return Product(rows, self.out, self.inner, 1 if self.dtype == "fp8" else 2, self.name == "gate_up")

    @property
    def num_rows(self) -> int:
        """Of the weight."""
        return self.out * (2 if self.name == "gate_up" else 1)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.inner * (1 if self.dtype == "fp8" else 2)


def kinds_of(model: str, tp: int, dtype: str) -> Iterator[Kind]:
    """As the engine shards them. The head is never e4m3."""
    config = named_config(model)
    local, hidden = ShardPlan.make(config, tp, 0).local_sizes, config.hidden_size
    sizes = {"qkv": (local["q"] + 2 * local["kv"], hidden), "o": (hidden, local["q"]), "gate_up": (local["mlp"], hidden),
             "down": (hidden, local["mlp"]), "head": (local["vocab"], hidden)}  # fmt: skip
    for name, (out, inner) in sizes.items():
        if dtype == "bf16" or name != "head":
            yield Kind(model, tp, name, out, inner, dtype)


def us_of(bodies: list[Callable[[], object]], repeats: int) -> float:
    """us of a body, in one graph that runs them all: the median of repeats."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.stream(stream):
        for body in bodies[:2]:
            body()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for body in bodies:
                body()
        for _ in range(repeats + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(bodies))
    return statistics.median(times[1:])


class Bench:
    """Times products on the current GPU; one shape once, whatever models have it."""

    def __init__(self, repeats: int, pace: Pace):
        build = Build(default_cache_folder())
        kernels, num_sms = load_gemv(build), torch.cuda.get_device_properties(0).multi_processor_count
        self._gemvs = {name: Gemv(kernels, num_sms, ways=(name,), pace=pace) for name in WAYS}
        self._silu_mul = load_silu_mul(build, torch.bfloat16)
        self._repeats = repeats
        self._pool = (torch.randn(POOL_BYTES // 2, device="cuda") * 0.02).bfloat16()
        self._fp8_pool = self._pool.float().mul_(1e3).to(torch.float8_e4m3fn)  # bytes as they come would hold NaN
        self._times: dict[Product, dict[str, float]] = {}

    def times(self, kind: Kind, rows: int) -> dict[str, float]:
        """us of a product by way; the library's only where it can."""
        product = kind.product(rows)
        if product not in self._times:
            self._times[product] = dict(self._measure(product, kind.num_bytes))
        return self._times[product]

    def _measure(self, product: Product, num_bytes: int) -> Iterator[tuple[str, float]]:
        count = max(2, min(MAX_LAUNCHES, POOL_BYTES // 2 * product.elem_bytes // num_bytes))
        weights = self._weights(product, num_bytes, count)
        x = torch.randn(product.rows, product.inner, device="cuda").bfloat16()
        wanted = gemv_twin(x, weights[0], None, product.is_gate_up).float()
        for name, gemv in self._gemvs.items():
            if gemv.takes(x, weights[0], product.is_gate_up):
                run = gemv.gate_up if product.is_gate_up else gemv.linear
                target = run(x, weights[0])
                _check(target if product.is_gate_up else target.sum(0), wanted, product, name)
                yield name, us_of([partial(run, x, weight, None, target) for weight in weights], self._repeats)
        if product.elem_bytes == 2:
            yield LIBRARY, us_of([partial(self._library, x, weight, product.is_gate_up) for weight in weights], self._repeats)

    def _weights(self, product: Product, num_bytes: int, count: int) -> list[Any]:
        shape = (count, product.out * (2 if product.is_gate_up else 1), product.inner)
        if product.elem_bytes == 2:
            return list(self._pool[: count * num_bytes // 2].view(shape))
        scale = torch.full((shape[1],), 1e-4, device="cuda")
        return [Fp8Weight(matrix, scale) for matrix in self._fp8_pool[: count * num_bytes].view(shape)]

    def _library(self, x: torch.Tensor, weight: torch.Tensor, is_gate_up: bool) -> torch.Tensor:
        product = F.linear(x, weight)
        if not is_gate_up:
            return product
        return launch_silu_mul(self._silu_mul, product, product.new_empty(product.shape[0], product.shape[1] // 2))


def _check(found: torch.Tensor, wanted: torch.Tensor, product: Product, name: str) -> None:
    error = float((found.float() - wanted).norm() / wanted.norm())
    if not error < TOLERANCE[product.elem_bytes]:  # NaN as well
        sys.exit(f"{name} is wrong for {product}: off by {error:.2g} of the result")


def make_record(kind: Kind, rows: int, times: dict[str, float], peer_us: float | None) -> Record:
    """The fastest way, with all others beside it. `peer_us`: of the library with the same weight in bf16."""
    way = min(times, key=times.get)
    case = {"model": kind.model, "tp": kind.tp, "product": kind.name, "out": kind.out, "in": kind.inner, "rows": rows,
            "dtype": kind.dtype, "way": way}  # fmt: skip
    metrics = {"product_us": times[way], "hbm_tb_s": kind.num_bytes / times[way] / 1e6}
    ceiling = {"product_us": kind.num_bytes / PEAK_TB_S / 1e6, "hbm_tb_s": PEAK_TB_S}
    peer = {"name": "cuBLAS in bf16", "product_us": round(peer_us, 4)} if peer_us else {}
    return Record("product", case, metrics, ceiling, peer, True)


def describe(kind: Kind, rows: int, times: dict[str, float]) -> str:
    best = min(times, key=times.get)
    return f"{kind.model:12} tp{kind.tp} {kind.name:8}{kind.out:7d} x {kind.inner:5d} {kind.dtype:4} {rows:2d} rows" + "".join(
        f"  {'*' if name == best else ''}{name} {us:.2f} ({kind.num_bytes / us / 1e6:.2f})" for name, us in times.items()
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@click.command()
@click.option("--models", default=",".join(SHAPES), show_default=True, help="Of the built-in shapes.")
@click.option("--tps", default="1,2,4,8", show_default=True)
@click.option("--rows", default=",".join(map(str, ROW_BUCKETS)), show_default=True)
@click.option("--dtypes", default="bf16,fp8", show_default=True)
@click.option("--repeats", default=5, show_default=True)
@click.option("--in-flight-kib", default=Pace().later, show_default=True, help="Of weights at once, for each SM.")
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
@click.option("--record-rows", default="1,8,16", show_default=True, help="Numbers of rows that are recorded.")
@click.option("--choices", type=click.Path(path_type=Path), help="JSON file to write the fastest way of every shape to.")
def main(
    models: str, tps: str, rows: str, dtypes: str, repeats: int, in_flight_kib: int, record: Path | None, record_rows: str,
    choices: Path | None,
) -> None:  # fmt: skip
    """Time the products of decode steps."""
    commit()
    torch.zeros(1, device="cuda")  # kernels are loaded in a context that is there
    bench, device = Bench(repeats, Pace(in_flight_kib, in_flight_kib)), torch.cuda.get_device_name()
    table: dict[str, str] = {}
    for model in models.split(","):
        for tp in _numbers(tps):
            for dtype in dtypes.split(","):
                for kind in kinds_of(model, tp, dtype):
                    for count in _numbers(rows):
                        times = bench.times(kind, count)
                        if not times:
                            continue
                        print(describe(kind, count, times), flush=True)
                        table[kind.product(count).key] = min(times, key=times.get)
                        if record is not None and count in _numbers(record_rows):
                            plain = Kind(kind.model, kind.tp, kind.name, kind.out, kind.inner, "bf16")
                            peer_us = bench.times(plain, count).get(LIBRARY)
                            make_record(kind, count, times, peer_us).append_to(record, device, "engine.bench.gemv")
    if choices is not None:
        choices.write_text(json.dumps({"device": device, "commit": commit(), "ways": table}, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
