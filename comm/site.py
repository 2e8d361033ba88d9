"""What a communicator may build on, and what the ranks can see of each other's GPUs before anything is opened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from comm.process_group import ProcessGroup
from comm.watch import PeerWatch
from launch.comm_policy import Standing
from launch.probe_software import find_nvshmem
from launch.world import World


@dataclass(frozen=True)
class Site:
    """`standing` is equal on all ranks; `max_bytes` and `deadline_s` as `connect` was given them. `algorithm`: of
    `comm.choice_table.FORCED`."""

    world: World
    group: ProcessGroup
    watch: PeerWatch
    standing: Standing
    max_bytes: int
    deadline_s: float
    algorithm: str | None = None


class GpuView(NamedTuple):
    """What one rank knows: `gpu`, the UUID of its own; `unreachable`, those it sees and cannot map; `nvshmem`, what it lacks."""

    gpu: str
    unreachable: tuple[str, ...]
    nvshmem: str | None


def survey(world: World, group: ProcessGroup) -> Standing:
    """Make this rank's GPU current and compare notes: a few milliseconds, no trial. *Collective*.

    What a rank cannot see (a GPU that CUDA_VISIBLE_DEVICES hides from it) does not count against anything: opening will tell.
    """
    if world.device.type != "cuda":
        return Standing(world.device.type, world.size, is_single_node=world.is_single_node)
    torch.cuda.set_device(world.device)
    views = [GpuView(*fields) for fields in group.exchange(tuple(_own_view(world.device.index)))]
    return standing_of(views, world.is_single_node)


def standing_of(views: Sequence[GpuView], is_single_node: bool) -> Standing:
    """The same on every rank, because it follows from what all have said; `views` in rank order."""
    ranks_of = Counter(view.gpu for view in views)
    mapping = next(
        (
            f"the GPUs of ranks {rank} and {peer} have no peer access"
            for rank, view in enumerate(views)
            for peer, other in enumerate(views)
            if other.gpu in view.unreachable
        ),
        None,
    )
    return Standing(
        "cuda",
        len(views),
        num_gpus=len(ranks_of),
        ranks_per_gpu=max(ranks_of.values()),
        is_single_node=is_single_node,
        mapping=mapping,
        nvshmem=next((view.nvshmem for view in views if view.nvshmem is not None), None),
    )


def _own_view(index: int) -> GpuView:
    unreachable = tuple(
        _uuid(other)
        for other in range(torch.cuda.device_count())
        if other != index and not torch.cuda.can_device_access_peer(index, other)
    )
    nvshmem = find_nvshmem()
    return GpuView(_uuid(index), unreachable, None if nvshmem.is_usable else nvshmem.reason)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
