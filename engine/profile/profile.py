"""What the timed steps of a run add up to: a bucket a kind of step, never two kinds in one."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from engine.profile.marks import DRAFT, STAGES, Launches
from engine.profile.timed_step import KINDS, SPECULATIVE, TimedStep, Work

SUM_TOLERANCE = 0.05  # of the stages' sum against the host's clock


@dataclass(frozen=True)
class KindProfile:
    """Means of a profiled step of one kind, in us.

    `num_steps`: those that were timed, `num_profiled`: those that the means are of; the first step of a kind is left out where
    there are others, `is_cold` where there are none. `stages`: all layers summed, which together are `wall_us`; `layers`: the
    part of each layer. `overhead`: how many times longer a profiled step takes than one of equal work without inner events, None
    where there was none. `sum_ratio`: stages over the host's clock, in the steps that both saw, None where there are none.
    `host_syncs`: of the host with the GPU, a step, None if not counted; `launches`: kernels a step, None likewise.
    """

    kind: str
    num_steps: int
    num_profiled: int
    is_cold: bool
    stages: dict[str, float]
    layers: dict[str, list[float]]
    wall_us: float
    overhead: float | None
    sum_ratio: float | None
    host_syncs: float | None
    launches: Launches | None

    @property
    def is_whole(self) -> bool | None:
        """Whether the stages sum to the time by the host's clock; None if that is not known."""
        return None if self.sum_ratio is None else abs(self.sum_ratio - 1.0) <= SUM_TOLERANCE

    @classmethod
    def of(cls, kind: str, steps: Sequence[TimedStep]) -> KindProfile | None:
        """Of all timed `steps` of the kind; None if none of them was profiled."""
        profiled = [step for step in steps if step.spans]
        if not profiled:
            return None
        warm = [step for step in profiled if not step.is_first]
        used = warm or profiled
        names = (DRAFT, *STAGES) if kind == SPECULATIVE else STAGES
        stages = {stage: sum(span.us for step in used for span in step.spans if span.stage == stage) for stage in names}
        return cls(
            kind=kind,
            num_steps=len(steps),
            num_profiled=len(used),
            is_cold=not warm,
            stages={stage: us / len(used) for stage, us in stages.items()},
            layers=_by_layer(used),
            wall_us=statistics.fmean(step.wall_us for step in used),
            overhead=_overhead(warm, [step for step in steps if not step.spans]),
            sum_ratio=_sum_ratio(steps),
            host_syncs=next((step.num_syncs for step in steps if step.num_syncs is not None), None),
            launches=next((step.launches for step in steps if step.launches is not None), None),
        )


@dataclass(frozen=True)
class Profile:
    """Of one rank. `steps`: all that were timed, in order."""

    kinds: dict[str, KindProfile]
    steps: tuple[TimedStep, ...]

    @classmethod
    def of(cls, steps: Iterable[TimedStep]) -> Profile:
        steps = tuple(steps)
        found = {kind: KindProfile.of(kind, [step for step in steps if step.work.kind == kind]) for kind in KINDS}
        return cls({kind: profile for kind, profile in found.items() if profile is not None}, steps)

    def as_record(self) -> dict[str, object]:
        """For JSON: the fields of `KindProfile` by kind."""
        return {kind: asdict(profile) | {"is_whole": profile.is_whole} for kind, profile in self.kinds.items()}


def _by_layer(steps: Sequence[TimedStep]) -> dict[str, list[float]]:
    sums: dict[str, dict[int, float]] = {}
    for step in steps:
        for span in step.spans:
            if span.layer_idx is not None:
                layers = sums.setdefault(span.stage, {})
                layers[span.layer_idx] = layers.get(span.layer_idx, 0.0) + span.us
    return {stage: [layers[idx] / len(steps) for idx in sorted(layers)] for stage, layers in sums.items()}


def _overhead(profiled: Sequence[TimedStep], plain: Sequence[TimedStep]) -> float | None:
    """By medians: a single late step is the host's, not the profiler's."""
    with_events, without = _medians(profiled), _medians(plain)
    shared = with_events.keys() & without.keys()
    return sum(with_events[work] for work in shared) / sum(without[work] for work in shared) if shared else None


def _medians(steps: Sequence[TimedStep]) -> dict[Work, float]:
    times: dict[Work, list[float]] = {}
    for step in steps:
        times.setdefault(step.work, []).append(step.wall_us)
    return {work: statistics.median(group) for work, group in times.items()}


def _sum_ratio(steps: Sequence[TimedStep]) -> float | None:
    """The stages of a step are its wall time by the device's events, so that is what the host's clock is held against."""
    seen = [step for step in steps if step.host_us is not None and not step.is_first]
    return sum(step.wall_us for step in seen) / sum(step.host_us for step in seen) if seen else None
