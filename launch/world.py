"""Who this process is among its peers: a frozen record, made once at start and passed down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from launch.environment import Environment
from launch.errors import UsageError


@dataclass(frozen=True)
class World:
    """`rank` in [0, `size`) over all machines, `local_rank` in [0, `local_size`) on this one; `device` of this rank.

    `run_id` is torchrun's name of the run, empty without torchrun.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    run_id: str = ""
    is_torchrun: bool = False
    device: torch.device = torch.device("cpu")

    @property
    def is_single_node(self) -> bool:
        return self.local_size == self.size

    @classmethod
    def from_environment(cls, environment: Environment, device: str = "cpu") -> World:
        """The world that torchrun described. A plain `cuda` becomes `cuda:<local_rank>`.

        *Raises* `UsageError` when the variables contradict each other or name no meeting point.
        """
        rank, size = environment.rank, environment.world_size
        local_rank, local_size = environment.local_rank, environment.local_world_size
        if size < 1 or not 0 <= rank < size:
            raise UsageError(f"RANK={rank} does not fit WORLD_SIZE={size}; start the processes with torchrun")
        if not 1 <= local_size <= size or not 0 <= local_rank < local_size:
            raise UsageError(
                f"LOCAL_RANK={local_rank} does not fit LOCAL_WORLD_SIZE={local_size} and WORLD_SIZE={size}; "
                "start the processes with torchrun"
            )
        if size > 1 and not environment.has_rendezvous:
            raise UsageError(
                f"WORLD_SIZE={size} but MASTER_ADDR or MASTER_PORT is not set; start with "
                f"`torchrun --standalone --nproc-per-node {size}`, or unset WORLD_SIZE to run alone"
            )
        return cls(
            rank, size, local_rank, local_size, environment.run_id, environment.is_torchrun, _device(device, local_rank)
        )


def _device(name: str, local_rank: int) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"{name!r} is not a device; use cpu, cuda or cuda:<index>") from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", local_rank)
    return device
