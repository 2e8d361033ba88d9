"""All benches that this machine can run, one after the other: prints the plan, runs it, and says at the end what failed.

A bench is a target of the Makefile, so what it does is written there. Without a GPU there is the CPU bench; with one, what runs
on one; with more, the collectives and the largest model over all of them as well.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import click
import torch

MAX_TP = 8


@dataclass(frozen=True)
class Bench:
    """`target` of the Makefile, its `variables`, and about how many `seconds` it takes on H200s."""

    target: str
    seconds: int
    variables: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join((self.target, *self.variables))


def plan_for(num_gpus: int) -> list[Bench]:
    """The benches of a machine with `num_gpus` GPUs, in order."""
    if num_gpus == 0:
        return [Bench("bench-cpu", 540)]
    benches = [
        Bench("bench-decode", 60),
        Bench("bench-prefill", 45),
        Bench("bench-stages", 60),
        Bench("bench-throughput", 240),
        Bench("bench-coldstart", 300),
        Bench("bench-attention", 60),
        Bench("bench-products", 120),
        Bench("bench-prefill-products", 180),
    ]
    if num_gpus > 1:
        tp = f"TP={min(num_gpus, MAX_TP)}"
        benches += [
            Bench("bench-decode", 90, ("MODEL=qwen2.5-72b", tp)),
            Bench("bench-prefill", 90, ("MODEL=qwen2.5-72b", tp)),
            Bench("bench-stages", 120, ("MODEL=qwen2.5-72b", tp)),
            Bench("bench-ways", 420),
            Bench("bench-comm", 120, (tp,)),
            Bench("bench-signal", 60),
            Bench("bench-soak", 60, (tp, "MPS=")),
            Bench("bench-drift", 60, (tp,)),
            Bench("bench-speculate", 180, (tp,)),
        ]
    return benches


def run_bench(bench: Bench) -> int:
    """The exit code of `make` for it, with this Python."""
    return subprocess.run(["make", "--no-print-directory", bench.target, f"PYTHON={sys.executable}", *bench.variables]).returncode


def run_plan(benches: Sequence[Bench], run: Callable[[Bench], int] = run_bench) -> list[str]:
    """Run all of `benches`, also after a failure; returns one line for each that failed."""
    failures = []
    for index, bench in enumerate(benches, 1):
        click.echo(f"\n[{index}/{len(benches)}] make {bench.name}")
        started = time.perf_counter()
        code = run(bench)
        outcome = "done" if code == 0 else f"failed with exit code {code}"
        click.echo(f"[{index}/{len(benches)}] {outcome} after {time.perf_counter() - started:.0f} s")
        if code:
            failures.append(f"make {bench.name}: exit code {code}")
    return failures


@click.command()
@click.option("--dry-run", is_flag=True, help="Print the plan and leave.")
def main(dry_run: bool) -> None:
    """Run every bench that this machine has the GPUs for."""
    num_gpus = torch.cuda.device_count()
    benches = plan_for(num_gpus)
    where = {0: "no GPU", 1: "1 GPU"}.get(num_gpus, f"{num_gpus} GPUs")
    minutes = sum(bench.seconds for bench in benches) / 60
    click.echo(f"{where}: {len(benches)} {'bench' if len(benches) == 1 else 'benches'}, about {minutes:.0f} minutes")
    for bench in benches:
        click.echo(f"  make {bench.name:<46} about {bench.seconds:4d} s")
    if dry_run:
        return
    failures = run_plan(benches)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
