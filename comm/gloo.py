"""The fallback communicator: torch's gloo group. Works wherever TCP does; much slower than the heap.

Its all-reduce is an all-gather followed by our own sum, not gloo's: gloo reduces around a ring, in an order that
differs from element to element, and in the tensor's own dtype. This one gives the same bits as every other all-reduce
here, which is what makes it the reference of the self-test.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from comm.communicator import Communicator
from comm.operand import check_operand, sum_in_rank_order
from comm.process_group import ProcessGroup
from launch.errors import PeerLost, PeerTimeout

_EXPLAIN_S = 2.0  # how long to wait for the watch to say which rank went, when gloo only knows that one did


class GlooCommunicator(Communicator):
    """`Communicator` over `group`. Tensors of other devices are staged through host memory."""

    name = "gloo"

    def __init__(self, group: ProcessGroup, reason: str):
        self.rank, self.size, self.reason = group.rank, group.size, reason
        self._group = group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """*Cost*: `size` times the message in memory and over the loopback."""
        check_operand(x)
        if x.numel() == 0:
            return x
        parts = self._all_gather(x.detach().view(-1))
        if x.is_cpu:
            sum_in_rank_order(parts, out=x.detach().view(-1))
            return x
        total = torch.empty(x.numel(), dtype=x.dtype)
        sum_in_rank_order(parts, out=total)
        x.detach().view(-1).copy_(total)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        x = x.detach().contiguous()
        with self._explained("gather"):
            parts = self._group.gather(_bytes_of(x))
        if parts is None:
            return None
        return torch.cat([part.view(x.dtype).view(x.shape) for part in parts], dim=-1).to(x.device)

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        data = torch.tensor(list(values or ()), dtype=torch.int64)
        length = torch.tensor([data.numel()])
        with self._explained("broadcast"):
            self._group.broadcast(length)
            if self.rank != 0:
                data = torch.empty(int(length), dtype=torch.int64)
            if data.numel():
                self._group.broadcast(data)
        return data.tolist()

    def broadcast_object(self, value: Any = None) -> Any:
        text = json.dumps(value).encode() if self.rank == 0 else b""
        return json.loads(bytes(self.broadcast_ints(list(text) if self.rank == 0 else None)))

    def barrier(self) -> None:
        with self._explained("barrier"):
            self._group.all_gather(torch.zeros(1, dtype=torch.uint8))

    def close(self) -> None:
        is_orderly = True
        if self.watch is not None:
            self.watch.close()
            is_orderly = self.watch.is_orderly
        self._group.close(is_orderly)

    def _all_gather(self, flat: torch.Tensor) -> list[torch.Tensor]:
        with self._explained("all_reduce"):
            # As bytes: gloo moves them anyway, and not every build knows every float dtype.
            return [part.view(flat.dtype) for part in self._group.all_gather(_bytes_of(flat))]

    @contextmanager
    def _explained(self, operation: str) -> Iterator[None]:
        """Turn gloo's "connection closed" into the rank that closed it, as far as the watch can tell."""
        try:
            yield
        except RuntimeError as error:
            deadline = time.monotonic() + _EXPLAIN_S
            while self.watch is not None and time.monotonic() < deadline:
                if self.watch.lost is not None:
                    raise self.watch.lost from error
                time.sleep(0.02)  # the watch's callback may be ending this process meanwhile
            lost = self.watch.lost_peer() if self.watch is not None else None
            if lost is not None:
                raise lost from error
            cause = str(error).strip().splitlines()[0]
            kind = PeerTimeout if "imed out" in cause else PeerLost
            raise kind(-1, f"a rank dropped out of {operation}: {cause}") from error


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(-1).view(torch.uint8)
