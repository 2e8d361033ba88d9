"""Rank 0 reads what the device chose, and says how the next message goes on from there.

The device is to have its next step before it has done the last one. So a message is due while some steps are still unread: to
let the same rows go on, or to change the rows. Which rows end with the last step that was launched is known beforehand, as far as
they end for their length; they leave, others join, and the step that lets them in takes its tokens from the device. A row that
ends for another reason has taken part in a step too many when that is read: its tokens count nowhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum, auto

from engine.graph.burst import (
    MAX_BURST_STEPS,
    MAX_SPECULATIVE_STEPS,
    NUM_SPECULATIVE_BEHIND,
    NUM_STEPS_BEHIND,
    NUM_STEPS_BEHIND_CHANGE,
    Burst,
)
from engine.leader import Leader
from engine.replica import Computed, Replica
from engine.run_stats import RunStats
from engine.scheduler import ScheduledRow


class Way(Enum):
    """How the next message goes on from the steps that were launched last."""

    ANEW = auto()  # all that a row could use of them has been read, and they are over
    ON = auto()  # more steps of the same rows
    AHEAD = auto()  # with another step, whose tokens the device knows, before theirs have been read


class BurstReader:
    """Rank 0's way through the steps whose tokens the device chooses: read them in order, until a message is due.

    `admit()` lets rows in that are there; `check_interrupt()` raises when the run is to end; `on_step` as in `lead`.
    """

    def __init__(
        self,
        replica: Replica,
        leader: Leader,
        stats: RunStats,
        admit: Callable[[], None],
        check_interrupt: Callable[[], None],
        on_step: Callable[[], None] | None,
    ):
        self._replica, self._leader, self._stats = replica, leader, stats
        self._admit, self._check_interrupt, self._on_step = admit, check_interrupt, on_step
        self._last_read_s = 0.0  # when the last step came in, or the first of those since was launched
        self._first_rows: list[ScheduledRow] | None = None  # what the next step to be read computed, if that was more than decode
        self._last: Burst | None = None  # with steps to be read, while the next have been launched

    def read_on(self) -> Way:
        """Read what has to be read before the next message, and say which way that goes."""
        burst, leader = self._replica.burst, self._leader
        while burst is not None and burst.num_unread and leader.is_any_open(burst.sequences):
            is_ending = burst.num_unread <= (NUM_SPECULATIVE_BEHIND if burst.num_drafts else NUM_STEPS_BEHIND)
            if is_ending or burst.num_unread <= NUM_STEPS_BEHIND_CHANGE:
                self._admit()
                has_change = leader.has_change or not self._num_steps_more(burst)
                if is_ending and not has_change:
                    return Way.ON
                can_go_ahead = not self._num_drafts(burst.num_drafts) and self._replica.can_go_ahead()
                if has_change and can_go_ahead and leader.steps_ahead(burst) is not None:
                    return Way.AHEAD
            self._read_step(burst)
        return Way.ANEW

    def message(self, way: Way) -> list[int]:
        """The next one, which goes that way."""
        replica, leader, burst = self._replica, self._leader, self._replica.burst
        if replica.burst_backend is None:
            return leader.take_message()
        if way is Way.ON:
            return leader.take_message(burst_steps=self._num_steps_more(burst), num_drafts=burst.num_drafts, is_continued=True)
        if way is Way.AHEAD:
            self._last, num_steps = burst, self._limit(leader.steps_ahead(burst), 0)
            leader.leave_ahead(burst)
            return leader.take_message(burst_steps=num_steps, is_chosen_alone=True, is_ahead=True)
        num_drafts = self._num_drafts()
        num_steps = self._limit(leader.steps_alone(num_drafts), num_drafts)
        return leader.take_message(burst_steps=num_steps, num_drafts=num_drafts, is_chosen_alone=leader.is_chosen_alone())

    def note_launched(self, started: float, computed: Computed | None) -> None:
        """The next step, or the first of several, has been launched: `computed` as `Replica.step` gave it. The tokens before it
        are read now; its own are, if the device did not choose them."""
        replica = self._replica
        if self._last is None:
            self._last_read_s = started
        else:
            while self._last.num_unread and self._leader.is_any_open(self._last.sequences):
                self._read_step(self._last)
            self._last = None
        if replica.burst is None:
            num_extra = self._leader.receive(computed.rows, computed.logits)
            replica.profiler.end(is_synced=computed.logits is not None)
            self._stats.add_step(computed.rows, time.perf_counter() - started, num_extra)
            return
        self._first_rows = None if computed is None else computed.rows
        if computed is not None and replica.profiler.is_active:
            self._read_step(replica.burst)
            replica.profiler.end(is_synced=True)

    def _num_steps_more(self, burst: Burst) -> int:
        """By how many steps the running burst may be continued; by none if other rows or another number of drafts are due."""
        if not burst.is_settled or burst.num_drafts != self._num_drafts(burst.num_drafts):
            return 0
        steps = self._leader.steps_alone(burst.num_drafts, burst.sequences) - burst.num_unread
        return self._replica.room_ahead(max(0, self._limit(steps, burst.num_drafts)))

    def _num_drafts(self, running: int | None = None) -> int:
        """As `Leader.num_drafts_alone`."""
        replica = self._replica
        return self._leader.num_drafts_alone(replica.burst_backend.speculable, replica.scheduler.limits.max_batch, running)

    def _limit(self, num_steps: int, num_drafts: int) -> int:
        return min(MAX_SPECULATIVE_STEPS if num_drafts else MAX_BURST_STEPS, num_steps)

    def _read_step(self, burst: Burst) -> None:
        self._check_interrupt()
        is_last, rows = burst is self._last, self._first_rows or []
        # A row that has ended meanwhile has computed a token that nobody wants.
        rows = [row for row in rows if not row.is_decode or self._leader.is_any_open([row.sequence])]
        num_taken = self._leader.receive_burst(burst.sequences, self._replica.read(burst), burst.num_drafts, is_last)
        now = time.perf_counter()
        if rows:
            is_waited = burst.num_launched == 1 and not is_last  # nothing is behind it
            self._stats.add_step(rows, now - self._last_read_s, is_waited=is_waited)
        else:
            self._stats.add_burst_step(num_taken, now - self._last_read_s)
        self._last_read_s, self._first_rows = now, None
        if self._on_step is not None:
            self._on_step()
