"""What the bench of ways starts for each way: load a model that reduces and steps in this way, and measure it.

Rank 0 prints one JSON line. Not a bench of its own: start `engine.bench.ways`.
"""

from __future__ import annotations

import json

import click

from comm.choice_table import FORCED
from engine.api import Engine
from engine.bench import decode, prefill
from engine.bench.load import DTYPES, MAX_BATCH, Case, device_name, errors_in_one_line, make_prompts, open_engine, run_once
from engine.bench.roof import Reads
from launch.comm_policy import NAMES
from launch.environment import Environment
from launch.errors import CommUnavailable

STEPS = ("eager", "graph")
METRICS = (
    "ttft_ms", "tpot_ms", "host_syncs_per_request", "host_syncs_per_token", "torch_syncs_per_token", "host_copies_per_token",
)  # fmt: skip


def try_way(case: Case, model: str, device: str, steps: str, repeats: int, **settings: object) -> dict:
    """The numbers of `measure`, or `absent` with the reason where there is no such way here. *Collective*."""
    try:
        engine = open_engine(case, model, device, is_eager=steps == "eager", **settings)
    except CommUnavailable as error:
        return {"absent": str(error)}
    with engine:
        if engine.backend != steps:
            return {"absent": f"its steps are not captured: {engine.replica.why_single}"}
        return measure(engine, case, repeats)


def measure(engine: Engine, case: Case, repeats: int) -> dict:
    """What the benches of prefill and decode measure, of `METRICS`; their ceilings; the tokens of each row. *Collective*; the
    numbers are rank 0's, and the others get none.

    *Raises* SystemExit if an answer does not have the tokens that were asked for.
    """
    first, steady = prefill.time_prefill(engine, case, repeats), decode.time_decode(engine, case, repeats)
    answers = run_once(engine, make_prompts(case, engine.blueprint.config.full_vocab), [case.output] * case.batch)
    if engine.comm.rank != 0:
        return {}
    blueprint, backend, comm = engine.blueprint, engine.backend, engine.comm.name
    step, floor = engine.prefill_step(case.batch, case.prompt), prefill.prefill_floor_s(case, blueprint)
    records = (
        prefill.make_record(case, first, floor, backend, comm, step),
        decode.make_record(case, steady, Reads.of(case, blueprint), blueprint.config.num_layers, backend, comm),
    )
    return {
        "case": {**vars(case), "backend": backend, "comm": comm},
        "metrics": {name: value for record in records for name, value in record.metrics.items() if name in METRICS},
        "ceiling": {name: value for record in records for name, value in record.ceiling.items() if name in METRICS},
        "token_ids": answers.token_ids,
    }


@click.command()
@click.option("--model", required=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), required=True)
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), required=True)
@click.option("--prompt", type=click.IntRange(1), required=True)
@click.option("--output", type=click.IntRange(2), required=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), required=True)
@click.option("--comm", type=click.Choice(["auto", *NAMES]), required=True)
@click.option("--all-reduce", type=click.Choice(list(FORCED)), required=True)
@click.option("--steps", type=click.Choice(STEPS), required=True)
@click.option("--repeats", type=click.IntRange(1), required=True)
def main(
    model: str, dtype: str, batch: int, prompt: int, output: int, device: str, comm: str, all_reduce: str, steps: str,
    repeats: int,
) -> None:  # fmt: skip
    """Measure one way on all ranks of this world."""
    case = Case.here(model, device, dtype, batch, prompt, output)
    room = prompt + max(output, 1 + prefill.SYNC_TOKENS)
    with errors_in_one_line():
        found = try_way(case, model, device, steps, repeats, comm=comm, all_reduce=all_reduce, max_model_len=room)
    if Environment.read().rank == 0:
        print(json.dumps({**found, "device": device_name() if device == "cuda" else device}), flush=True)


if __name__ == "__main__":
    main()
