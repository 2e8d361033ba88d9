"""Every collective and the signal channel, few calls and small, with deadlines for a machine that is a hundred times slower.

A program for torchrun, to be run under compute-sanitizer by `memcheck.sh`. torch's caching of GPU memory should be off
(PYTORCH_NO_CUDA_MEMORY_CACHING=1), or a write past a tensor lands in its block and is nobody's error. What a kernel writes inside
the heap, be it in the wrong region, the sanitizer cannot see: the sums are checked as well.
"""

from __future__ import annotations

import itertools
import os

import torch

from comm.device_kernels import load_signal
from comm.device_signal import DeviceSignalChannel
from comm.device_watch import DeviceWatch
from comm.heap import Layout
from comm.heap_ipc import IpcHeap
from comm.process_group import ProcessGroup
from kernels.build import Build, default_cache_folder
from launch.environment import Environment
from launch.world import World
from tests.ranks.device_world import device_world

DEADLINE_S = 300.0
ALGORITHMS = ("all_reduce_lamport", "all_reduce_sentinel", "all_reduce_one_shot", "all_reduce_two_shot")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 7, 4097, 33_000)  # the last needs several CTAs of each kernel
NORM_SHAPES = ((1, 8192), (3, 896))
CALLS = 4  # every slot once and one again
WORDS, MESSAGES = 65, 7


def integers(n: int, rank: int, call: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(n, device="cuda") + 3 * rank + call) % 9 - 4).to(dtype)


def reduce_all(rank: int, size: int) -> None:
    with device_world(rank, size, DEADLINE_S) as world:
        for dtype in DTYPES:
            for name in ALGORITHMS:
                for n in SIZES:
                    for call in range(CALLS):
                        out = torch.full((n,), float("nan"), dtype=dtype, device="cuda")
                        getattr(world.collectives, name)(integers(n, rank, call, dtype), out)
                        wanted = sum(integers(n, peer, call, torch.float32) for peer in range(size))
                        assert torch.equal(out.float(), wanted), (name, dtype, n, call)
            for rows, hidden in NORM_SHAPES:
                for call in range(CALLS):
                    x = integers(rows * hidden, rank, call, dtype).view(rows, hidden)
                    residual, normed = torch.ones_like(x), torch.full_like(x, float("nan"))
                    weight = torch.ones(hidden, dtype=dtype, device="cuda")
                    world.collectives.all_reduce_lamport_norm(x, residual, weight, 1e-6, normed, is_next_early=call % 2 == 1)
                    wanted = 1 + sum(integers(rows * hidden, peer, call, torch.float32) for peer in range(size))
                    assert torch.equal(residual.float(), wanted.view(rows, hidden)), (dtype, rows, hidden, call)
                    assert not normed.isnan().any()
            for rows, hidden in ((3, 64), (130, 896)):
                for call in range(CALLS):
                    summands = world.collectives.summands(rows, hidden, dtype)
                    summands.copy_(integers(rows * hidden, rank, call, dtype).view(rows, hidden))
                    residual, weight = torch.ones_like(summands), torch.ones(hidden, dtype=dtype, device="cuda")
                    normed = world.collectives.all_reduce_two_shot_norm(summands, residual, weight, 1e-6)
                    wanted = 1 + sum(integers(rows * hidden, peer, call, torch.float32) for peer in range(size))
                    wanted = wanted.view(rows, hidden)
                    scale = (wanted.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
                    assert ((normed.float() - wanted * scale).abs() < 0.05).all(), (dtype, rows, hidden, call)


def send_messages(world: World) -> None:
    """Rank 0 to rank 1."""
    group = ProcessGroup(world, 120.0)
    stems = {False: "packets", True: "signals"}
    layout = Layout.of(*(DeviceSignalChannel.regions(stem, 8 * WORDS) for stem in stems.values()))
    heap, watch = IpcHeap(world.rank, world.size, world.device.index, layout, group.exchange), DeviceWatch(DEADLINE_S)
    kernels = load_signal(Build(default_cache_folder()))
    channels = [DeviceSignalChannel(heap, watch, kernels, stems[only], 0, 1, is_writes_only=only) for only in stems]
    group.exchange(None)
    for number, channel in itertools.product(range(MESSAGES), channels):
        message = torch.arange(WORDS, device="cuda") * 1_000_003 + number
        out = torch.full_like(message, -1)
        if world.rank == 0:
            channel.put(message)
        elif world.rank == 1:
            channel.take(out)
            assert torch.equal(out, message), number
    torch.cuda.synchronize()
    watch.check()
    heap.close()
    group.close()


def main() -> None:
    world = World.from_environment(Environment.read(), "cuda")
    reduce_all(world.rank, world.size)
    send_messages(world)
    os.write(1, f"memcheck: rank {world.rank} has checked all sums\n".encode())


if __name__ == "__main__":
    main()
