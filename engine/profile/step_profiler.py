"""What steps and the loop around them tell a profiler; and the one that listens to nothing, of a run that is not profiled."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from engine.profile.marks import NO_MARKS, Marks, NoMarks
from engine.scheduler import ScheduledRow


class StepProfiler(Protocol):
    """What the loop and the steps tell of what they do. *Collective* in that all ranks make the same calls, but for `note_read`.

    `is_active`: whether any step is profiled.
    """

    is_active: bool

    def new_marks(self) -> Marks:
        """Of a step that is due, or of a capture."""

    def begin(self) -> None:
        """The message of the next step is due."""

    def marks(self, rows: list[ScheduledRow]) -> Marks:
        """Of the step of `rows`, which is computed next, by itself."""

    def end(self, is_synced: bool) -> None:
        """That step is over, tokens chosen. `is_synced`: the host has waited for the device."""

    def begin_burst(self, num_rows: int, is_filtered: bool, num_drafts: int = 0) -> None: ...

    def launching(self, num_steps: int) -> AbstractContextManager[None]:
        """Around the launches of a burst's next `num_steps` steps."""

    def is_due(self) -> bool:
        """Whether the next step of the burst is to be profiled."""

    def settle(self, marks: Marks) -> None:
        """The events of `marks` are about to be recorded again."""

    def end_burst_step(self, marks: Marks) -> None:
        """A step of the burst has been launched."""

    def note_read(self) -> None:
        """The next step of the burst has been read."""


class NoProfiler:
    """Of a run that is not profiled: nothing happens."""

    is_active = False

    def new_marks(self) -> Marks:
        return NO_MARKS

    def begin(self) -> None: ...

    def marks(self, rows: list[ScheduledRow]) -> NoMarks:
        return NO_MARKS

    def end(self, is_synced: bool) -> None: ...

    def begin_burst(self, num_rows: int, is_filtered: bool, num_drafts: int = 0) -> None: ...

    def launching(self, num_steps: int) -> AbstractContextManager[None]:
        return nullcontext()

    def is_due(self) -> bool:
        return False

    def settle(self, marks: Marks) -> None: ...

    def end_burst_step(self, marks: Marks) -> None: ...

    def note_read(self) -> None: ...


NO_PROFILER = NoProfiler()
