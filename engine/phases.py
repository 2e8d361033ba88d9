"""How long the phases of a start took, one after the other."""

from __future__ import annotations

import time


class Phases:
    """`seconds` of each phase that has ended. The first begins when this is made, each later one where another ends.

    The host's clock: work that a GPU was still at counts for the phase that waits for it.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._began
        self._began = now
