"""64-bit words in memory that several processes share: ordered loads and stores, and waiting with a deadline.

The only file of the CPU path that waits for a peer or orders memory. Not a lock and not an atomic read-modify-write:
every word has exactly one writer.

**Atomicity.** A word is read and written through `memoryview` of format `Q`, whose CPython implementation is an
eight-byte memcpy on an aligned address: one move on x86-64 and AArch64, so a word is never torn.

**Order.** x86 keeps loads in order, stores in order, and no store passes an earlier load, which would be enough but for
the non-temporal stores that a large memcpy may use. AArch64 keeps nothing. `fence` serves both. It takes and drops an
uncontended lock twice; between the two lies "release, then acquire" on one thread. On AArch64 a store-release followed
in program order by a load-acquire is itself ordered (RCsc), everything before the first is ordered before it and
everything after the second after it: together a full barrier. On x86 each acquisition is a LOCK-prefixed instruction, a
full barrier which also drains write-combining buffers. The interpreter runs byte code in order, so no compiler can move
our accesses across the calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from launch.errors import PeerLost, PeerTimeout, WaitRecord

WORD_STRIDE = 16  # 64-bit units: one word per 128 bytes, the pair of cache lines that x86 prefetches together

_YIELDS = 200  # turns given away before sleeping: well under a millisecond when nobody else wants the core
_FIRST_SLEEP_S, _LAST_SLEEP_S = 50e-6, 1e-3

# Private to `fence`, held for a few instructions. Re-entrant, because a signal handler that reads a word may interrupt
# the main thread's own `fence`.
_lock = threading.RLock()


def fence() -> None:
    """Order every memory access before the call against every one after it. About 0.1 us; see the module's argument."""
    _lock.acquire()
    _lock.release()
    _lock.acquire()
    _lock.release()


def _nobody(peer: int) -> PeerLost | None:
    return None


@dataclass(frozen=True)
class Patience:
    """How to wait for a peer.

    `deadline_s`: give up after so many seconds. `num_spins`: polls before the core is offered to others; about 0.05 us
    each. `lost`: asked about the peer now and then during a long wait; an answer ends it at once.
    """

    deadline_s: float = 600.0
    num_spins: int = 4000
    lost: Callable[[int], PeerLost | None] = _nobody

    @classmethod
    def for_ranks(
        cls, local_ranks: int, deadline_s: float, lost: Callable[[int], PeerLost | None] = _nobody
    ) -> Patience:
        """Spin where every rank has a core of its own; where ranks share cores, a spin delays the one waited for."""
        has_own_core = local_ranks <= len(os.sched_getaffinity(0))
        return cls(deadline_s, cls.num_spins if has_own_core else 20, lost)


class Words:
    """An array of words, each alone on its cache lines, inside `buffer` (memory shared between processes)."""

    def __init__(self, buffer: memoryview):
        self._cells = buffer.cast("B").cast("Q")

    def __len__(self) -> int:
        return len(self._cells) // WORD_STRIDE

    def load_relaxed(self, idx: int) -> int:
        """The word, without any order: for its own writer, or before a `fence`."""
        return self._cells[idx * WORD_STRIDE]

    def store_relaxed(self, idx: int, value: int) -> None:
        """Write the word, without any order: after a `fence` that covers several stores."""
        self._cells[idx * WORD_STRIDE] = value

    def load_acquire(self, idx: int) -> int:
        """The word; what its writer did before the paired `store_release` is visible afterwards."""
        value = self._cells[idx * WORD_STRIDE]
        fence()
        return value

    def store_release(self, idx: int, value: int) -> None:
        """Write the word after everything before this call, for a peer's `load_acquire` or `wait_equal`."""
        fence()
        self._cells[idx * WORD_STRIDE] = value

    def wait_equal(self, idx: int, expected: int, patience: Patience, operation: str, epoch: int, peer: int) -> None:
        """Return once the word is exactly `expected`; acquires, as `load_acquire` does.

        Equality, not order: a word that is ahead means that somebody lapped us, and must not pass as "arrived".
        *Raises* `PeerTimeout` naming `peer`, `operation` and `epoch` at the deadline; whatever `patience.lost` found
        before.
        """
        cells, at = self._cells, idx * WORD_STRIDE
        for _ in range(patience.num_spins):
            if cells[at] == expected:
                fence()
                return
        self._wait_slowly(at, expected, patience, operation, epoch, peer)
        fence()

    def _wait_slowly(self, at: int, expected: int, patience: Patience, operation: str, epoch: int, peer: int) -> None:
        cells = self._cells
        for _ in range(_YIELDS):
            if cells[at] == expected:
                return
            os.sched_yield()
        deadline = time.monotonic() + patience.deadline_s
        sleep_s = _FIRST_SLEEP_S
        while cells[at] != expected:
            lost = patience.lost(peer)
            if lost is not None:
                if cells[at] == expected:  # it may have written the word and left before we asked
                    return
                raise lost
            if time.monotonic() >= deadline:
                record = WaitRecord(operation, epoch, peer, cells[at], expected)
                raise PeerTimeout(
                    peer,
                    f"rank {peer} did not arrive at {operation} number {epoch} within {patience.deadline_s:g} s "
                    f"(its word is {record.seen}, expected {expected})",
                    record,
                )
            time.sleep(sleep_s)
            sleep_s = min(sleep_s * 1.5, _LAST_SLEEP_S)
