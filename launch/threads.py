"""How many CPU threads a rank should compute with, and why.

torchrun sets OMP_NUM_THREADS=1 for more than one process, which leaves most cores idle; unset, every rank takes all
cores and they fight. Neither is anybody's choice. This file divides what the machine really gives by the ranks on it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from launch.environment import Environment
from launch.errors import UsageError


@dataclass(frozen=True)
class ThreadChoice:
    """`number` of threads for torch in this process; `reason`, one clause for the start summary."""

    number: int
    reason: str


def choose_threads(
    environment: Environment, requested: int | None = None, num_cores: int | None = None
) -> ThreadChoice:
    """Threads of this rank: the user's number (`requested` is `--threads`), else cores divided by local ranks.

    `num_cores` defaults to `count_cores()`. *Raises* `UsageError` for a number below one.
    """
    choices = (
        (requested, "--threads"),
        (environment.num_threads, "DOORBELL_NUM_THREADS"),
        (environment.omp_num_threads, "OMP_NUM_THREADS"),
    )
    for number, source in choices:
        if number is None:
            continue
        if number < 1:
            raise UsageError(f"{source} must be at least 1, not {number}")
        return ThreadChoice(number, f"set by {source}")
    num_cores = count_cores() if num_cores is None else num_cores
    ranks = environment.local_world_size
    number = max(1, num_cores // ranks)
    cores = f"{num_cores} core{'s' * (num_cores != 1)}"
    return ThreadChoice(number, cores if ranks == 1 else f"{cores} for {ranks} ranks")


def count_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use: affinity, one per set of hyper-threads, cgroup quota.

    `root` is where /proc and /sys are looked up. What cannot be read does not limit.
    """
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(root, cpu) for cpu in allowed}
    quota = _quota_cores(root)
    return len(cores) if quota is None else max(1, min(len(cores), math.ceil(quota)))


def _siblings(root: Path, cpu: int) -> str:
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or str(cpu)


def _quota_cores(root: Path) -> float | None:
    """CPU seconds a second that the tightest enclosing cgroup (either version) allows; None without a limit."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        mount = root / "sys/fs/cgroup"
        if "cpu" in controllers.split(","):
            mount = mount / "cpu"
        elif controllers:
            continue
        # A limit may stand on any ancestor; inside a container the named path is often not visible, only its root is.
        folder = mount / name.lstrip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(mount):
                break
            limits.append(_limit(level))
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _limit(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit():  # "max" and -1 mean no limit
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
