"""Which device a rank computes on."""

from __future__ import annotations

import torch

from launch.environment import Environment
from launch.errors import UsageError


def resolve_device(name: str, environment: Environment | None = None, is_sharing: bool = False) -> str:
    """The device of this rank: `cpu`, or `cuda:<index>`.

    `auto` is a GPU if torch sees one, else the CPU. A plain `cuda` deals the ranks of a machine to its GPUs in turn; an index
    that is given is kept. `is_sharing`: several ranks may be dealt to one GPU.
    *Raises* `UsageError` if the machine has no such GPU, fewer GPUs than ranks that may not share them, or none to share.
    """
    environment = environment or Environment()
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if num_gpus else "cpu"
    if not name.startswith("cuda"):
        if is_sharing:
            raise UsageError(f"--share-gpus goes with GPUs, and this run computes on {name}")
        return name
    if not num_gpus:
        raise UsageError("--device cuda: torch sees no GPU here; use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES")
    if name == "cuda":
        return f"cuda:{_dealt_index(environment, num_gpus, is_sharing)}"
    index = name.removeprefix("cuda:")
    if index.isdecimal() and int(index) >= num_gpus:
        raise UsageError(f"--device {name}: the last of the {num_gpus} visible GPUs is cuda:{num_gpus - 1}")
    return name


def _dealt_index(environment: Environment, num_gpus: int, is_sharing: bool) -> int:
    if environment.local_world_size > num_gpus and not is_sharing:
        raise UsageError(
            f"{environment.local_world_size} ranks were started but {num_gpus} GPUs are visible; start at most {num_gpus}, "
            "show more through CUDA_VISIBLE_DEVICES, or let ranks share GPUs with --share-gpus"
        )
    return environment.local_rank % num_gpus
