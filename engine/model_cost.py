"""Predict TPOT and TTFT of a Qwen2.5 model without a GPU: `python -m engine.model_cost --model qwen2.5-72b --tp 2,4,8`.

Not a measurement. Bytes and operations are counted by the engine's own shard plan; rates and latencies are named constants with a
source each, and what rests on a guess is marked. `--check` holds the predictions against the measured records.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from engine.bench.load import Case
from engine.bench.records import commit
from engine.cost.all_reduce import AllReduceTable
from engine.cost.check import LIMIT, compare, load_measured
from engine.cost.estimate import Estimate, table
from engine.cost.gpus import GPUS, H200
from launch.errors import DoorbellError, UsageError

EXIT_OFF = 1  # a prediction is too far from its measurement


class Listed(click.ParamType):
    """Values with commas between them, each read by `read`; `allowed` for the refusal."""

    name = "list"

    def __init__(self, read: Callable[[str], Any], allowed: str):
        self._read, self._allowed = read, allowed

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        try:
            return tuple(self._read(word.strip()) for word in value.split(",")) if isinstance(value, str) else value
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not {self._allowed}, or several with commas between them", param, ctx)


def _count(word: str) -> int:
    count = int(word)
    if count < 1:
        raise ValueError
    return count


def _dtype(word: str) -> str:
    return {"bf16": "bf16", "fp8": "fp8"}[word]


def sweep(
    models: tuple[str, ...], tps: tuple[int, ...], dtypes: tuple[str, ...], batches: tuple[int, ...], contexts: tuple[int, ...],
    gpus: tuple[str, ...], output: int, results: Path,
) -> list[Estimate]:  # fmt: skip
    """Every combination, GPUs outermost. `results`: the folder of the records. *Raises* `DoorbellError`."""
    all_reduce = AllReduceTable.load(results / "all_reduce.jsonl") if max(tps) > 1 else None
    return [
        Estimate.of(Case(Path(model).name, tp, 1, dtype, batch, context, output), model, GPUS[gpu], all_reduce)
        for gpu, model, tp, dtype, batch, context in itertools.product(gpus, models, tps, dtypes, batches, contexts)
    ]


def check(results: Path) -> bool:
    """Print every measured record in `results` beside its prediction. Whether none is off. *Raises* `DoorbellError`."""
    records = load_measured(results)
    if not records:
        click.echo(f"{results} holds no measured decode or prefill record, so there is nothing to check the model against")
        return True
    comparisons = compare(records, AllReduceTable.load(results / "all_reduce.jsonl"))
    click.echo("\n".join(comparison.line for comparison in comparisons))
    num_off = sum(comparison.is_off for comparison in comparisons)
    num_compared = sum(comparison.predicted_ms is not None for comparison in comparisons)
    click.echo(f"{num_off} of {num_compared} predictions are off by more than {100 * LIMIT:.0f} %; {len(records)} records read")
    return num_off == 0


@click.command()
@click.option("--model", "models", default="qwen2.5-7b", show_default=True, type=Listed(str, "a shape"),
              help="Shapes, qwen2.5-0.5b to qwen2.5-72b, or model folders.")  # fmt: skip
@click.option("--tp", "tps", default="1", show_default=True, type=Listed(_count, "a number of ranks"), help="Ranks, a GPU each.")
@click.option("--dtype", "dtypes", default="bf16", show_default=True, type=Listed(_dtype, "bf16 or fp8"), help="bf16, fp8.")
@click.option("--batch", "batches", default="1", show_default=True, type=Listed(_count, "a number of rows"), help="Rows at once.")
@click.option("--context", "contexts", default="512", show_default=True, type=Listed(_count, "a number of tokens"),
              help="Tokens of a prompt.")  # fmt: skip
@click.option("--output", default=129, show_default=True, type=click.IntRange(2), help="Tokens of an answer.")
@click.option("--gpu", "gpus", default=H200, show_default=True,
              type=Listed(lambda word: GPUS[word.upper()].name, f"one of {', '.join(GPUS)}"), help=", ".join(GPUS))  # fmt: skip
@click.option("--results", default="results", show_default=True, type=click.Path(path_type=Path), help="Folder of the records.")
@click.option("--json", "is_json", is_flag=True, help="One JSON document instead of the table.")
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append projected records to.")
@click.option("--check", "is_check", is_flag=True, help="Compare with the measured records; exit code 1 if one is off.")
def main(
    models: tuple[str, ...], tps: tuple[int, ...], dtypes: tuple[str, ...], batches: tuple[int, ...], contexts: tuple[int, ...],
    output: int, gpus: tuple[str, ...], results: Path, is_json: bool, record: Path | None, is_check: bool,
) -> None:  # fmt: skip
    """Predict TPOT and TTFT. Several values with commas make a sweep."""
    commit()
    try:
        if is_check and (is_json or record is not None):
            raise UsageError("--check prints comparisons; it does not go with --json or --record")
        if is_check:
            sys.exit(0 if check(results) else EXIT_OFF)
        estimates = sweep(models, tps, dtypes, batches, contexts, gpus, output, results)
        if record is not None:
            for estimate in estimates:
                device = f"{estimate.case.tp} x NVIDIA {estimate.gpu.device} (projected)"
                for made in estimate.records():
                    made.append_to(record, device, "engine.model_cost")
    except DoorbellError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(json.dumps([estimate.as_json() for estimate in estimates], indent=1) if is_json else "\n".join(table(estimates)))


if __name__ == "__main__":
    main()
