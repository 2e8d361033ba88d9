"""The borders between the stages of a step. A step is given marks and says at each border which stage has just ended.

`all_reduce` holds what a fused kernel does along with the sum: in decode steps of `engine.graph` the residual and the norm, and
so at one rank these alone. Eager steps have them in `rest`, with the embedding and what a step prepares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.profile.clock import Clock, Stamp

STAGES = ("qkv", "attention", "o_proj", "all_reduce", "mlp", "head", "sampling", "rest")
DRAFT = "draft"  # of steps with drafts, besides


class Marks(Protocol):
    def end(self, stage: str, layer_idx: int | None = None) -> None:
        """What was queued since the last border was `stage`, one of `STAGES` or `DRAFT`, of a layer or of none."""


class NoMarks:
    """Of a step that is not profiled: nothing happens."""

    def end(self, stage: str, layer_idx: int | None = None) -> None:
        pass


NO_MARKS = NoMarks()


@dataclass(frozen=True)
class Launches:
    """Kernels of a step: those of `kernels.launch_kernel`, and all of them with those of libraries, None if not counted."""

    own: int
    total: int | None


@dataclass(frozen=True)
class Span:
    """A stage from `start_us`, in its step, for `us`."""

    stage: str
    layer_idx: int | None
    start_us: float
    us: float


class StageMarks:
    """Marks of one step, from now on; of a captured step, of its every replay. `launches`: set by whoever counts them."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self.stamps: list[Stamp] = [clock.stamp()]
        self.launches: Launches | None = None
        self._ended: list[tuple[str, int | None]] = []

    def end(self, stage: str, layer_idx: int | None = None) -> None:
        self.stamps.append(self._clock.stamp())
        self._ended.append((stage, layer_idx))

    def spans(self, start: Stamp, end: Stamp) -> tuple[Span, ...]:
        """The stages of a step from `start` to `end`: what lies before the first border and behind the last is `rest`.

        They sum to the time between the two. All stamps must be over.
        """
        borders = [self._clock.us_between(start, stamp) for stamp in (*self.stamps, end)]
        ended = (("rest", None), *self._ended, ("rest", None))
        return tuple(
            Span(stage, layer_idx, first, second - first)
            for (stage, layer_idx), first, second in zip(ended, [0.0, *borders], borders)
        )
