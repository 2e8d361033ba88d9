"""Seconds from the start of a process to its first token, with the caches of kernels cold and warm.

Every run is a fresh process, or torchrun with TP of them, and has one prompt to answer with one token, by an engine that is ready
for BATCH rows. Cold: the folder that
Doorbell keeps built kernels in is empty; warm: the run before has filled it. Both meet the machine as it is otherwise: after the
first run the files of Python and torch are in memory. The weights are random unless `--load-format auto` reads those of a model
folder. Parts are rank 0's; work that the GPU was still at counts for the part that waited for it.

Start it as one process: it starts torchrun itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from engine.bench.fresh import run_world, world_command
from engine.bench.load import DTYPES, MAX_BATCH, describe_case, record_option, refuse_cpu_record
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TB_S
from launch.environment import with_cache_base

# Seconds until vLLM's engine was ready, which is before its first token: by (model, tp, dtype, caches). The least that was seen.
VLLM_READY_S = {
    ("qwen2.5-7b", 1, "bf16", "cold"): 160.0,
    ("qwen2.5-72b", 2, "bf16", "cold"): 240.0,
    ("qwen2.5-72b", 2, "bf16", "warm"): 100.0,
}
VLLM = "vLLM 0.26.0, to ready, at least"
CACHES = ("cold", "warm")


def start_command(tp: int, options: Mapping[str, object], started: float) -> list[str]:
    """The command of one run. `options`: those of `engine.bench.first_token`."""
    return world_command("engine.bench.first_token", tp, {**options, "started": started})


def run_fresh(tp: int, options: Mapping[str, object], cache_base: Path, timeout_s: float) -> dict:
    """Start a run, wait for its end, and return what it printed. *Raises* SystemExit if it failed or took too long."""
    return run_world(start_command(tp, options, time.time()), timeout_s, "first token", with_cache_base(cache_base))


def time_starts(tp: int, options: Mapping[str, object], repeats: int, timeout_s: float) -> dict[str, list[dict]]:
    """What the runs printed, by the state of the caches; `repeats` pairs, each with a cache folder of its own."""
    runs: dict[str, list[dict]] = {caches: [] for caches in CACHES}
    for _ in range(repeats):
        with TemporaryDirectory(prefix="doorbell-coldstart-") as folder:
            for caches in CACHES:
                run = run_fresh(tp, options, Path(folder).resolve(), timeout_s)
                parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in run["seconds"].items())
                click.echo(f"  {caches}  {parts} s")
                runs[caches].append(run)
    return runs


def make_record(caches: str, load_format: str, runs: Sequence[dict]) -> Record:
    """The record of the runs with `caches` cold or warm: medians. Its ceiling is the writing of the weights to HBM."""
    case = {**runs[0]["case"], "caches": caches, "weights": "random" if load_format == "dummy" else "read"}
    medians = {f"{name}_s": statistics.median(run["seconds"][name] for run in runs) for name in runs[0]["seconds"]}
    ready_s = VLLM_READY_S.get((case["model"], case["tp"], case["dtype"], caches))
    is_comparable = ready_s is not None and load_format == "dummy" and case["ranks_per_gpu"] == 1
    peer = {"name": VLLM, "first_token_s": ready_s} if is_comparable else {}
    ceiling = {"first_token_s": runs[0]["weight_bytes"] / (DATASHEET_TB_S * 1e12)}
    return Record("coldstart", case, medians, ceiling, peer, checked=True)


def describe(record: Record) -> list[str]:
    """What a person wants to know of it."""
    peer = f"; {record.peer['name']}: {record.peer['first_token_s']:.0f} s" if record.peer else ""
    return [
        f"{describe_case(record.case)}; caches {record.case['caches']}",
        f"  first token after {record.metrics['first_token_s']:.2f} s{peer}",
    ]


@click.command()
@click.option("--model", default="qwen2.5-7b", show_default=True, help="A shape, qwen2.5-0.5b to qwen2.5-72b, or a model folder.")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks, each a process.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=32, show_default=True, help="Rows that an engine is for.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of the prompt.")
@click.option("--load-format", type=click.Choice(["dummy", "auto"]), default="dummy", show_default=True, help="auto: read them.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: a dry run.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="Pairs of a cold and a warm run.")
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=600, show_default=True, help="Seconds for one run.")
@record_option
def main(
    model: str, tp: int, dtype: str, batch: int, prompt: int, load_format: str, device: str, repeats: int,
    timeout_s: float, record: Path | None,
) -> None:  # fmt: skip
    """Time fresh processes to their first token."""
    refuse_cpu_record(record, device)
    commit()
    options = {"model": model, "dtype": dtype, "batch": batch, "prompt": prompt, "device": device, "load-format": load_format}
    runs = time_starts(tp, options, repeats, timeout_s)
    for caches in CACHES:
        result = make_record(caches, load_format, runs[caches])
        click.echo("\n".join(describe(result)))
        if record is not None:
            result.append_to(record, runs[caches][0]["device"], "engine.bench.coldstart")


if __name__ == "__main__":
    main()
