"""SIGINT and SIGTERM: the first asks the run to end at the next step, the second forces it, and so does time.

A handler that raised would tear a rank out of a collective that its peers are still in. So the first signal only leaves a note,
which the loop reads between steps; only before the loop, when no peer waits for us yet, does it raise.

Python runs a handler only when the main thread comes back to the interpreter, and a rank that waits inside a C++ library for a
peer that will never come does not. A thread therefore hears the signals too, through the wake-up descriptor that the
interpreter's own C handler writes to, and ends a process that does not end itself.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from launch.errors import EXIT_INTERRUPTED, EXIT_TERMINATED

_CODES = {signal.SIGINT: EXIT_INTERRUPTED, signal.SIGTERM: EXIT_TERMINATED}

# torchrun passes a signal on, a terminal gives it to every process of the foreground, and a person who lets go of the keys
# presses no faster: the same signal again within this time is the same press.
SAME_PRESS_S = 0.5

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SignalNote:
    """What the user or the system has asked for so far.

    `exit_code`: None, or the code to leave with. `on_signal(code)`, if set, runs in the main thread inside the handler of
    the first signal and may raise. `on_force(code)` runs in a thread of its own before the process is ended at once: at a
    second signal, or when `patience_s` seconds after the first it still runs.
    """

    def __init__(self, patience_s: float = 1.0) -> None:
        self.exit_code: int | None = None
        self.patience_s = patience_s
        self.on_signal: Callable[[int], None] | None = None
        self.on_force: Callable[[int], None] | None = None

    def install(self) -> None:
        """Take over both signals. *Who*: the main thread, once a process."""
        # Both ends live as long as the process: closing one would turn every later signal into an error message.
        self._hears, self._speaks = socket.socketpair()
        self._speaks.setblocking(False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._speaks.fileno(), warn_on_full_buffer=False)
        for number in _CODES:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.exit_code is not None:
            return  # the listener counts presses
        self.exit_code = _CODES[signal.Signals(number)]
        if self.on_signal is not None:
            self.on_signal(self.exit_code)

    def _listen(self) -> None:
        first = self._next_signal(None)
        pressed = time.monotonic()
        while True:
            # `patience_s` is read again each time: the run may come to its loop, or to its end, after the first signal.
            left_s = pressed + self.patience_s - time.monotonic()
            if left_s <= 0:
                break
            number = self._next_signal(min(left_s, 0.1))
            if number is not None and not (number == first and time.monotonic() - pressed < SAME_PRESS_S):
                break
        code = _CODES[first]
        try:
            if self.on_force is not None:
                self.on_force(code)
        finally:
            os._exit(code)

    def _next_signal(self, timeout_s: float | None) -> signal.Signals | None:
        """The next SIGINT or SIGTERM, or None when `timeout_s` passed without one."""
        while select.select([self._hears], [], [], timeout_s)[0]:
            number = self._hears.recv(1)[0]
            if number in _CODES:
                return signal.Signals(number)
        return None


def give_up_signals() -> None:
    """From now on both signals end the process at once, without a traceback: there is nothing left to save."""
    for number in _CODES:
        signal.signal(number, signal.SIG_DFL)


def end_with_parent() -> None:
    """Have the kernel send SIGTERM when the parent (torchrun's agent) ends, however it ends.

    torchrun gives every rank a session of its own, so nothing else would tell the ranks that it was killed.
    """
    parent = os.getppid()
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        return  # not Linux
    if os.getppid() != parent:  # it ended before the kernel knew
        os.kill(os.getpid(), signal.SIGTERM)
