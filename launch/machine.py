"""What this machine has: its memory, shared memory and processor; more in `launch.probe` for GPUs."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP_V2 = Path("/sys/fs/cgroup")
CGROUP_V1_MEMORY = CGROUP_V2 / "memory"
_NO_LIMIT_BYTES = 1 << 60  # version 1 writes "no limit" as a number near 2**63


def available_memory_bytes() -> int:
    """Host memory that can be taken without swapping: the kernel's estimate, and no more than the cgroup allows."""
    available = _meminfo_available()
    limit, used = _read_int(CGROUP_V2 / "memory.max"), _read_int(CGROUP_V2 / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


def memory_limit_bytes(v2: Path = CGROUP_V2, v1: Path = CGROUP_V1_MEMORY) -> int | None:
    """The memory limit of this process's container, None without one. Seen from inside, its cgroup is the root one."""
    limit = _read_int(v2 / "memory.max")
    if limit is None:
        limit = _read_int(v1 / "memory.limit_in_bytes")
    return None if limit is None or limit >= _NO_LIMIT_BYTES else limit


def shared_memory_bytes(folder: Path = Path("/dev/shm")) -> tuple[int, int]:
    """Size and free bytes of the file system of POSIX shared memory. *Raises* `OSError` when there is none."""
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable line")


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def cpu_name() -> str:
    """The processor's own name, as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Processor"):
            return value.strip()
    return "unknown CPU"
