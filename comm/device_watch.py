"""The deadline of device waits, seen from the host: a record in host-mapped memory that kernels write when they give up."""

from __future__ import annotations

import ctypes

from launch.errors import PeerTimeout, WaitRecord

SITES = {
    1: "all_reduce_lamport",
    2: "all_reduce_lamport_norm",
    3: "all_reduce_one_shot",
    4: "all_reduce_two_shot, parts",
    5: "all_reduce_two_shot, shares",
    6: "signal_put",
    7: "signal_take",
    8: "all_reduce_sentinel",
    9: "argmax_lamport",
    10: "draw_lamport",
    11: "gather_lamport",
    12: "link_echo",
    13: "all_reduce_two_shot_norm, begin",
    14: "all_reduce_two_shot_norm, end",
}


class _Record(ctypes.Structure):
    """`WaitRecord` of `comm/cuda/wait.cuh`."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("aborted", "site", "epoch", "peer", "seen", "expected")]


class WatchParams(ctypes.Structure):
    """`Watch` of `comm/cuda/wait.cuh`."""

    _fields_ = [
        ("record", ctypes.c_uint64), ("aborted", ctypes.c_uint64), ("limit_ns", ctypes.c_uint64), ("is_shared", ctypes.c_uint32),
    ]  # fmt: skip


class DeviceWatch:
    """One rank's record. `params` goes into every kernel that waits, each for up to `limit_s`; `check` after results matter.

    `ranks_per_gpu`: above 1, no kernel starts early behind one that waits.
    """

    def __init__(self, deadline_s: float, ranks_per_gpu: int = 1):
        import cupy

        self._memory = cupy.cuda.PinnedMemory(ctypes.sizeof(_Record), cupy.cuda.runtime.hostAllocMapped)
        self._record = _Record.from_address(self._memory.ptr)
        ctypes.memset(self._memory.ptr, 0, ctypes.sizeof(_Record))
        self.limit_s = deadline_s
        self._aborted = cupy.cuda.Memory(256)
        cupy.cuda.runtime.memset(self._aborted.ptr, 0, 256)
        # With unified addressing the device finds host-mapped memory at the host's own address.
        self.params = WatchParams(self._memory.ptr, self._aborted.ptr, int(deadline_s * 1e9), ranks_per_gpu > 1)

    def give_up(self, site: int, epoch: int, peer: int, seen: int, expected: int) -> None:
        """Record from the host that a wait of this rank expired, unless a kernel already has. `check` raises from here on."""
        if not self._record.aborted:
            values = {"site": site, "epoch": epoch, "peer": peer, "seen": seen, "expected": expected, "aborted": 1}
            for name, value in values.items():  # `aborted` last
                setattr(self._record, name, value)

    def check(self) -> None:
        """*Raises* `PeerTimeout` if a kernel of this rank gave up. Reads host memory only: no synchronisation."""
        record = self._record
        if record.aborted:
            site = SITES.get(record.site, f"site {record.site}")
            raise PeerTimeout(
                record.peer,
                f"rank {record.peer} did not arrive at {site} (call {record.epoch}) before the deadline",
                WaitRecord(site, record.epoch, record.peer, record.seen, record.expected),
            )
