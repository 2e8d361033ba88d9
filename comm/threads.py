"""The whole world inside one process: a thread per rank. The fake that proves tensor-parallel arithmetic.

Not a fast path and not a protocol: a barrier and a list. It exists so that one test process can hold every shard of a
split.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm.communicator import Communicator
from comm.operand import check_operand, sum_in_rank_order


class ThreadGroup:
    """State shared by the `size` communicators of one in-process world."""

    def __init__(self, size: int, timeout_s: float = 120.0):
        self.size = size
        self.slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)
        self._timeout_s = timeout_s

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order. Two waits: one for all to have written, one for all to have read."""
        self.slots[rank] = value
        self._barrier.wait(self._timeout_s)
        values = list(self.slots)
        self._barrier.wait(self._timeout_s)
        return values

    def abort(self) -> None:
        self._barrier.abort()


class ThreadCommunicator(Communicator):
    """`Communicator` of one thread of a `ThreadGroup`."""

    name = "threads"
    reason = "all ranks in one process"

    def __init__(self, group: ThreadGroup, rank: int):
        self.group, self.rank, self.size = group, rank, group.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        check_operand(x)
        parts = self.group.exchange(self.rank, x.detach().clone())
        sum_in_rank_order(parts, out=x.detach())
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        parts = self.group.exchange(self.rank, x.detach().clone())
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        return list(self.group.exchange(self.rank, values)[0])

    def broadcast_object(self, value: Any = None) -> Any:
        return copy.deepcopy(self.group.exchange(self.rank, value)[0])

    def barrier(self) -> None:
        self.group.exchange(self.rank, None)

    def close(self) -> None:
        pass


def run_ranks(size: int, target: Callable[[Communicator], Any]) -> list[Any]:
    """Run `target(communicator)` on `size` threads and return the results in rank order.

    *Raises* the first failure of any rank; the others are released through the aborted barrier.
    """
    group = ThreadGroup(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def body(rank: int) -> None:
        try:
            with torch.inference_mode():
                results[rank] = target(ThreadCommunicator(group, rank))
        except threading.BrokenBarrierError as error:
            failures.append(error)
        except BaseException as error:
            failures.insert(0, error)
            group.abort()

    threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
