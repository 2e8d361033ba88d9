"""A barrier of flag words: the synchronisation of the one-shot all-reduce, and a collective by itself.

Every rank tells each peer "I have arrived at call `epoch`" by writing the epoch into the peer's own memory, and waits
on its own words only. The words alternate between two halves, and the test is equality:

- A fast peer may arrive at `epoch + 1` while a slow rank still waits for `epoch`; it then writes the other half.
- It cannot arrive at `epoch + 2`, which would overwrite the half waited for: that takes the slow rank's own arrival at
  `epoch + 1`.
- The counter lives in the heap and is advanced here, once a call. A number baked in by a caller (or, on a GPU, into a
  graph) would already be there on the second run, and the barrier would stop blocking.

*Source*: the two alternating arrays and the equality test are those of vLLM's custom all-reduce.
"""

from __future__ import annotations

from comm.heap import Region
from comm.heap_posix import PosixHeap
from comm.words import Patience, fence


class FlagBarrier:
    """Barrier of all ranks of `heap`, over the regions that `regions(stem, size)` named."""

    def __init__(self, heap: PosixHeap, stem: str, patience: Patience):
        self._rank, self._size, self._operation, self._patience = heap.rank, heap.size, stem, patience
        self._epoch = heap.words(heap.rank, f"{stem}.epoch")
        self._mine = heap.words(heap.rank, f"{stem}.arrivals")
        self._peers = [peer for peer in range(heap.size) if peer != heap.rank]
        self._theirs = [heap.words(peer, f"{stem}.arrivals") for peer in self._peers]

    @staticmethod
    def regions(stem: str, size: int) -> tuple[Region, ...]:
        return Region.of_words(f"{stem}.epoch", 1), Region.of_words(f"{stem}.arrivals", 2 * size)

    @property
    def next_epoch(self) -> int:
        """Epoch of the next `wait`. Its parity picks the slot that a data-carrying caller writes before."""
        return self._epoch.load_relaxed(0) + 1

    def wait(self) -> None:
        """*Collective.* Return once all ranks have called it as often as we have.

        *Order*: releases everything this rank wrote before, acquires everything the peers wrote before theirs.
        *Raises* `PeerTimeout` naming the first rank that is missing at the deadline.
        """
        epoch = self.next_epoch
        half = (epoch & 1) * self._size
        fence()  # release, for all the stores below: pairs with the peers' wait_equal
        for words in self._theirs:
            words.store_relaxed(half + self._rank, epoch)
        for peer in self._peers:
            self._mine.wait_equal(half + peer, epoch, self._patience, self._operation, epoch, peer)
        self._epoch.store_relaxed(0, epoch)
