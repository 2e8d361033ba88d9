"""The loop around the step: rank 0 leads, the others follow, and every way out is told to all.

A run ends in one of three ways. Rank 0 says so in its last message (done, interrupted, output failed): all ranks leave with the
same code. Or a rank fails in the middle of a step: no message can be sent then, and the peers learn of it through `comm.watch`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from engine.graph.burst import (
    MAX_BURST_STEPS,
    MAX_SPECULATIVE_STEPS,
    NUM_SPECULATIVE_BEHIND,
    NUM_STEPS_BEHIND,
    Burst,
)
from engine.leader import Leader
from engine.replica import Computed, Replica
from engine.request import Request
from engine.scheduler import ScheduledRow
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


@dataclass
class RunStats:
    """Counts and seconds of a run, prefill and decode apart.

    A token is a decode token if it came out of a step that computed its row's last token alone (or with drafts after it), past
    the prompt; all others are prefill, also those computed again after a preemption. The time of a step that holds both kinds is
    shared out in proportion to the tokens it computed.

    `num_waits`: steps with decode tokens after which the host waited for the device before it could go on, as it does after every
    step but those of a burst.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_steps: int = 0
    num_waits: int = 0

    @property
    def waits_per_token(self) -> float:
        """Host waits a decode token."""
        return self.num_waits / self.decode_tokens if self.decode_tokens else 0.0

    @property
    def prefill_tok_s(self) -> float:
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tok_s(self) -> float:
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0

    def add_step(self, rows: list[ScheduledRow], seconds: float, num_extra: int = 0, is_waited: bool = True) -> None:
        """`num_extra`: tokens that the step gave beyond one a row, by drafts that held. `is_waited`: before anything was launched
        behind it."""
        decode = [row.num_tokens for row in rows if row.is_decode]
        num_computed = sum(row.num_tokens for row in rows)
        num_prefill = num_computed - sum(decode)
        share = sum(decode) / num_computed
        self.decode_tokens += len(decode) + num_extra
        self.prefill_tokens += num_prefill
        self.decode_s += share * seconds
        self.prefill_s += (1.0 - share) * seconds
        self.num_steps += 1
        self.num_waits += bool(decode) and is_waited

    def add_burst_step(self, num_tokens: int, seconds: float) -> None:
        """`num_tokens`: those that rows still open could use. `seconds`: since the step before was read."""
        self.decode_tokens += num_tokens
        self.decode_s += seconds
        self.num_steps += 1


def no_interrupt() -> int | None:
    return None


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
    reader = BurstReader(replica, leader, stats, partial(_admit, leader, source, look_ahead, is_idle=False), interrupt, on_step)
    try:
        while True:
            _check_interrupt(interrupt)
            is_continued = reader.read_on()
            if not is_continued:
                _admit(leader, source, look_ahead, is_idle=not (leader.has_news or replica.scheduler.has_work))
            if source.is_exhausted and not (leader.has_news or replica.scheduler.has_work):
                exit_code = EXIT_OK
                return
            is_boundary = False
            if not is_continued:
                replica.profiler.begin()
            replica.apply(comm.broadcast_ints(leader.take_message(None, *reader.next_steps(), is_continued)))
            if replica.scheduler.has_work:
                started = time.perf_counter()
                computed = replica.step()
                is_boundary = True
                if replica.burst is not None:
                    if not is_continued:
                        reader.begin(started, None if computed is None else computed.rows)
                else:
                    num_extra = _receive(replica, leader, computed)
                    replica.profiler.end(is_synced=computed.chosen is not None or computed.logits is not None)
                    stats.add_step(computed.rows, time.perf_counter() - started, num_extra)
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


class BurstReader:
    """Rank 0's way through a burst: read its steps in order, until a message is due.

    `admit()` lets rows in that are there; the others are as in `lead`.
    """

    def __init__(
        self,
        replica: Replica,
        leader: Leader,
        stats: RunStats,
        admit: Callable[[], None],
        interrupt: Callable[[], int | None],
        on_step: Callable[[], None] | None,
    ):
        self._replica, self._leader, self._stats = replica, leader, stats
        self._admit, self._interrupt, self._on_step = admit, interrupt, on_step
        self._last_read_s = 0.0  # when the last step came in, or the burst began
        self._first_rows: list[ScheduledRow] | None = None

    def begin(self, started: float, rows: list[ScheduledRow] | None) -> None:
        """A burst has begun. `rows`: what its first step computed, if that was one beside bursts."""
        self._last_read_s, self._first_rows = started, rows

    def read_on(self) -> bool:
        """Whether the next message continues the running burst. If not, either none runs, or all of its tokens that a row could
        use have been read, and it is over."""
        burst = self._replica.burst
        while burst is not None and burst.num_unread and self._leader.is_any_open(burst.sequences):
            if burst.num_unread <= (NUM_SPECULATIVE_BEHIND if burst.num_drafts else NUM_STEPS_BEHIND):
                self._admit()
                if not self._leader.has_change and self._num_steps_more(burst):
                    return True
            _check_interrupt(self._interrupt)
            self._read_step()
        return False

    def next_steps(self) -> tuple[int, int, bool]:
        """How many steps the next message may allow, of the running burst beyond those launched or of a new one; with how many
        drafts; and whether the device chooses the tokens after a step beside bursts."""
        replica, leader, burst = self._replica, self._leader, self._replica.burst
        if replica.burst_backend is None:
            return 0, 0, False
        if burst is not None and burst.num_unread > 0 and not leader.has_change:
            return self._num_steps_more(burst), burst.num_drafts, False
        num_drafts = leader.num_drafts_alone(replica.burst_backend.speculable)
        return self._limit(leader.steps_alone(num_drafts), num_drafts), num_drafts, leader.is_chosen_alone()

    def _num_steps_more(self, burst: Burst) -> int:
        """By how many steps the running burst may be continued; by none if another number of drafts is due."""
        if burst.num_drafts != self._leader.num_drafts_alone(self._replica.burst_backend.speculable, burst.num_drafts):
            return 0
        steps = self._leader.steps_alone(burst.num_drafts, burst.sequences) - burst.num_unread
        return self._replica.room_ahead(max(0, self._limit(steps, burst.num_drafts)))

    def _limit(self, num_steps: int, num_drafts: int) -> int:
        return min(MAX_SPECULATIVE_STEPS if num_drafts else MAX_BURST_STEPS, num_steps)

    def _read_step(self) -> None:
        burst = self._replica.burst
        num_taken = self._leader.receive_burst(burst.sequences, self._replica.read_burst(), burst.num_drafts)
        now = time.perf_counter()
        if self._first_rows is not None:
            self._stats.add_step(self._first_rows, now - self._last_read_s, is_waited=False)
            self._first_rows = None
        else:
            self._stats.add_burst_step(num_taken, now - self._last_read_s)
        self._last_read_s = now
        if self._on_step is not None:
            self._on_step()


def _receive(replica: Replica, leader: Leader, computed: Computed) -> int:
    """Returns how many tokens were chosen beyond one a row."""
    if computed.chosen is None:
        return leader.receive(computed.rows, computed.logits)
    leader.receive_choice(computed.chosen.sequences, replica.read_choice(computed.chosen))
    return 0


def _check_interrupt(interrupt: Callable[[], int | None]) -> None:
    code = interrupt()
    if code is not None:
        raise Interrupted(code)


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
