"""A profile for people: a table a kind of step, stage by stage, and what to know of its numbers."""

from __future__ import annotations

import statistics

from engine.profile.profile import KindProfile, Profile
from engine.profile.timed_step import BURST, DECODE, MIXED, PREFILL, SPECULATIVE

TITLES = {
    PREFILL: "prefill",
    MIXED: "prefill beside decode",
    DECODE: "decode, one step at a time",
    BURST: "decode in bursts",
    SPECULATIVE: "decode in bursts with drafts",
}


def table_lines(profile: Profile) -> list[str]:
    """Times in us a step. A layer's column has the mean over the layers and the slowest of them."""
    if not profile.kinds:
        return ["no step was profiled: the run was too short"]
    return [line for kind in profile.kinds.values() for line in kind_lines(kind)]


def kind_lines(kind: KindProfile) -> list[str]:
    """The table of one kind."""
    cold = ", the first, with start-up costs" if kind.is_cold else ""
    lines = [
        f"{TITLES[kind.kind]}: mean of {kind.num_profiled} profiled steps of {kind.num_steps} timed{cold}",
        f"  {'stage':<12}{'us a step':>12}{'share':>8}{'us a layer':>12}  slowest layer",
    ]
    for stage, us in kind.stages.items():
        line = f"  {stage:<12}{us:>12.1f}{100 * us / kind.wall_us:>6.1f} %"
        layers = kind.layers.get(stage)
        if layers:
            slowest = max(range(len(layers)), key=layers.__getitem__)
            line += f"{statistics.fmean(layers):>12.2f}  {layers[slowest]:.2f} (layer {slowest})"
        lines.append(line)
    return [*lines, f"  {'wall':<12}{kind.wall_us:>12.1f}", *(f"  {line}" for line in note_lines(kind))]


def note_lines(kind: KindProfile) -> list[str]:
    """Overhead, check and counts; what was not counted is said to be so."""
    overhead = "not known: no step of equal work without events" if kind.overhead is None else (
        f"{kind.overhead:.3f} x the time of a step without events between its stages"
    )  # fmt: skip
    whole = "not known" if kind.sum_ratio is None else f"{100 * kind.sum_ratio:.1f} % of the time by the host's clock"
    syncs = "not counted" if kind.host_syncs is None else f"{kind.host_syncs:g} a step"
    launches = "not counted"
    if kind.launches is not None:
        total = "those of libraries not counted" if kind.launches.total is None else f"{kind.launches.total} in all"
        launches = f"{kind.launches.own} own a step, {total}"
    return [f"overhead    {overhead}", f"stages sum  {whole}", f"host syncs  {syncs}", f"launches    {launches}"]
