"""Rows on their way in: a thread on rank 0 reads and tokenizes ahead of the loop, a bounded number of rows at a time.

The thread exists so that a slow pipe never stops the ranks and tokenizing never delays a step. It hands over either a request or
the error that made it stop; an error in one row is not such an error, it is answered and the next row follows.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from engine.request import Request


class _End:
    pass


class Feed:
    """A `RequestSource` over an iterable of requests (None entries: rows already answered) that is consumed in a thread."""

    def __init__(self, requests: Iterable[Request | None], depth: int):
        self._requests = requests
        self._queue: queue.Queue[Request | BaseException | _End] = queue.Queue(depth)
        self._is_closed = threading.Event()
        self._is_exhausted = False
        self._thread = threading.Thread(target=self._read, name="feed", daemon=True)
        self._thread.start()

    @property
    def is_exhausted(self) -> bool:
        return self._is_exhausted

    def poll(self, wait_s: float) -> Request | None:
        try:
            item = self._queue.get(timeout=wait_s) if wait_s > 0 else self._queue.get_nowait()
        except queue.Empty:
            return None
        if isinstance(item, _End):
            self._is_exhausted = True
            return None
        if isinstance(item, BaseException):
            self._is_exhausted = True
            raise item
        return item

    def close(self) -> None:
        """Let the thread end at its next row. It is a daemon: one that waits for a pipe does not hold up the exit."""
        self._is_closed.set()

    def _read(self) -> None:
        try:
            for request in self._requests:
                if request is not None and not self._put(request):
                    return
            self._put(_End())
        except BaseException as error:
            self._put(error)

    def _put(self, item: Request | BaseException | _End) -> bool:
        while not self._is_closed.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False
