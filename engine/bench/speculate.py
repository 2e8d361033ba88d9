"""Speculation on GPUs at an acceptance that is set: how much faster than without, and where a step's time goes.

Random weights accept no real draft, so an oracle takes the draft model's place in what is proposed: the target's own next token
with a probability that is given, else another one. The draft model is run all the same, for its time. Prompts are random, answers
greedy, and no row ends before its last token.

A case is RATE:DRAFTS, such as 0.8:5, or RATE:adaptive for as many as pay. TPOT is as in `engine.bench.decode`. A step's time is
TPOT times the tokens of a step; what a step takes with an oracle alone, no model beside it and nothing accepted, is its
verification.
Start it with torchrun for TP above 1. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path

import click

from engine.api import Engine
from engine.bench.load import (
    Case,
    describe_case,
    device_name,
    engine_options,
    errors_in_one_line,
    make_prompts,
    open_engine,
    refuse_cpu_record,
    run_once,
)
from engine.bench.oracle import OracleDrafts
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TB_S, Reads, weight_bytes
from engine.drafts.depth import Depth, FixedDepth, expected_tokens
from engine.drafts.speculation import DraftStats
from engine.graph.speculative_step import DeviceDrafter
from engine.settings import DRAFT_PLACEMENTS, DRAFT_WAITS
from launch.environment import Environment

DEFAULT_TRIALS = ("0.8:5", "0.6:4", "0:4", "0:adaptive")


@dataclass(frozen=True)
class Trial:
    """`rate`: the chance of a guess to be right. `num_drafts`: None for as many as pay."""

    rate: float
    num_drafts: int | None

    @classmethod
    def parse(cls, text: str) -> Trial:
        """*Raises* `click.BadParameter`."""
        rate, _, count = text.partition(":")
        try:
            trial = cls(float(rate), None if count == "adaptive" else int(count))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not RATE:DRAFTS, such as 0.8:5 or 0.8:adaptive") from None
        if not 0.0 <= trial.rate <= 1.0 or (trial.num_drafts is not None and not 1 <= trial.num_drafts <= 16):
            raise click.BadParameter(f"{text!r}: a rate is 0 to 1, and drafts are 1 to 16")
        return trial


@dataclass(frozen=True)
class Timing:
    tpot_ms: float
    stats: DraftStats | None


class Bench:
    """One engine, its oracle, and the prompts of a case. *Collective*: all methods."""

    def __init__(self, engine: Engine, case: Case, repeats: int):
        self._engine, self._case, self._repeats = engine, case, repeats
        self._prompts = make_prompts(case, engine.blueprint.config.full_vocab)
        self._backend = engine.replica.burst_backend
        self._model, self._adaptive = self._backend.drafter, engine.draft_depth
        self._answers: list[list[int]] = []

    def time_plain(self) -> float:
        """TPOT in ms without drafts."""
        self._answers = self._say(None)
        return self._time(None).tpot_ms

    def time_trial(self, trial: Trial) -> Timing:
        depth = self._adaptive if trial.num_drafts is None else FixedDepth(trial.num_drafts)
        return self._time_drafts(trial.rate, depth, self._model)

    def time_verification(self, num_drafts: int) -> float:
        """Of a step, in ms."""
        return self._time_drafts(0.0, FixedDepth(num_drafts), None).tpot_ms

    def _time_drafts(self, rate: float, depth: Depth, inner: DeviceDrafter | None) -> Timing:
        config, speculable = self._engine.blueprint.config, self._backend.speculable
        device = self._engine.replica.device
        oracle = OracleDrafts(rate, config.full_vocab, speculable.max_rows, speculable.max_tokens, device, inner)
        self._backend.replace_drafter(oracle)
        # Verification multiplies other numbers of rows than plain steps and may round near-ties the other way: what it says
        # itself, whatever is proposed, is right.
        oracle.answers = self._answers
        self._answers = oracle.answers = self._say(depth)
        return self._time(depth)

    def _say(self, depth: Depth | None) -> list[list[int]]:
        """Prompts and answers, the same on all ranks."""
        self._engine.restart_drafts(depth)
        run = run_once(self._engine, self._prompts, [self._case.output] * self._case.batch)
        return [[*prompt, *token_ids] for prompt, token_ids in zip(self._prompts, run.token_ids)]

    def _time(self, depth: Depth | None) -> Timing:
        seconds: dict[int, list[float]] = {1: [], self._case.output: []}
        stats = None
        for repeat in range(1 + self._repeats):
            for num_tokens, times in seconds.items():
                self._engine.restart_drafts(depth)
                run_once(self._engine, self._prompts, [num_tokens] * self._case.batch)
                stats = self._engine.draft_stats
                if repeat > 0:
                    times.append(self._engine.run_s)
        first, whole = (statistics.median(times) for times in seconds.values())
        return Timing(1e3 * (whole - first) / (self._case.output - 1), stats)


def make_record(
    case: Case, draft: str, placement: str, wait: str, trial: Trial, timing: Timing, plain_ms: float, verify_ms: float | None,
    reads: Reads, draft_bytes: int, backend: str, comm: str,
) -> Record:  # fmt: skip
    """`wait`: of `DRAFT_WAITS`, part of the case where drafts are handed on."""
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
    own = {
        "draft": draft, "placement": placement, "rate": trial.rate, "num_drafts": trial.num_drafts or "adaptive",
        "acceptance": "set", **({"wait": wait} if placement == "first" else {}),
    }  # fmt: skip
    return Record(
        "speculate", {**vars(case), **own, "backend": backend, "comm": comm}, metrics, ceiling, {}, checked=True
    )


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


@click.command()
@engine_options
@click.option("--draft", default="qwen2.5-0.5b", show_default=True, help="The draft model's shape.")
@click.option("--draft-placement", type=click.Choice(DRAFT_PLACEMENTS), default=DRAFT_PLACEMENTS[0], show_default=True)
@click.option("--draft-wait", type=click.Choice(DRAFT_WAITS), default=DRAFT_WAITS[0], show_default=True,
              help="How ranks that are handed drafts wait for them.")
@click.option("--trial", "trials", multiple=True, default=DEFAULT_TRIALS, show_default=True, help="RATE:DRAFTS; any number.")
@click.option("--batch", type=click.IntRange(1, 16), default=1, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(2), default=257, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, draft: str,
    draft_placement: str, draft_wait: str, trials: tuple[str, ...], batch: int, prompt: int, output: int, repeats: int,
) -> None:  # fmt: skip
    """Time decode steps with drafts on all ranks of this world."""
    refuse_cpu_record(record, device)
    if eager or device == "cpu":
        raise click.UsageError("what is measured is made of graphs on GPUs")
    commit()
    parsed = [Trial.parse(text) for text in trials]
    environment = Environment.read()
    if draft_wait != DRAFT_WAITS[0] and environment.world_size == 1:
        raise click.UsageError("--draft-wait is of ranks that are handed drafts, and this process is alone")
    case = Case.here(model, device, dtype, batch, prompt, output, shard_of)
    source = {"draft_model": draft, "draft_placement": draft_placement, "draft_wait": draft_wait}
    with errors_in_one_line(), open_engine(case, model, device, shard_of, **source) as engine:
        bench = Bench(engine, case, repeats)
        plain_ms = bench.time_plain()
        counts = sorted({trial.num_drafts for trial in parsed if trial.num_drafts is not None})
        verify = {count: bench.time_verification(count) for count in counts}
        timings = [bench.time_trial(trial) for trial in parsed]
        blueprint, backend, comm = engine.blueprint, engine.backend, engine.comm.name
    if environment.rank != 0:
        return
    reads, draft_bytes = Reads.of(case, blueprint), weight_bytes(case, blueprint.graph_draft)
    for trial, timing in zip(parsed, timings):
        result = make_record(
            case, draft, draft_placement, draft_wait, trial, timing, plain_ms, verify.get(trial.num_drafts), reads, draft_bytes,
            backend, comm,
        )
        click.echo("\n".join(describe(result)))
        if record is not None:
            result.append_to(record, device_name(shard_of), "engine.bench.speculate", environment.world_size)


if __name__ == "__main__":
    main()
