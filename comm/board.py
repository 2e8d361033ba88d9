"""The notice board of a world: for each rank a heartbeat, a state, and the sentence it left with.

A small heap of its own where there is shared memory, whatever the collectives use; else the store of the process group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum

import torch.distributed as dist

from comm.heap import Layout, Region
from comm.heap_posix import PosixHeap

_MESSAGE_BYTES = 1024


class Phase(IntEnum):
    """Where a rank is in its life. `FAILED` goes with an exit code, a culprit and a sentence."""

    STARTING = 0
    RUNNING = 1
    CLOSING = 2
    FAILED = 3


@dataclass(frozen=True)
class Notice:
    """A rank's state. `culprit` is the rank it blames for its failure, often itself."""

    phase: Phase = Phase.STARTING
    exit_code: int = 0
    culprit: int = 0
    message: str = ""

    @property
    def word(self) -> int:
        return self.phase | self.exit_code << 8 | self.culprit << 16

    @classmethod
    def from_word(cls, word: int, message: str) -> Notice:
        return cls(Phase(word & 0xFF), word >> 8 & 0xFF, word >> 16, message)


class Board(ABC):
    """Each rank writes its own entries and reads everybody's. Reading waits for nobody."""

    @abstractmethod
    def beat(self) -> bool:
        """Advance our heartbeat; False when that was not possible just now."""

    @abstractmethod
    def beats(self, peer: int) -> int:
        """The peer's heartbeat: a number that grows while its process runs."""

    @abstractmethod
    def post(self, notice: Notice) -> None:
        """Publish our state."""

    @abstractmethod
    def read(self, peer: int) -> Notice:
        """The peer's state."""


class HeapBoard(Board):
    """A board in shared memory."""

    LAYOUT = Layout.of(
        [Region.of_words("beats", 1), Region.of_words("notice", 2), Region("message", _MESSAGE_BYTES)],
    )

    def __init__(self, heap: PosixHeap):
        peers = range(heap.size)
        self._rank = heap.rank
        self._beats = [heap.words(peer, "beats") for peer in peers]
        self._notices = [heap.words(peer, "notice") for peer in peers]
        self._messages = [heap.tensor(peer, "message").numpy() for peer in peers]

    def beat(self) -> bool:
        words = self._beats[self._rank]
        words.store_relaxed(0, words.load_relaxed(0) + 1)
        return True

    def beats(self, peer: int) -> int:
        return self._beats[peer].load_relaxed(0)

    def post(self, notice: Notice) -> None:
        text = notice.message.encode()[:_MESSAGE_BYTES]
        words = self._notices[self._rank]
        self._messages[self._rank][: len(text)] = bytearray(text)
        words.store_relaxed(1, len(text))
        words.store_release(0, notice.word)  # after the sentence; pairs with load_acquire in read

    def read(self, peer: int) -> Notice:
        word = self._notices[peer].load_acquire(0)
        length = self._notices[peer].load_relaxed(1)
        return Notice.from_word(word, self._messages[peer][:length].tobytes().decode(errors="ignore"))


class StoreBoard(Board):
    """A board in the process group's key-value store, for ranks that share no memory."""

    def __init__(self, store: dist.Store, rank: int):
        self._store, self._rank = store, rank

    def beat(self) -> bool:
        try:
            self._store.add(f"beats/{self._rank}", 1)
        except RuntimeError:
            return False  # the store's host is gone or slow: we know nothing about anybody
        return True

    def beats(self, peer: int) -> int:
        try:
            return self._store.add(f"beats/{peer}", 0)
        except RuntimeError:
            return 0

    def post(self, notice: Notice) -> None:
        try:
            self._store.set(f"message/{self._rank}", notice.message)
            self._store.set(f"notice/{self._rank}", str(notice.word))
        except RuntimeError:
            pass  # leaving must not fail because the store left first

    def read(self, peer: int) -> Notice:
        key = f"notice/{peer}"
        try:
            if not self._store.check([key]):
                return Notice()
            word = int(self._store.get(key))
            return Notice.from_word(word, self._store.get(f"message/{peer}").decode(errors="ignore"))
        except RuntimeError:
            return Notice()
