"""The loop around the step: rank 0 leads, the others follow, and every way out is told to all.

A run ends in one of three ways. Rank 0 says so in its last message (done, interrupted, output failed): all ranks leave with the
same code. Or a rank fails in the middle of a step: no message can be sent then, and the peers learn of it through `comm.watch`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch

from engine.burst_reader import BurstReader, Way
from engine.leader import Leader
from engine.replica import Replica
from engine.request import Request
from engine.run_stats import RunStats
from engine.step_message import GO_ON, StepMessage
from launch.errors import EXIT_BUG, EXIT_OK, DoorbellError, PeerLost
from launch.exits import MEANINGS

# While rank 0 waits for input, the others wait for rank 0; a message this often tells them that it still lives.
KEEP_ALIVE_S = 1.0


class Interrupted(DoorbellError):
    """The user or the system asked the run to end. `exit_code` is 130 (SIGINT) or 143 (SIGTERM)."""

    def __init__(self, exit_code: int, message: str | None = None):
        super().__init__(message or MEANINGS[exit_code])
        self.exit_code = exit_code


class RequestSource(Protocol):
    """Where rank 0's rows come from."""

    @property
    def is_exhausted(self) -> bool: ...

    def poll(self, wait_s: float) -> Request | None:
        """The next request, waiting at most `wait_s` seconds for one. None: nothing yet, or nothing more."""


class ListSource:
    """Requests that are all there already."""

    def __init__(self, requests: list[Request]):
        self._requests = list(reversed(requests))

    @property
    def is_exhausted(self) -> bool:
        return not self._requests

    def poll(self, wait_s: float) -> Request | None:
        return self._requests.pop() if self._requests else None


def no_interrupt() -> int | None:
    return None


def _check_interrupt(interrupt: Callable[[], int | None]) -> None:
    code = interrupt()
    if code is not None:
        raise Interrupted(code)


@contextmanager
def loaded_objects_set_aside() -> Iterator[None]:
    """The garbage collector passes over what is there already. A full pass over the modules of torch and transformers takes
    0.1 s, in the middle of a run, on whichever rank it comes, and all others wait for that one."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@torch.inference_mode()
@loaded_objects_set_aside()
def lead(
    replica: Replica,
    leader: Leader,
    source: RequestSource,
    stats: RunStats,
    look_ahead: int,
    interrupt: Callable[[], int | None] = no_interrupt,
    on_step: Callable[[], None] | None = None,
) -> None:
    """Rank 0: answer every request of `source`. *Collective* with `follow` on the other ranks.

    `look_ahead`: most rows open at once, running or waiting. `interrupt()` gives an exit code to leave with, or None; it is asked
    between steps. `on_step` runs after each step.
    *Raises* `Interrupted`; whatever a request's callbacks raise; `PeerLost`.
    """
    comm = replica.comm
    exit_code, is_boundary = EXIT_BUG, True
    admit, check_interrupt = partial(_admit, leader, source, look_ahead, is_idle=False), partial(_check_interrupt, interrupt)
    reader = BurstReader(replica, leader, stats, admit, check_interrupt, on_step)
    try:
        while True:
            check_interrupt()
            way = reader.read_on()
            if way is Way.ANEW:
                _admit(leader, source, look_ahead, is_idle=not (leader.has_news or replica.scheduler.has_work))
                if source.is_exhausted and not (leader.has_news or replica.scheduler.has_work):
                    exit_code = EXIT_OK
                    return
            is_boundary = False
            if way is not Way.ON:
                replica.profiler.begin()
            replica.apply(comm.broadcast_ints(reader.message(way)))
            if replica.scheduler.has_work:
                started = time.perf_counter()
                computed = replica.step()
                is_boundary = True
                if way is not Way.ON:
                    reader.note_launched(started, computed)
            is_boundary = True
            if on_step is not None:
                on_step()
    except PeerLost:
        is_boundary = False  # there is nobody to tell
        raise
    except DoorbellError as error:
        exit_code = error.exit_code
        raise
    finally:
        if is_boundary:
            _end(replica, comm.broadcast_ints(leader.take_message(exit_code)))
            leader.drop_all()


def _end(replica: Replica, ints: list[int]) -> int:
    """Take in the last message; drop what it leaves unfinished, so that a later run starts clean. *Collective*."""
    exit_code = replica.apply(ints).exit_code
    replica.drop_all()
    if exit_code == EXIT_OK:
        replica.check_agreement()
    return exit_code


def _admit(leader: Leader, source: RequestSource, look_ahead: int, is_idle: bool) -> None:
    wait_s = KEEP_ALIVE_S if is_idle else 0.0
    while leader.num_open < look_ahead and not source.is_exhausted:
        request = source.poll(wait_s)
        if request is None:
            return
        leader.add(request)
        wait_s = 0.0


@torch.inference_mode()
@loaded_objects_set_aside()
def follow(replica: Replica) -> int:
    """Every other rank: repeat rank 0's schedule until it says stop. Returns the exit code rank 0 named. *Collective*."""
    while True:
        ints = replica.comm.broadcast_ints(None)
        if StepMessage.decode(ints).exit_code != GO_ON:
            return _end(replica, ints)
        replica.profiler.begin()
        replica.apply(ints)
        if replica.scheduler.has_work and replica.step() is not None:
            replica.profiler.end(is_synced=False)
