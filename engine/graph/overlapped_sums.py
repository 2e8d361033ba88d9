"""Sums over the ranks while the next part is multiplied: a product of many rows in parts, each summed on a second stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from comm.communicator import Communicator

NUM_PARTS = 2  # more would hide more of the sum, and multiply less well


class OverlappedSums:
    """For products of at least `min_rows` rows. *Collective*: one on each rank, which make the same calls.

    All sums of a step are on one stream, in order, and nothing else is summed while one of them is not waited for: so the ranks
    meet in the same order as ever. A sum and a product share the GPU's SMs, so less is hidden than overlaps: to be measured.
    """

    def __init__(self, comm: Communicator, min_rows: int):
        self._comm, self.min_rows = comm, min_rows
        self._stream = torch.cuda.Stream()

    def parts(self, num_rows: int, multiply: Callable[[slice], torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
        """The rows of each part, in order, and the sum over the ranks of `multiply(rows)`, a new contiguous tensor.

        *Stream*: a sum may be used on the current one once it has been yielded. All parts must be taken.
        """
        current = torch.cuda.current_stream()
        size = -(-num_rows // NUM_PARTS)
        under_way = []
        for first in range(0, num_rows, size):
            rows = slice(first, min(first + size, num_rows))
            part = multiply(rows)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                total = self._comm.all_reduce(part)
            under_way.append((rows, total, self._stream.record_event()))
        for rows, total, is_done in under_way:
            current.wait_event(is_done)
            yield rows, total
