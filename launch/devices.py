"""Which device a rank computes on."""

from __future__ import annotations

import torch

from launch.environment import Environment
from launch.errors import UsageError


def resolve_device(name: str, environment: Environment | None = None) -> str:
    """`auto` is a GPU if torch sees one, else the CPU. *Raises* `UsageError` if the machine has fewer GPUs than ranks."""
    environment = environment or Environment()
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if name.startswith("cuda") and not num_gpus:
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES")
    if name == "cuda" and environment.local_world_size > num_gpus:
        raise UsageError(
            f"{environment.local_world_size} ranks were started but {num_gpus} GPUs are visible; "
            f"start at most {num_gpus}, or show more through CUDA_VISIBLE_DEVICES"
        )
    return name
