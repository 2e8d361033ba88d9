"""Points in time on a device, and what lies between two of them.

A stamp on a GPU is a CUDA event of its current stream. Within a graph capture it becomes a node of the graph (that is what
`external` asks for) and gets a new time at every replay; outside it is recorded at once.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

Stamp = Any
"""Made by a clock, for that clock alone."""


class Clock(Protocol):
    """`is_device`: it is that of a GPU."""

    is_device: bool

    def stamp(self) -> Stamp:
        """Now, behind all work queued so far. *Stream*: the current one. Waits for nothing."""

    def us_between(self, first: Stamp, second: Stamp) -> float:
        """Both must be over."""

    def is_over(self, stamp: Stamp) -> bool:
        """Whether its time has come."""

    def wait(self, stamp: Stamp) -> None:
        """Return once its time has come."""


class HostClock:
    """Of work that is done when its call returns."""

    is_device = False

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def us_between(self, first: int, second: int) -> float:
        return (second - first) / 1e3

    def is_over(self, stamp: int) -> bool:
        return True

    def wait(self, stamp: int) -> None:
        pass  # it is over


class DeviceClock:
    """Of the GPU `device`; about half a microsecond fine."""

    is_device = True

    def __init__(self, device: torch.device):
        self._device = device

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def us_between(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        return 1e3 * first.elapsed_time(second)

    def is_over(self, stamp: torch.cuda.Event) -> bool:
        return stamp.query()

    def wait(self, stamp: torch.cuda.Event) -> None:
        stamp.synchronize()


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
