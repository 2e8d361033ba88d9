"""The deadline of waits by stream memory operations, kept by the host, because they have none of their own.

Whoever waits on the host for a stream that may hold such a wait does it through `StreamDeadline.synchronize`. A host that waits
for something else, such as tokens or its peers, calls `note_launch` behind what it launches, and a thread waits in its place.

When the time is up, the words that this rank's streams may be waiting for are written, so that they go on (with payloads that
mean nothing), and the kernels are told through the abort word to give up as well.
"""

from __future__ import annotations

import queue
import threading
import time

import torch

from comm import stream_ops
from comm.device_watch import DeviceWatch
from launch.errors import DoorbellError

POLL_S = 20e-6
LAUNCH_POLL_S = 50e-3  # of the thread, which nobody waits for and which takes the interpreter from the one that launches
RELEASE_S = 30.0  # for queued replays that each wait again; after that the process must end anyway


class StreamDeadline:
    """`limit_s`: longest that `synchronize` waits, work of its own that is still queued included, and longest that a launch takes
    once those noted before it are done. Longer than the limit of `watch`, so that a kernel that waits in vain can say for whom.
    """

    def __init__(self, watch: DeviceWatch, limit_s: float):
        self._watch, self._limit_s = watch, limit_s
        self._words: list[tuple[int, int, int, int]] = []
        # Streams of high priority have hardware queues of their own: a write must not queue behind the wait that it is to end.
        self._side = torch.cuda.Stream(priority=-1)
        self._launches: queue.SimpleQueue[torch.cuda.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def guard(self, address: int, value: int, site: int, peer: int) -> None:
        """A stream of this rank may wait until the word at `address` is `value`, which `peer` writes."""
        self._words.append((address, value, site, peer))

    def synchronize(self) -> None:
        """Wait until everything on torch's current stream is done.

        *Raises* `PeerTimeout` if it is not within the limit (naming the peer of the first guarded word, the others may be late as
        well), or if a kernel gave up.
        """
        event = torch.cuda.Event()
        event.record()
        if not self._comes(event, self._limit_s, POLL_S):
            self._release(event)
        self._watch.check()

    def note_launch(self) -> None:
        """What torch's current stream holds by now is to be done within the limit, counted from when what was noted before is.

        Waits for nothing; not while capturing. If the time runs out, `check` of the watch raises from then on, as it does when a
        kernel gave up. Needs `close` at the end.
        """
        event = torch.cuda.Event()
        event.record()
        self._launches.put(event)
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="stream-deadline", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Look after launches no more. Idempotent; waits for no stream."""
        self._is_closed = True
        self._launches.put(None)
        if self._thread is not None:
            self._thread.join()

    def _keep(self) -> None:
        torch.cuda.set_device(self._side.device)  # of this thread: the driver writes words for none without a device
        limit_s = self._limit_s
        while (event := self._launches.get()) is not None:
            try:
                if not self._comes(event, limit_s, LAUNCH_POLL_S):
                    self._release(event)
                    limit_s = 0.0  # what was launched behind it waits in vain as well
            except (RuntimeError, DoorbellError):
                return  # the GPU failed, which the thread that launches meets at its next call

    def _comes(self, event: torch.cuda.Event, limit_s: float, poll_s: float) -> bool:
        """Wait for `event`, or for `close`; False when it has not come within the limit."""
        end = time.monotonic() + limit_s
        while not event.query() and not self._is_closed:
            if time.monotonic() > end:
                return False
            time.sleep(poll_s)
        return True

    def _release(self, event: torch.cuda.Event) -> None:
        _, value, site, peer = self._words[0] if self._words else (0, 0, 0, -1)
        self._watch.give_up(site, 0, peer, 0, value)
        stream_ops.write_value32(self._side.cuda_stream, self._watch.params.aborted, 1)
        end = time.monotonic() + RELEASE_S
        while not event.query() and time.monotonic() < end and not self._is_closed:
            for address, value, _, _ in self._words:
                stream_ops.write_value32(self._side.cuda_stream, address, value)
            time.sleep(1e-3)
