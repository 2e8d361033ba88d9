"""The ranks of a bench on GPUs: dealt to the GPUs there are (several on one need MPS), with a gloo group between them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comm.process_group import ProcessGroup
from launch.environment import Environment
from launch.world import World


@dataclass(frozen=True)
class GpuWorld:
    """`group` is open; torch's current device is this rank's, with a context."""

    world: World
    group: ProcessGroup
    num_gpus: int

    @property
    def ranks_per_gpu(self) -> int:
        return -(-self.world.size // self.num_gpus)

    @property
    def device_name(self) -> str:
        """For a record."""
        return f"{self.num_gpus} x {torch.cuda.get_device_name()}"

    @classmethod
    def open(cls, environment: Environment, timeout_s: float = 300.0) -> GpuWorld:
        """*Collective*: all ranks that torchrun started."""
        num_gpus = torch.cuda.device_count()
        device = environment.local_rank % num_gpus
        torch.cuda.set_device(device)
        torch.zeros(1, device="cuda")
        world = World(environment.rank, environment.world_size, environment.local_rank, environment.local_world_size,
                      environment.run_id, environment.is_torchrun, torch.device("cuda", device))  # fmt: skip
        return cls(world, ProcessGroup(world, timeout_s), num_gpus)

    def say(self, line: str) -> None:
        """Print on rank 0."""
        if self.world.rank == 0:
            print(line, flush=True)
