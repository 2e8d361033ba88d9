"""The process behind a peer: whether it lives, what it is doing, and ending exactly that one.

A pid is reused, so it names a process only together with its start time; once we hold a pidfd, not even that is needed.
Linux only. Without pidfds (kernels before 5.3, some sandboxes) /proc answers the same questions, less precisely.
"""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """What a rank tells its peers about its process. `namespace`: the machine and pid namespace `pid` belongs to."""

    pid: int
    start_ticks: int
    namespace: str

    @classmethod
    def of_this_process(cls) -> Identity:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        stat = _stat(os.getpid())
        return cls(os.getpid(), stat.start_ticks if stat else 0, f"{boot} {os.stat('/proc/self/ns/pid').st_ino}")


@dataclass(frozen=True)
class ProcessStat:
    """`state` is the letter of /proc (T stopped, Z zombie, D in a disk wait); `cpu_ticks` user and system time used."""

    state: str
    cpu_ticks: int
    start_ticks: int


class PeerProcess:
    """Handle of a peer's process; one that cannot be seen from here never counts as dead."""

    def __init__(self, identity: Identity, here: Identity):
        self.pid = identity.pid
        self._start_ticks = identity.start_ticks
        self.is_visible = identity.namespace == here.namespace
        self.pidfd = self._open() if self.is_visible else None

    def _open(self) -> int | None:
        try:
            pidfd = os.pidfd_open(self.pid)
        except (OSError, AttributeError):
            return None
        stat = _stat(self.pid)
        if stat is None or stat.start_ticks != self._start_ticks:
            os.close(pidfd)  # the pid is somebody else's already
            return None
        return pidfd

    def is_dead(self) -> bool:
        """Whether the process has ended; a zombie has. Safe in a signal handler."""
        if not self.is_visible:
            return False
        if self.pidfd is not None:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            return bool(poll.poll(0))
        stat = self.stat()
        return stat is None or stat.state in "ZX"

    def stat(self) -> ProcessStat | None:
        """What the kernel says about it now; None when it is gone or not visible from here."""
        stat = _stat(self.pid) if self.is_visible else None
        return stat if stat is not None and stat.start_ticks == self._start_ticks else None

    def kill(self) -> None:
        """SIGKILL exactly this process, stopped or not; nothing happens when it is gone."""
        try:
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self.stat() is not None:
                os.kill(self.pid, signal.SIGKILL)
        except OSError:
            pass  # gone, or not ours to kill

    def close(self) -> None:
        pidfd, self.pidfd = self.pidfd, None
        self.is_visible = False
        if pidfd is not None:
            os.close(pidfd)


def _stat(pid: int) -> ProcessStat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in parentheses, may itself hold spaces and parentheses. Field numbers: man 5 proc_pid_stat.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(state=fields[0], cpu_ticks=int(fields[11]) + int(fields[12]), start_ticks=int(fields[19]))
