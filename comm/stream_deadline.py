"""The deadline of waits by stream memory operations, kept by the host, because they have none of their own.

Whoever waits on the host for a stream that may hold such a wait does it through `StreamDeadline.synchronize`. When the time is up
it writes the words that this rank's streams may be waiting for, so that they go on (with payloads that mean nothing), and tells
the kernels through the abort word to give up as well.
"""

from __future__ import annotations

import time

import torch

from comm import stream_ops
from comm.device_watch import DeviceWatch

POLL_S = 20e-6
RELEASE_S = 30.0  # for queued replays that each wait again; after that the process must end anyway


class StreamDeadline:
    """`limit_s`: longest that `synchronize` waits, work of its own that is still queued included. Longer than the limit of
    `watch`, so that a kernel that waits in vain can say for whom.
    """

    def __init__(self, watch: DeviceWatch, limit_s: float):
        self._watch, self._limit_s = watch, limit_s
        self._words: list[tuple[int, int, int, int]] = []
        # Streams of high priority have hardware queues of their own: a write must not queue behind the wait that it is to end.
        self._side = torch.cuda.Stream(priority=-1)

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
        end = time.monotonic() + self._limit_s
        while not event.query():
            if time.monotonic() > end:
                self._release(event)
                break
            time.sleep(POLL_S)
        self._watch.check()

    def _release(self, event: torch.cuda.Event) -> None:
        _, value, site, peer = self._words[0] if self._words else (0, 0, 0, -1)
        self._watch.give_up(site, 0, peer, 0, value)
        stream_ops.write_value32(self._side.cuda_stream, self._watch.params.aborted, 1)
        end = time.monotonic() + RELEASE_S
        while not event.query() and time.monotonic() < end:
            for address, value, _, _ in self._words:
                stream_ops.write_value32(self._side.cuda_stream, address, value)
            time.sleep(1e-3)
