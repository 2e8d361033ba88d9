"""A hash of every step's tokens on every rank, and their comparison: that ranks agree is checked, not assumed.

Rank 0's messages hold what rank 0 chose or read, so comparing messages says nothing of what the other ranks' devices chose in the
steps of bursts and after those that prefill. Here each rank reads the ring of its own device and hashes what it finds, with the
messages so far. Where rank 0 alone chooses, its messages are all there is.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque

import torch

from comm.communicator import Communicator
from engine.graph.burst import NUM_STEPS_BEHIND, Burst
from engine.graph.row_state import LastTokens, RowState
from engine.replica import Replica
from engine.sequence import Sequence


class TokenHashes:
    """A `BurstBackend` that passes every call on to that of `replica`, in whose place it puts itself.

    `hashes`: a running CRC-32 a step, of the tokens of its rows on this rank's device, and of the messages. A step is read when
    others are launched, `NUM_STEPS_BEHIND` or more steps late, so the device is not waited for. All ranks or none have one.
    """

    def __init__(self, replica: Replica):
        backend = replica.burst_backend
        self._replica, self._backend = replica, backend
        self._state: RowState = backend.state
        self.max_rows, self.description, self.speculable = backend.max_rows, backend.description, backend.speculable
        self.hashes = array("Q")
        self._bursts: deque[Burst] = deque()  # whose steps are not all hashed; all but the last are launched to their end
        self._num_hashed = 0  # steps of the first of them
        replica.burst_backend = self

    @property
    def last_tokens(self) -> LastTokens:
        return self._backend.last_tokens

    def begin(self, sequences: list[Sequence], num_drafts: int = 0) -> Burst:
        self._hash_all_but(NUM_STEPS_BEHIND)
        self._bursts.append(self._backend.begin(sequences, num_drafts))
        return self._bursts[-1]

    def launch(self, burst: Burst, num_steps: int) -> None:
        self._hash_all_but(NUM_STEPS_BEHIND)
        self._backend.launch(burst, num_steps)

    def read(self, burst: Burst) -> list[list[int]]:
        return self._backend.read(burst)

    def end(self, burst: Burst) -> None:
        self._backend.end(burst)

    def choose(self, sequences: list[Sequence], logits: torch.Tensor) -> Burst:
        self._hash_all_but(NUM_STEPS_BEHIND)
        self._bursts.append(self._backend.choose(sequences, logits))
        return self._bursts[-1]

    def finish(self) -> None:
        """Hash what has been launched; waits for it."""
        self._hash_all_but(0)

    def first_stray(self) -> tuple[int, list[int]] | None:
        """On rank 0: the first step of which ranks hold another hash than rank 0, and these ranks; None if there is none.
        *Collective*; None on the other ranks.

        *Raises* RuntimeError on rank 0 when ranks have taken other numbers of steps.
        """
        self.finish()
        comm = self._replica.comm
        counts = _gather(comm, [len(self.hashes)])
        if counts is not None and len(set(counts.flatten().tolist())) > 1:
            raise RuntimeError(f"the ranks took {counts.flatten().tolist()} steps")
        gathered = _gather(comm, self.hashes)
        if gathered is None:
            return None
        strayed = gathered != gathered[0]
        if not strayed.any():
            return None
        step = int(strayed.any(0).nonzero()[0])
        return step, strayed[:, step].nonzero().flatten().tolist()

    def _hash_all_but(self, num_steps: int) -> None:
        """Of the steps launched so far, but the last `num_steps`."""
        num_due = sum(burst.num_launched for burst in self._bursts) - self._num_hashed - num_steps
        for _ in range(num_due):
            while self._num_hashed == self._bursts[0].num_launched:
                self._bursts.popleft()
                self._num_hashed = 0
            burst = self._bursts[0]
            step = burst.first_step + self._num_hashed
            ids = self._state.ring.read(step, len(burst.sequences) * burst.width, self._state.check)
            last = self.hashes[-1] if self.hashes else 0
            self.hashes.append(zlib.crc32(array("q", [self._replica.digest, *ids]).tobytes(), last))
            self._num_hashed += 1


def _gather(comm: Communicator, values: list[int] | array) -> torch.Tensor | None:
    """fp64 `[size, len(values)]` on rank 0, which holds 32 bits exactly; None elsewhere. *Collective*, equal lengths."""
    gathered = comm.gather(torch.tensor(values, dtype=torch.float64))
    return None if gathered is None else gathered.view(comm.size, -1)
