"""SIGINT and SIGTERM: the first asks the run to end at the next step, the second forces it.

A handler that raised would tear a rank out of a collective that its peers are still in. So the first signal only leaves a note,
which the loop reads between steps; only before the loop, when no peer waits for us yet, does it raise.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType

from launch.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}


class SignalNote:
    """What the user or the system has asked for so far.

    `exit_code`: None, or the code to leave with. `on_signal(code)`, if set, runs inside the handler and may raise or leave the
    process. `on_force()` runs before a second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None
        self.on_signal: Callable[[int], None] | None = None
        self.on_force: Callable[[], None] | None = None

    def install(self) -> None:
        for number in _CODES:
            signal.signal(number, self._handle)

    def asked(self) -> int | None:
        return self.exit_code

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            if self.on_force is not None:
                self.on_force()
            os._exit(self.exit_code)
        self.exit_code = _CODES[signal.Signals(number)]
        if self.on_signal is not None:
            self.on_signal(self.exit_code)
