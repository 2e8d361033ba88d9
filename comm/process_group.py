"""The ranks' first meeting: a gloo process group, and NCCL's beside it where it is wanted. The only file that opens either.

It carries what happens once (exchanging names, agreeing on a choice) and, as the fallback, the collectives of
`comm/gloo.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from launch.environment import forbid_nccl_multicast, prefer_loopback
from launch.errors import ConnectError, DoorbellError
from launch.world import World


class ProcessGroup:
    """Gloo group of all ranks of `world`, meeting where MASTER_ADDR and MASTER_PORT say (torchrun sets them).

    *Collective*: all ranks construct it. *Raises* `ConnectError` when not all ranks came within `timeout_s`.
    """

    def __init__(self, world: World, timeout_s: float):
        self.rank, self.size = world.rank, world.size
        if world.is_single_node:
            prefer_loopback()
        self._timeout = timeout = timedelta(seconds=timeout_s)
        self._nccl: dist.ProcessGroup | None = None
        # A program that embeds the engine may have a default group already; then ours is one more beside it.
        self._is_default = not dist.is_initialized()
        with _start_up_errors("the ranks could not connect to each other"):
            if self._is_default:
                store = _fresh_store(world, timeout)
                dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timeout)
            self._group = dist.group.WORLD if self._is_default else dist.new_group(backend="gloo", timeout=timeout)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value` (small, JSON-like), in rank order. *Collective*; for start-up only."""
        values: list[Any] = [None] * self.size
        with _start_up_errors("a rank left while the ranks were connecting"):
            dist.all_gather_object(values, value, group=self._group)
        return values

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `x` (CPU, contiguous, equal shapes). *Collective*. *Raises* what gloo raises, `RuntimeError`."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x, group=self._group)
        return parts

    def gather(self, x: torch.Tensor) -> list[torch.Tensor] | None:
        """As `all_gather`, on rank 0 only; None elsewhere."""
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(x, parts, group=self._group, group_dst=0)
        return parts

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite `x` (CPU, contiguous) with rank 0's. *Collective*."""
        dist.broadcast(x, group=self._group, group_src=0)

    def open_nccl(self) -> dist.ProcessGroup:
        """An NCCL group of the same ranks, each on its current GPU, connected; the same one again at later calls.

        *Collective*; half a second to a second the first time. The caller sees to it that every rank has a GPU of its own; NCCL
        would hang, or fail late. *Raises* `DoorbellError`, alike on all ranks, when it does not connect.
        """
        if self._nccl is None:
            forbid_nccl_multicast()
            group, failure = None, None if dist.is_nccl_available() else "this torch was built without NCCL"
            if failure is None:
                try:
                    group = dist.new_group(backend="nccl", timeout=self._timeout)
                    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)  # new_group alone does not connect
                    torch.cuda.synchronize()
                except RuntimeError as error:
                    failure = _first_line(error)
            failures = [(peer, text) for peer, text in enumerate(self.exchange(failure)) if text is not None]
            if failures:
                raise DoorbellError("NCCL does not connect on rank {}: {}".format(*failures[0]))
            self._nccl = group
        return self._nccl

    def store(self) -> dist.Store:
        """A connection of our own to the store that the group met in, safe to use from another thread."""
        return dist.PrefixStore("doorbell", dist.distributed_c10d._get_default_store().clone())

    def close(self, is_orderly: bool = True) -> None:
        """Leave, without waiting for anybody. Idempotent.

        NCCL would wait for what is enqueued, so unless `is_orderly` (all ranks end well) it is left to the end of the process.
        """
        group, self._group = self._group, None
        nccl, self._nccl = self._nccl, None
        if group is None or not dist.is_initialized() or (nccl is not None and not is_orderly):
            return
        if nccl is not None:
            dist.destroy_process_group(nccl)
        dist.destroy_process_group(group)


def _fresh_store(world: World, timeout: timedelta) -> dist.Store:
    """torchrun's store under a prefix of its own for each world that these processes open, one after the other.

    Gloo leaves its addresses in the store; a second world under the same keys would call at the doors of the first.
    """
    store, _, _ = next(dist.rendezvous("env://", world.rank, world.size, timeout=timeout))
    number = store.add(f"doorbell/opened-by-{world.rank}", 1)  # all ranks open all worlds, so they count alike
    return dist.PrefixStore(f"doorbell/world-{number}", store)


@contextmanager
def _start_up_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # gloo and the store raise subclasses of RuntimeError
        raise ConnectError(f"{what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
