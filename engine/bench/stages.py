"""Where the time of a decode step and of a prefill goes on GPUs, stage by stage, through the engine as a user gets it.

Two records a case: a decode step, and a prefill of the whole batch (all its steps, where it takes several). The stages are those
of profiled steps, with events between them, so their wall time is more than that of a plain step; the ratio of the two is in the
record. TPOT and TTFT proper are what `engine.bench.decode` and `engine.bench.prefill` measure. A record counts as checked if its
stages sum to the time by the host's clock within 5 %.

Start it with torchrun for TP above 1; the times are rank 0's. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import click

from engine.api import Engine
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
    run_once,
)
from engine.bench.prefill import prefill_floor_s
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TB_S, Reads
from engine.loading import Blueprint
from engine.profile.host_syncs import count_host_syncs
from engine.profile.profile import KindProfile
from engine.profile.table import kind_lines
from engine.profile.timed_step import BURST, DECODE, PREFILL
from launch.environment import Environment

PHASES = ("decode", "prefill")
WARM_UPS = 2  # runs; the first calls of a shape choose library kernels
RUNS_PER_REPEAT = {"decode": 1, "prefill": 4}  # of a prefill there is one sample a run, and every second one is profiled


@dataclass(frozen=True)
class Phase:
    """`profile`: means of a step; its `host_syncs` and `launches` are those of a step as well. `num_steps`: steps that a record
    is about, one of decode, or all that prefill a batch."""

    name: str
    profile: KindProfile
    num_steps: int


def profile_phase(engine: Engine, case: Case, phase: str, repeats: int) -> Phase:
    """Warm up, then profile `repeats` times `RUNS_PER_REPEAT` runs. *Collective*; times and counts are rank 0's.

    *Raises* SystemExit if the engine gave other numbers of tokens than asked for, or no step of the phase was profiled.
    """
    num_tokens = [case.output if phase == "decode" else 1] * case.batch
    prompts, profiler = make_prompts(case, engine.blueprint.config.full_vocab), engine.profiler
    kind = PREFILL if phase == "prefill" else DECODE if engine.backend == "eager" else BURST
    profiler.restart()
    for _ in range(WARM_UPS):
        stats = run_once(engine, prompts, num_tokens).stats
    counted = profiler.profile().kinds.get(kind)  # the first steps count what they launch and where the host waits
    profiler.restart(is_warm=True)
    for _ in range(repeats * RUNS_PER_REPEAT[phase]):
        run_once(engine, prompts, num_tokens)
    found = profiler.profile().kinds.get(kind)
    if found is None or counted is None:
        sys.exit(f"no step of {phase} was profiled; --output must be larger")
    num_syncs, num_steps = counted.host_syncs, 1
    if phase == "decode" and num_syncs is not None:
        # What torch is seen to wait for, or what the loop knows that it waited for: the larger.
        num_syncs = max(num_syncs, stats.num_waits / (case.output - 1))
    elif phase == "prefill":
        num_steps = stats.num_steps
        num_all = count_host_syncs(lambda: run_once(engine, prompts, num_tokens))
        num_syncs = None if num_all is None or num_steps == 0 else num_all / num_steps  # rank 0 alone counts its steps
    return Phase(phase, replace(found, host_syncs=num_syncs, launches=counted.launches), num_steps)


def floor_us(case: Case, phase: str, blueprint: Blueprint) -> float:
    """The least that the wall time could be, as in the benches of decode and of prefill."""
    if phase == "prefill":
        return 1e6 * prefill_floor_s(case, blueprint)
    return Reads.of(case, blueprint).total / (DATASHEET_TB_S * 1e6)


def make_record(case: Case, phase: Phase, floor: float, backend: str, comm: str) -> Record:
    """The record of a case on GPUs. `floor`: us."""
    profile, num_steps = phase.profile, phase.num_steps
    metrics = {f"{stage}_us": us * num_steps for stage, us in profile.stages.items()} | {"wall_us": profile.wall_us * num_steps}
    if profile.overhead is not None:
        metrics["profile_overhead_ratio"] = profile.overhead
    if profile.host_syncs is not None and phase.name == "decode":
        metrics["host_syncs_per_token"] = profile.host_syncs
    elif profile.host_syncs is not None:
        metrics["host_syncs_per_request"] = profile.host_syncs * num_steps / case.batch
    if profile.launches is not None:
        metrics["own_kernel_launches"] = profile.launches.own * num_steps
        if profile.launches.total is not None:
            metrics["kernel_launches"] = profile.launches.total * num_steps
    where = {"phase": phase.name, **vars(case), "backend": backend, "comm": comm}
    return Record("stages", where, metrics, {"wall_us": floor}, {}, checked=profile.is_whole is True)


def describe(record: Record, phase: Phase) -> list[str]:
    """What a person wants to know of it."""
    metrics, floor = record.metrics, record.ceiling["wall_us"]
    steps = "" if phase.num_steps == 1 else f" in {phase.num_steps} steps"
    return [
        describe_case(record.case),
        *(f"  {line}" for line in kind_lines(phase.profile)),
        f"  {phase.name} took {metrics['wall_us']:.1f} us{steps}, floor {floor:.1f}",
    ]


@click.command()
@engine_options
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(4), default=129, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, batch: int, prompt: int,
    output: int, repeats: int,
) -> None:  # fmt: skip
    """Profile the steps of one case on all ranks of this world."""
    refuse_cpu_record(record, device)
    commit()
    environment = Environment.read()
    case = Case.here(model, device, dtype, batch, prompt, output, shard_of)
    with errors_in_one_line(), open_engine(case, model, device, shard_of, eager, is_profiled=True) as engine:
        phases = [profile_phase(engine, case, name, repeats) for name in PHASES]
        blueprint, backend, comm = engine.blueprint, engine.backend, engine.comm.name
    if environment.rank != 0:
        return
    for phase in phases:
        own = case if phase.name == "decode" else replace(case, output=1)
        result = make_record(own, phase, floor_us(own, phase.name, blueprint), backend, comm)
        if device == "cpu":
            click.echo("\n".join(kind_lines(phase.profile)))
            continue
        click.echo("\n".join(describe(result, phase)))
        if record is not None:
            result.append_to(record, device_name(shard_of), "engine.bench.stages", environment.world_size)


if __name__ == "__main__":
    main()
