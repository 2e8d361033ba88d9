"""The ranks' first meeting: a gloo process group. The only file that opens one.

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

from launch.environment import prefer_loopback
from launch.errors import ConnectError
from launch.world import World


class ProcessGroup:
    """Gloo group of all ranks of `world`, meeting where MASTER_ADDR and MASTER_PORT say (torchrun sets them).

    *Collective*: all ranks construct it. *Raises* `ConnectError` when not all ranks came within `timeout_s`.
    """

    def __init__(self, world: World, timeout_s: float):
        self.rank, self.size = world.rank, world.size
        if world.is_single_node:
            prefer_loopback()
        timeout = timedelta(seconds=timeout_s)
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
        """An NCCL group of the same ranks, one GPU each (NCCL refuses two ranks on one). *Collective*."""
        return dist.new_group(backend="nccl")

    def store(self) -> dist.Store:
        """A connection of our own to the store that the group met in, safe to use from another thread."""
        return dist.PrefixStore("doorbell", dist.distributed_c10d._get_default_store().clone())

    def close(self) -> None:
        """Leave, without waiting for anybody. Idempotent."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
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
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConnectError(f"{what}: {cause}") from error
