"""A step that has been timed, and what makes two of them comparable."""

from __future__ import annotations

from dataclasses import dataclass

from engine.profile.marks import Launches, Span
from engine.scheduler import ScheduledRow

PREFILL, DECODE, MIXED, BURST, SPECULATIVE = "prefill", "decode", "mixed", "burst", "speculative"
KINDS = (PREFILL, MIXED, DECODE, BURST, SPECULATIVE)
"""Buckets that never share a number. `mixed`: a chunk of a prompt beside rows that decode. `burst`: decode steps of bursts;
`speculative`: those with drafts."""


@dataclass(frozen=True)
class Work:
    """What a step computes; times of equal work may be compared. `context`: tokens that prompts have in the cache before it."""

    kind: str
    num_rows: int
    num_tokens: int
    context: int = 0
    is_filtered: bool = False

    @classmethod
    def of(cls, rows: list[ScheduledRow]) -> Work:
        num_decode, num_tokens = sum(row.is_decode for row in rows), sum(row.num_tokens for row in rows)
        if num_decode == len(rows):
            return cls(DECODE, len(rows), num_tokens)
        return cls(MIXED if num_decode else PREFILL, len(rows), num_tokens, sum(row.first for row in rows if not row.is_decode))


@dataclass
class TimedStep:
    """A step that has been timed: in a burst from the end of the step before it to its own, else from its message on.

    `start_us`: since the profile began. `host_us`: by the host's clock, None where the host did not see the step end. `spans`:
    its stages in order, empty if it was not profiled. `is_first`: of its kind (in bursts: of its work), with what start-up costs.
    `num_syncs`: of the host with the GPU, counted in the first step of a kind (in bursts: the mean of the first launch).
    """

    work: Work
    start_us: float = 0.0
    wall_us: float = 0.0
    host_us: float | None = None
    spans: tuple[Span, ...] = ()
    is_first: bool = False
    num_syncs: float | None = None
    launches: Launches | None = None
