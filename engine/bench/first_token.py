"""What the cold-start bench starts: load a model, make one token, say how long it took since the process was started.

Rank 0 prints one JSON line. Not a bench of its own: start `engine.bench.coldstart`.
"""

from __future__ import annotations

import json
import time

import click

from engine.bench.load import DTYPES, MAX_BATCH, Case, device_name, errors_in_one_line, make_prompts, open_engine, run_once
from engine.bench.roof import weight_bytes
from launch.environment import Environment


@click.command()
@click.option("--started", type=float, required=True, help="`time.time()` when this process, or torchrun, was started.")
@click.option("--model", required=True)
@click.option("--dtype", type=click.Choice(list(DTYPES)), required=True)
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), required=True)
@click.option("--prompt", type=click.IntRange(1), required=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), required=True)
@click.option("--load-format", type=click.Choice(["dummy", "auto"]), required=True)
def main(started: float, model: str, dtype: str, batch: int, prompt: int, device: str, load_format: str) -> None:
    """Answer one prompt of PROMPT random tokens with one token, by an engine for BATCH rows."""
    imports_s = time.time() - started
    case = Case.here(model, device, dtype, batch, prompt, 1)
    with errors_in_one_line(), open_engine(case, model, device, load_format=load_format) as engine:
        answer_s = run_once(engine, make_prompts(case, engine.blueprint.config.full_vocab)[:1], [1]).seconds
        first_token_s = time.time() - started
        found = {
            "case": {**vars(case), "backend": engine.backend, "comm": engine.comm.name},
            "seconds": {"first_token": first_token_s, "imports": imports_s, **engine.start_s, "answer": answer_s},
            "weight_bytes": weight_bytes(case, engine.blueprint),
        }
    if Environment.read().rank == 0:
        found["device"] = device_name() if device == "cuda" else device
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
