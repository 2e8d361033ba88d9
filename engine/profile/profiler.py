"""Decides which steps of a run are profiled, and gathers their times while the run goes on.

A profiled step has events at its stage borders, which costs time of its own: where neighbouring kernels would overlap
(programmatic dependent launch), an event between them ends that. So the stages are those of the profiled step, and steps of equal
work without inner events are timed beside them; how much longer the profiled ones take is the overhead that is reported.

Of steps taken one at a time every second one of equal work is profiled. Of the steps of bursts one in `BURST_PERIOD` is, so that
its events are over before its graph is replayed, and the host need not wait for them. All ranks count the same steps, so all
profile the same ones.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.graph.burst import MAX_BURST_STEPS, NUM_STEPS_BEHIND
from engine.profile.clock import Clock, Stamp
from engine.profile.host_syncs import HostSyncCount
from engine.profile.marks import NO_MARKS, Launches, Marks, StageMarks
from engine.profile.profile import Profile
from engine.profile.timed_step import BURST, DECODE, MIXED, PREFILL, SPECULATIVE, TimedStep, Work
from engine.scheduler import ScheduledRow
from kernels.launch_kernel import Kernel

BURST_PERIOD = MAX_BURST_STEPS + NUM_STEPS_BEHIND  # no more steps than this are launched and not yet read
MAX_PROFILED = 64  # steps of a kind; a long run is profiled at its beginning, which bounds memory and the trace file


@dataclass
class _Pending:
    """A step whose stamps may not be over yet. `start`: of a burst's step, the end of the one before."""

    step: TimedStep
    start: Stamp
    end: Stamp
    marks: Marks


@dataclass
class _Burst:
    """`end`: of its last step; `unread`: steps that were launched, in order; `read_s`: when the one before them was read."""

    work: Work
    end: Stamp = None
    unread: deque[TimedStep] = field(default_factory=deque)
    read_s: float | None = None


class Profiler:
    """`StepProfiler` with the times of one rank in `steps`, in order. `clock`: of the device that computes."""

    is_active = True

    def __init__(self, clock: Clock, max_profiled: int = MAX_PROFILED):
        self.clock, self._max_profiled = clock, max_profiled
        self.restart()

    def restart(self, is_warm: bool = False) -> None:
        """Forget all steps. Not within a burst. `is_warm`: nothing starts up any more, so that the first steps are as good as
        others, and no host syncs are counted, which would slow them down."""
        self._is_warm = is_warm
        self.steps: list[TimedStep] = []
        self._pending: deque[_Pending] = deque()
        self._num_profiled: Counter[str] = Counter()
        self._turns: Counter[Work] = Counter()
        self._origin: Stamp | None = None
        self._origin_us = 0.0
        self._begun: tuple[Stamp, float] | None = None
        self._open: _Pending | None = None
        self._was_synced = False
        self._syncs: HostSyncCount | None = None
        self._own_before = 0
        self._burst: _Burst | None = None
        self._replayed: set[Work] = set()
        self._since_profiled = BURST_PERIOD

    def profile(self) -> Profile:
        """Of all steps so far. Waits for the last of them."""
        self.collect(is_waiting=True)
        return Profile.of(self.steps)

    def new_marks(self) -> StageMarks:
        return StageMarks(self.clock)

    def collect(self, is_waiting: bool = False) -> None:
        """Read the times of the steps that are over; of all steps if `is_waiting`."""
        while self._pending and (is_waiting or self.clock.is_over(self._pending[0].end)):
            self._read_first()

    # -- steps taken one at a time -----------------------------------------------------------------------------------

    def begin(self) -> None:
        if self._syncs is not None:  # the step before has failed
            self._syncs.stop()
            self._syncs = None
        self.collect()
        is_wanted = any(self._is_wanted(kind) for kind in (PREFILL, MIXED, DECODE))
        self._begun = (self.clock.stamp(), time.perf_counter()) if is_wanted else None

    def marks(self, rows: list[ScheduledRow]) -> Marks:
        work = Work.of(rows)
        if self._begun is None or not self._is_wanted(work.kind):
            return NO_MARKS
        step = TimedStep(work, is_first=not self._is_warm and self._num_profiled[work.kind] == 0)
        marks: Marks = NO_MARKS
        if self._turns[work] % 2 == 0:
            self._num_profiled[work.kind] += 1
            marks = self.new_marks()
        self._turns[work] += 1
        self._open = _Pending(step, self._begun[0], None, marks)
        if step.is_first:
            self._own_before = Kernel.num_launched
            self._syncs = HostSyncCount() if self.clock.is_device else None
        return marks

    def end(self, is_synced: bool) -> None:
        now, pending, self._open = time.perf_counter(), self._open, None
        was_synced, self._was_synced = self._was_synced, is_synced
        if self._syncs is not None:
            pending.step.num_syncs, self._syncs = float(self._syncs.stop()), None
            pending.step.launches = Launches(Kernel.num_launched - self._own_before, None)
        if pending is None:
            return
        pending.marks.end("sampling")
        if is_synced and was_synced:
            pending.step.host_us = 1e6 * (now - self._begun[1])
        pending.end = self.clock.stamp()
        self._pending.append(pending)

    # -- bursts ------------------------------------------------------------------------------------------------------

    def begin_burst(self, num_rows: int, is_filtered: bool, num_drafts: int = 0) -> None:
        self._was_synced = False  # what the burst computes beyond the last token that is read still runs when it is over
        work = Work(SPECULATIVE if num_drafts else BURST, num_rows, num_rows * (num_drafts + 1), is_filtered=is_filtered)
        self._burst = _Burst(work) if self._is_wanted(work.kind) else None

    @contextmanager
    def launching(self, num_steps: int) -> Iterator[None]:
        is_new = self._burst is not None and self._turns[self._burst.work] == 0
        is_counted = is_new and not self._is_warm and self.clock.is_device
        count = HostSyncCount() if is_counted else None
        try:
            yield
        finally:
            num_syncs = None if count is None else count.stop()
        if num_syncs is not None and self._burst.unread:
            self._burst.unread[-1].num_syncs = num_syncs / num_steps

    def is_due(self) -> bool:
        burst = self._burst
        has_start = burst is not None and burst.end is not None  # the first step of a burst has no step before it
        return has_start and self._is_wanted(burst.work.kind) and self._since_profiled >= BURST_PERIOD

    def settle(self, marks: Marks) -> None:
        while any(pending.marks is marks for pending in self._pending):
            self._read_first()

    def end_burst_step(self, marks: Marks) -> None:
        burst = self._burst
        if burst is not None and marks is NO_MARKS and not self._is_wanted(burst.work.kind):
            burst = self._burst = None
        if burst is None:
            return
        end, step = self.clock.stamp(), TimedStep(burst.work)
        self._since_profiled = 1 if marks is not NO_MARKS else self._since_profiled + 1
        if marks is not NO_MARKS:
            self._num_profiled[burst.work.kind] += 1
            # A graph is brought to the GPU at its first replay.
            step.is_first = not self._is_warm and burst.work not in self._replayed
            self._replayed.add(burst.work)
        self._turns[burst.work] += 1
        burst.unread.append(step)
        if burst.end is not None:
            self._pending.append(_Pending(step, burst.end, end, marks))
        burst.end = end

    def note_read(self) -> None:
        burst = self._burst
        if burst is None or not burst.unread or not self.clock.is_device:  # a CPU has done all of a launch before the first read
            return
        now, step = time.perf_counter(), burst.unread.popleft()
        if burst.read_s is not None:
            step.host_us = 1e6 * (now - burst.read_s)
        burst.read_s = now

    # -- reading -----------------------------------------------------------------------------------------------------

    def _is_wanted(self, kind: str) -> bool:
        return self._num_profiled[kind] < self._max_profiled

    def _read_first(self) -> None:
        pending, between = self._pending.popleft(), self.clock.us_between
        step, marks = pending.step, pending.marks
        self.clock.wait(pending.end)
        if self._origin is None:
            self._origin = pending.start
        self._origin_us += between(self._origin, pending.start)
        self._origin = pending.start  # the next difference is a small one: CUDA gives it with 24 bits
        step.start_us, step.wall_us = self._origin_us, between(pending.start, pending.end)
        if isinstance(marks, StageMarks):
            step.spans = marks.spans(pending.start, pending.end)
            step.launches = marks.launches or step.launches
        self.steps.append(step)
