"""All-reduce latency on GPUs, us a call: dependent calls in one CUDA graph, the maximum over ranks, the median of repeats.

Ours against NCCL in the same kind of graph. Every plain sum is checked before it is timed; the fused form is checked by
`tests/ranks`, and its records say so. Start it with torchrun; ranks are dealt to
the GPUs there are, and several on one GPU need MPS (NCCL is left out then: it refuses).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import click
import torch
import torch.distributed as dist

from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_kernels import load_collectives
from comm.device_watch import DeviceWatch
from comm.heap_ipc import IpcHeap
from comm.process_group import ProcessGroup
from engine.bench.records import Record, commit
from kernels.build import Build, default_cache_folder
from launch.environment import Environment
from launch.world import World

CALLS = 100
LINK_BYTES_PER_US = 370_000  # a peer copy between two H200, one way, as measured
EMPTY_KERNEL_US = 0.51  # an empty kernel in a graph, as measured
SIZES = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20)
LAMPORT_LIMIT, ONE_SHOT_LIMIT = 256 << 10, 1 << 20
SENTINEL_RANGE = (16 << 10, 4 << 20)
NORM_ROWS = (1, 4, 8, 16, 32)
HIDDEN = 8192


class Timer:
    """Times bodies in graphs. `exchange` is the all-gather of small values between the ranks."""

    def __init__(self, exchange: Callable, watch: DeviceWatch, repeats: int):
        self.exchange, self.watch, self.repeats = exchange, watch, repeats

    def us_per_call(self, body: Callable[[], None]) -> float:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                body()
            torch.cuda.synchronize()
            self.exchange(None)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    body()
            times = []
            for _ in range(self.repeats):
                torch.cuda.synchronize()
                self.exchange(None)
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                graph.replay()  # lines the ranks up
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                self.watch.check()
                times.append(max(self.exchange(start.elapsed_time(end) * 1e3 / CALLS)))
        return statistics.median(times)


@click.command()
@click.option("--repeats", default=11, show_default=True, type=click.IntRange(1))
@click.option("--threads", default="128", show_default=True, help="Threads a CTA of the Lamport kernel; several: 64,128,256.")
@click.option("--pdl/--no-pdl", default=True, show_default=True, help="Programmatic dependent launch.")
@click.option("--max-bytes", default=64 << 20, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
def main(repeats: int, threads: str, pdl: bool, max_bytes: int, record: Path | None) -> None:
    """Time the collectives of this world."""
    commit()
    environment = Environment.read()
    num_gpus = torch.cuda.device_count()
    device = environment.local_rank % num_gpus
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    world = World(environment.rank, environment.world_size, environment.local_rank, environment.local_world_size,
                  environment.run_id, environment.is_torchrun, torch.device("cuda", device))  # fmt: skip
    size, is_one_each = world.size, world.size <= num_gpus
    group = ProcessGroup(world, 300.0)
    capacity = Capacity(two_shot_bytes=min(max_bytes, 64 << 20))
    heap = IpcHeap(world.rank, size, device, layout_for(size, capacity), group.exchange)
    watch = DeviceWatch(20.0)
    ranks_per_gpu = -(-size // num_gpus)
    kernels = load_collectives(Build(default_cache_folder()))
    collectives = DeviceCollectives(heap, watch, kernels, capacity, pdl, ranks_per_gpu)
    group.exchange(None)  # all heaps are ready to be written to
    nccl = group.open_nccl() if is_one_each else None
    timer = Timer(group.exchange, watch, repeats)

    def say(line: str) -> None:
        if world.rank == 0:
            print(line, flush=True)

    def note(
        algorithm: str, num_bytes: int, us: float, peer: dict[str, object], more: dict[str, object], is_checked: bool = True
    ) -> None:
        if world.rank == 0 and record is not None:
            case = {"algorithm": algorithm, "bytes": num_bytes, "world": size, "ranks_per_gpu": ranks_per_gpu,
                    "dtype": "bf16", "heap": heap.kind, "pdl": pdl, **more}  # fmt: skip
            # Over NVLink every rank must take in at least what the others know and it does not.
            link_us = 2 * (size - 1) / size * num_bytes / LINK_BYTES_PER_US
            ceiling = {"all_reduce_us": max(EMPTY_KERNEL_US, link_us)} if is_one_each else {}
            Record("all_reduce", case, {"all_reduce_us": us}, ceiling, peer, is_checked).append_to(
                record, f"{num_gpus} x {torch.cuda.get_device_name()}", "engine.bench.comm", size
            )

    for num_bytes in (n for n in SIZES if n <= max_bytes):
        n = num_bytes // 2
        generator = torch.Generator("cuda").manual_seed(5)
        parts = [torch.randn(n, generator=generator, device="cuda").bfloat16() for _ in range(size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        x, wanted = parts[world.rank].clone(), total.bfloat16()
        del parts, total
        out = torch.empty_like(x)
        peer: dict[str, object] = {}
        line = f"{num_bytes >> 10:7d} KB"
        if nccl is not None:
            y = x.clone()
            peer = {"name": "nccl in a graph", "all_reduce_us": timer.us_per_call(lambda y=y: dist.all_reduce(y, group=nccl))}
            line += f"  nccl {peer['all_reduce_us']:7.2f}"
        runs: list[tuple[str, Callable[[], None], dict[str, object]]] = []
        if num_bytes <= LAMPORT_LIMIT:
            for t in map(int, threads.split(",")):
                runs.append((f"lamport/{t}", lambda t=t, x=x, out=out: collectives.all_reduce_lamport(x, out, t), {"threads": t}))
        if SENTINEL_RANGE[0] <= num_bytes <= SENTINEL_RANGE[1]:
            for t in (256, 512):
                body = lambda t=t, x=x, out=out: collectives.all_reduce_sentinel(x, out, t)  # noqa: E731
                runs.append((f"sentinel/{t}", body, {"threads": t}))
        if num_bytes <= ONE_SHOT_LIMIT:
            runs.append(("one_shot", lambda x=x, out=out: collectives.all_reduce_one_shot(x, out), {}))
        runs.append(("two_shot", lambda x=x, out=out: collectives.all_reduce_two_shot(x, out), {}))
        for name, body, more in runs:
            out.fill_(float("nan"))
            body()
            torch.cuda.synchronize()
            watch.check()
            if not torch.equal(out, wanted):
                sys.exit(f"{name} at {num_bytes} bytes is wrong on rank {world.rank}")
            us = timer.us_per_call(body)
            line += f"  {name} {us:7.2f}"
            note(f"all_reduce_{name.split('/')[0]}", num_bytes, us, peer, more)
        say(line)
    for rows in NORM_ROWS:
        x = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
        residual, normed, weight = torch.randn_like(x), torch.empty_like(x), torch.ones(HIDDEN, device="cuda").bfloat16()
        line = f"norm {rows:3d} rows"
        for t, c in ((256, 8), (512, 4), (512, 8), (1024, 2)):
            us = timer.us_per_call(
                lambda t=t, c=c, x=x, r=residual, n=normed, w=weight: collectives.all_reduce_lamport_norm(x, r, w, 1e-6, n, t, c)
            )
            line += f"  {c}x{t} {us:6.2f}"
            note("all_reduce_lamport_norm", rows * HIDDEN * 2, us, {}, {"rows": rows, "threads": t, "ctas": c}, is_checked=False)
        say(line)
    torch.cuda.synchronize()
    heap.close()
    group.close()


if __name__ == "__main__":
    main()
