"""What this machine has: memory now; more in `launch.probe` for GPUs."""

from __future__ import annotations

from pathlib import Path

CGROUP_V2 = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int:
    """Host memory that can be taken without swapping: the kernel's estimate, and no more than the cgroup allows."""
    available = _meminfo_available()
    limit, used = _read_int(CGROUP_V2 / "memory.max"), _read_int(CGROUP_V2 / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used))
    return available


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
