"""Speculation on GPUs at an acceptance that is set: how much faster than without, and where a step's time goes.

Random weights accept no real draft, so a draft of the model is taken to hold with a probability that is given, whatever it is
(`engine.bench.acceptance`). Prompts are random, and no row ends before its last token.

A case is RATE:DRAFTS, such as 0.8:5, or RATE:adaptive for as many as pay. TPOT is as in `engine.bench.decode`. A step's time is
TPOT times the tokens of a step; what a step takes without the draft model, nothing accepted, is its verification. Several rows
with drafts that hold now and then end apart, and TPOT is that of the slowest; at a rate of 0 it is a step's.

With `--refills N` the batch is kept full instead (`engine.bench.speculate_load`), which tells up to how many rows drafts pay.
Several `--batch` are measured one after the other, the weights loaded once.
Start it with torchrun for TP above 1. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click

from engine.api import Engine
from engine.bench.drafted import Bench, DraftSource, Timing, Trial
from engine.bench.load import (
    MAX_BATCH,
    Case,
    describe_case,
    device_name,
    engine_options,
    errors_in_one_line,
    make_prompts,
    open_engine,
    refuse_cpu_record,
)
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TB_S, Reads, weight_bytes
from engine.bench.speculate_load import MIN_REFILLS, describe_load, draw_load, make_load_record
from engine.drafts.depth import expected_tokens
from engine.settings import DRAFT_PLACEMENTS, DRAFT_WAITS
from launch.environment import Environment

DEFAULT_TRIALS = ("0.8:5", "0.6:4", "0:4", "0:adaptive")


def make_record(
    case: Case, source: DraftSource, trial: Trial, timing: Timing, plain_ms: float, verify_ms: float | None, reads: Reads,
    draft_bytes: int, backend: str, comm: str,
) -> Record:  # fmt: skip
    """Of a batch that is not filled up again."""
    stats = timing.stats
    metrics = {
        "tpot_ms": timing.tpot_ms,
        "decode_tok_s": 1e3 * case.batch / timing.tpot_ms,
        "plain_tpot_ms": plain_ms,
        "speedup": plain_ms / timing.tpot_ms,
        "acceptance": stats.acceptance,
        "mean_accepted": stats.mean_accepted,
        "tokens_per_step": stats.tokens_per_step,
        "step_ms": timing.tpot_ms * stats.tokens_per_step,
    }
    if verify_ms is not None:
        metrics |= {
            "verify_ms": verify_ms, "draft_ms": metrics["step_ms"] - verify_ms, "verify_ratio": verify_ms / plain_ms,
        }  # fmt: skip
    ceiling: dict[str, float] = {}
    if trial.num_drafts is not None:
        floor_s = (reads.total + trial.num_drafts * draft_bytes) / (DATASHEET_TB_S * 1e12)
        ceiling["tpot_ms"] = 1e3 * floor_s / expected_tokens(trial.rate, trial.num_drafts)
    whole = {**vars(case), **source.case_of(trial), "backend": backend, "comm": comm}
    return Record("speculate", whole, metrics, ceiling, {}, checked=True)


def describe(record: Record) -> list[str]:
    """What a person wants to know of it."""
    case, metrics = record.case, record.metrics
    where = [f"placement {case['placement']}", *([case["wait"]] if "wait" in case else [])]
    lines = [
        f"{describe_case(case)}, draft {case['draft']} ({', waits by '.join(where)}), "
        f"{case['num_drafts']} drafts right at {case['rate']}",
        f"  TPOT      {metrics['tpot_ms']:.3f} ms, {metrics['plain_tpot_ms']:.3f} without: {metrics['speedup']:.2f} x",
        f"  accepted  {100 * metrics['acceptance']:.1f} %, {metrics['mean_accepted']:.2f} a proposal, "
        f"{metrics['tokens_per_step']:.2f} tokens a step and row",
    ]
    if "verify_ms" in metrics:
        lines.append(
            f"  a step    {metrics['step_ms']:.3f} ms: drafts {metrics['draft_ms']:.3f}, "
            f"verification {metrics['verify_ms']:.3f}, which is {metrics['verify_ratio']:.3f} plain steps"
        )
    return lines


def measure(engine: Engine, cases: list[Case], source: DraftSource, trials: list[Trial], repeats: int) -> Iterator[Record | None]:
    """One record a case and trial, of batches that are not filled up again; None on ranks without times. *Collective*."""
    bench, blueprint = Bench(engine, repeats), engine.blueprint
    counts = sorted({trial.num_drafts for trial in trials if trial.num_drafts is not None})
    for case in cases:
        prompts = make_prompts(case, blueprint.config.full_vocab)
        plain_ms = bench.time_plain(prompts, case.output)
        verify = {count: bench.time_verification(count, prompts, case.output) for count in counts}
        reads, draft_bytes = Reads.of(case, blueprint), weight_bytes(case, blueprint.graph_draft)
        for trial in trials:
            timing = bench.time_trial(trial, prompts, case.output)
            yield None if timing.stats is None else make_record(
                case, source, trial, timing, plain_ms, verify.get(trial.num_drafts), reads, draft_bytes, engine.backend,
                engine.comm.name,
            )  # fmt: skip


def measure_loads(
    engine: Engine, cases: list[Case], source: DraftSource, trials: list[Trial], refills: int
) -> Iterator[Record | None]:
    """One record a case and trial, of batches that are kept full; None on ranks without times. *Collective*."""
    bench = Bench(engine, repeats=1)
    for case in cases:
        engine.limit_batch(case.batch)
        requests = draw_load(case, refills, engine.blueprint.config.full_vocab)
        plain = None
        for trial in (None, *trials):
            bench.time_load(trial, requests)  # with as many drafts, rows join and end at the same steps
            timing = bench.time_load(trial, requests)
            if trial is None:
                plain = timing
            else:
                yield None if timing.stats is None else make_load_record(
                    case, requests, source, trial, timing, plain, engine.backend, engine.comm.name
                )


@click.command()
@engine_options
@click.option("--draft", default="qwen2.5-0.5b", show_default=True, help="The draft model's shape.")
@click.option("--draft-placement", type=click.Choice(DRAFT_PLACEMENTS), default=DRAFT_PLACEMENTS[0], show_default=True)
@click.option("--draft-wait", type=click.Choice(DRAFT_WAITS), default=DRAFT_WAITS[0], show_default=True,
              help="How ranks that are handed drafts wait for them.")
@click.option("--trial", "trials", multiple=True, default=DEFAULT_TRIALS, show_default=True, help="RATE:DRAFTS; any number.")
@click.option("--batch", "batches", type=click.IntRange(1, MAX_BATCH), multiple=True, default=(1,), show_default=True,
              help="Rows computed at once; any number, one after the other.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(2), default=257, show_default=True,
              help="Tokens of an answer; with --refills on average.")
@click.option("--repeats", type=click.IntRange(1), show_default="3", help="Not with --refills.")
@click.option("--refills", type=click.IntRange(MIN_REFILLS), metavar="N", show_default="the batch is not filled up again",
              help="Keep the batch full: N requests for each of its rows, all there at once, with answers of mixed lengths.")
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, draft: str,
    draft_placement: str, draft_wait: str, trials: tuple[str, ...], batches: tuple[int, ...], prompt: int, output: int,
    repeats: int | None, refills: int | None,
) -> None:  # fmt: skip
    """Time decode steps with drafts on all ranks of this world."""
    refuse_cpu_record(record, device)
    if eager or device == "cpu":
        raise click.UsageError("what is measured is made of graphs on GPUs")
    if refills is not None and repeats is not None:
        raise click.UsageError("--repeats is of a batch that is not filled up again; with --refills there is one run")
    commit()
    parsed = [Trial.parse(text) for text in trials]
    environment = Environment.read()
    if draft_wait != DRAFT_WAITS[0] and environment.world_size == 1:
        raise click.UsageError("--draft-wait is of ranks that are handed drafts, and this process is alone")
    largest = Case.here(model, device, dtype, max(batches), prompt, output, shard_of)
    cases = [replace(largest, batch=batch) for batch in batches]
    source = DraftSource(draft, draft_placement, draft_wait)
    settings = {"draft_model": draft, "draft_placement": draft_placement, "draft_wait": draft_wait}
    settings["max_speculative_rows"] = largest.batch
    if refills is not None:
        settings |= {"max_model_len": prompt + output * 3 // 2, "max_step_tokens": None}  # None: the engine's own choice
    with errors_in_one_line(), open_engine(largest, model, device, shard_of, **settings) as engine:
        if refills is None:
            found = measure(engine, cases, source, parsed, repeats or 3)
        else:
            found = measure_loads(engine, cases, source, parsed, refills)
        for result in found:
            if result is None or environment.rank != 0:
                continue
            click.echo("\n".join(describe(result) if refills is None else describe_load(result)))
            if record is not None:
                result.append_to(record, device_name(shard_of), "engine.bench.speculate", environment.world_size)


if __name__ == "__main__":
    main()
