"""`python -m kernels.compile_all`: compile every CUDA source ahead of time, and say what each kernel takes of an SM.

Fills the cache that the engine reads, so that the first start compiles nothing; needs no GPU, so CI runs it too. A
kernel that spills registers fails the run unless its table of variants allows it: a spill is seldom meant.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from kernels.build import DEFAULT_ARCH, Build, default_cache_folder
from kernels.build_usage import KernelUsage, kernel_usages
from kernels.build_variants import Variant, find_variants
from launch.errors import EXIT_BUG, EXIT_OK, EXIT_OUTPUT, DoorbellError, KernelBuildError

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("kernels", "comm")


@dataclass(frozen=True)
class Outcome:
    """What became of a variant: its kernels, or the reason for having none."""

    variant: Variant
    usages: tuple[KernelUsage, ...] = ()
    cubin_bytes: int = 0
    error: str = ""

    @property
    def fault(self) -> str:
        """Why the run must fail, or nothing."""
        spilled = [usage.name for usage in self.usages if usage.spill_bytes]
        if self.error or not spilled or self.variant.is_spilling_allowed:
            return self.error
        return f"{self.variant.source}: {', '.join(spilled)} spills registers"


def compile_variants(
    variants: Sequence[Variant], arch: str, cache_dir: Path | None, output: Path | None = None, num_processes: int = 1
) -> Iterable[Outcome]:
    """Compile `variants` in `num_processes` processes; yields in their order, failures included.

    `cache_dir`: of `Build`. `output`: where plain cubins go as well, as `<stem>[.<macros>].<arch>.cubin`.
    """
    work = partial(_compile, arch=arch, cache_dir=cache_dir, output=output)
    if num_processes == 1 or len(variants) < 2:
        yield from map(work, variants)
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_processes, len(variants)), mp_context=spawn) as pool:
        yield from pool.map(work, variants)


def _compile(variant: Variant, arch: str, cache_dir: Path | None, output: Path | None) -> Outcome:
    try:
        built = variant.built_by(Build(cache_dir), arch)
        usages = kernel_usages(built.log)
        if not usages:
            raise KernelBuildError(f"{variant.source} defines no kernel for {variant.label or 'no macros'}")
    except (KernelBuildError, ValueError) as error:
        return Outcome(variant, error=str(error))
    if output is not None:
        label = "." + re.sub(r"[^\w=,-]", "_", variant.label) if variant.label else ""
        (output / f"{variant.source.stem}{label}.{arch}.cubin").write_bytes(built.cubin)
    return Outcome(variant, tuple(usages), len(built.cubin))


def describe(outcome: Outcome) -> str:
    """A heading and a line a kernel, or the error."""
    source = outcome.variant.source
    path = source.relative_to(ROOT) if source.is_relative_to(ROOT) else source
    head = f"{path} {outcome.variant.label}".rstrip()
    if outcome.error:
        return f"{head}: FAILED"
    lines = [
        f"    {usage.name:40} {usage.num_registers:4} registers  {usage.shared_bytes:6} B shared  "
        f"{usage.stack_bytes:5} B stack  {usage.spill_bytes:5} B spilled"
        for usage in outcome.usages
    ]
    return "\n".join([f"{head}  ({outcome.cubin_bytes / 1024:.0f} KiB)", *lines])


def run(
    roots: Iterable[Path],
    arch: str,
    cache_dir: Path | None,
    output: Path | None,
    num_processes: int,
    say: Callable[[str], None],
) -> int:
    """Compile everything under `roots`; returns the exit code. *Raises* `DoorbellError`, `OSError` (`output`)."""
    variants = find_variants(roots)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    faults = []
    for outcome in compile_variants(variants, arch, cache_dir, output, num_processes):
        say(describe(outcome))
        faults += [outcome.fault] if outcome.fault else []
    num_sources = len({variant.source for variant in variants})
    say(f"{num_sources} sources, {len(variants)} variants for {arch}, {len(faults)} failed")
    for fault in faults:
        say(f"error: {fault}")
    return EXIT_BUG if faults else EXIT_OK


@click.command(help="Compile every CUDA source for a GPU architecture; no GPU is needed.")
@click.option("--arch", default=DEFAULT_ARCH, show_default=True, help="A real architecture, such as sm_90a.")
@click.option("--output", type=click.Path(path_type=Path), help="Write plain cubins to this folder as well.")
@click.option("--jobs", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), help="Processes [default: one a core].")
def main(arch: str, output: Path | None, jobs: int) -> None:
    try:
        roots = [ROOT / folder for folder in FOLDERS]
        code = run(roots, arch, default_cache_folder(), output, jobs, click.echo)
    except DoorbellError as error:
        click.echo(f"error: {error}", err=True)
        code = error.exit_code
    except OSError as error:
        click.echo(f"error: {output}: {error.strerror}", err=True)
        code = EXIT_OUTPUT
    sys.exit(code)


if __name__ == "__main__":
    main()
