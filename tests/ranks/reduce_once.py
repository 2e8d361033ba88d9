"""A small run for torchrun: the ranks connect as the engine does, sum, and say in one line of JSON each what they found.

For tests of the environment: torch reads variables such as PYTORCH_CUDA_ALLOC_CONF when it is loaded, so only a fresh interpreter
shows what they do.
"""

from __future__ import annotations

import json
import os

import torch

from comm.choice import connect
from launch.environment import Environment
from launch.world import World

SIZES = (1, 8192, 300_001, 3_000_000)  # one for each kernel of the table, and the smallest
NUM_REPLAYS = 20


def wrong_sums(communicator, rank: int, size: int) -> int:
    """How many elements came out wrong, eagerly and from a replayed graph, over all `SIZES`. *Collective*."""
    wrong = 0
    for n in SIZES:
        pattern = torch.arange(n, device="cuda") % 15 - 7
        mine, wanted = (pattern + rank).bfloat16(), (size * pattern + size * (size - 1) // 2).bfloat16()
        eager = communicator.all_reduce(mine.clone())
        x = torch.full_like(mine, float("nan"))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            communicator.all_reduce(x)
        for _ in range(NUM_REPLAYS):
            x.copy_(mine)
            graph.replay()
        wrong += int((eager != wanted).sum() + (x != wanted).sum())
    return wrong


def is_expandable() -> bool:
    """Whether torch's allocator got its memory in expandable segments."""
    return any(segment.get("is_expandable", False) for segment in torch.cuda.memory._snapshot()["segments"])


def main() -> None:
    world = World.from_environment(Environment.read(), "cuda")
    communicator = connect(world)
    communicator.watch.start()
    found = {
        "rank": world.rank,
        "name": communicator.name,
        "reason": communicator.reason,
        "wrong": wrong_sums(communicator, world.rank, world.size),
        "is_expandable": is_expandable(),
        "gpu": f"GPU-{torch.cuda.get_device_properties(world.device).uuid}",
    }
    communicator.barrier()
    communicator.close()
    os.write(1, f"{json.dumps(found)}\n".encode())  # in one piece: the ranks share the pipe


if __name__ == "__main__":
    main()
