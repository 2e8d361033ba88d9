"""The ways and paces of the products of a decode step, chosen in the step itself: what `engine.bench.gemv` measures in chains of
equal products, refined where it matters.

In a step a product begins while another kernel ends, so the fastest of a chain is not always the fastest here. One product after
the other takes every way it can, then its way at several paces; the step is captured and timed with each, and the best stays. A
round in which anything changed is followed by another, since what is best for one depends on the others. One process: a shard is
measured without its peers (`--shard-of`), whose sums are local kernels.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from engine.api import Engine
from engine.bench.load import Case, engine_options, errors_in_one_line, make_prompts, open_engine, run_once
from engine.bench.records import commit
from engine.graph.decode_step import decode_step
from kernels.gemv import Gemv
from kernels.gemv_choice import LIBRARY, WAYS, Pace, Product, measured_pace

REPLAYS, REPEATS, MOST_ROUNDS = 5, 3, 2
LEAST_GAIN = 0.002  # of the step: less is noise
OUTPUT = 9
FIRST_KIB, LATER_KIB = (16, 32, 40, 48, 64, 96), (48, 64, 96, 128)
PACES = tuple(Pace(first, later) for first in FIRST_KIB for later in LATER_KIB if first <= later)
PARTS = ("ways", "paces")
UNPACED = (LIBRARY, "tiles")


class StepTimer:
    """The decode step of the rows that an engine has just answered."""

    def __init__(self, engine: Engine, batch: int, prompt: int):
        backend = engine.replica.burst_backend
        self._operators, self._state, self._batch, self._prompt = backend._operators, backend.state, batch, prompt
        self.gemv: Gemv = backend._operators._gemv

    @torch.inference_mode()
    def ms(self) -> float:
        """Of a step, captured as the products are chosen now: the median of repeats."""
        rows, stream, graph = self._state.rows(self._batch), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            decode_step(self._operators, rows)
            with torch.cuda.graph(graph, stream=stream):
                decode_step(self._operators, rows)
            times = []
            for _ in range(REPEATS + 1):
                rows.positions.fill_(self._prompt)  # each step goes one further, and no row has pages for all of them
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                for _ in range(REPLAYS):
                    graph.replay()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / REPLAYS)
        return statistics.median(times[1:])


@dataclass(frozen=True)
class Chosen:
    """How a product is made."""

    way: str
    pace: Pace

    def __str__(self) -> str:
        return f"{self.way:12} {self.pace.first:3d} {self.pace.later:3d}"


def refine(timer: StepTimer, batch: int, parts: tuple[str, ...] = PARTS) -> dict[Product, Chosen]:
    """The best way and pace of every product of the step, found from those it has. `parts`: of `PARTS`, what is tried."""
    gemv = timer.gemv
    click.echo(f"  as chosen before     {timer.ms():.4f} ms")
    chosen = {product: Chosen(gemv.way_of(product), measured_pace(product)) for product in gemv.products if product.rows == batch}
    for _ in range(MOST_ROUNDS):
        before = dict(chosen)
        for product in chosen:
            best = timer.ms()  # once more: a GPU that has become warm is slower
            tried = {gemv.plan_of(product)}  # several paces may come to the same
            for part in parts:
                for other in _others(product, chosen[product], part):
                    if not gemv.choose(product, other.way, other.pace) or gemv.plan_of(product) in tried:
                        continue
                    tried.add(gemv.plan_of(product))
                    ms = timer.ms()
                    click.echo(f"    {product.key:26} {other} {ms:.4f}")
                    if ms < best * (1 - LEAST_GAIN):
                        best, chosen[product] = ms, other
            gemv.choose(product, chosen[product].way, chosen[product].pace)
        if chosen == before:
            break
    click.echo(f"  as chosen here       {timer.ms():.4f} ms")
    return chosen


def _others(product: Product, own: Chosen, part: str) -> list[Chosen]:
    """What may be tried in place of `own`. Not a library for an e4m3 matrix, which it would widen at every step."""
    if part == "ways":
        names = (*WAYS, LIBRARY) if product.elem_bytes > 1 else WAYS
        return [Chosen(name, own.pace) for name in names if name != own.way]
    return [] if own.way in UNPACED else [Chosen(own.way, pace) for pace in PACES if pace != own.pace]


@click.command()
@engine_options
@click.option("--batch", type=click.IntRange(1, 16), default=1, show_default=True, help="Rows of the step.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a row.")
@click.option("--part", "parts", type=click.Choice(PARTS), multiple=True, default=PARTS, show_default=True, help="What is tried.")
@click.option("--choices", type=click.Path(path_type=Path, exists=True), help="JSON file in which they are put right.")
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, batch: int, prompt: int,
    parts: tuple[str, ...], choices: Path | None,
) -> None:  # fmt: skip
    """Choose the ways and paces of one step's products. Keeps no record: `engine.bench.decode` times what comes of it."""
    if eager or device != "cuda" or record is not None:
        raise click.UsageError("a captured step on a GPU is what is measured here, and no record is kept")
    case = Case.here(model, device, dtype, batch, prompt, OUTPUT, shard_of)
    with errors_in_one_line(), open_engine(case, model, device, shard_of) as engine:
        run_once(engine, make_prompts(case, engine.blueprint.config.full_vocab), [OUTPUT] * batch)
        click.echo(f"{case.model} {dtype}, TP={case.tp}, {batch} rows")
        chosen = refine(StepTimer(engine, batch, prompt), batch, parts)
    if choices is not None:
        table = json.loads(choices.read_text())
        table["ways"] |= {product.key: own.way for product, own in chosen.items()}
        paces = {product.key: [own.pace.first, own.pace.later] for product, own in chosen.items()}
        table["paces"] = {key: pace for key, pace in (table.get("paces", {}) | paces).items() if Pace(*pace) != Pace()}
        table["refined"] = sorted({*table.get("refined", ()), f"{case.model} {dtype} tp{case.tp} {batch}"})
        table["commit"] = commit()
        choices.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
