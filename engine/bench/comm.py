"""All-reduce latency on GPUs, us a call: dependent calls in one CUDA graph, the maximum over ranks, the median of repeats.

Ours against NCCL in the same kind of graph. Everything is checked before it is timed. Start it with torchrun; ranks are dealt
to the GPUs there are, and several on one GPU need MPS (NCCL is left out then: it refuses).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist

from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_kernels import load_collectives
from comm.device_watch import DeviceWatch
from comm.heap_ipc import IpcHeap
from engine.bench.gpu_world import GpuWorld
from engine.bench.records import Record, commit
from kernels.add_norm import launch_add_norm, load_add_norm
from kernels.build import Build, default_cache_folder
from launch.environment import Environment

CALLS = 100
LINK_BYTES_PER_US = 370_000  # a peer copy between two H200, one way, as measured
EMPTY_KERNEL_US = 0.51  # an empty kernel in a graph, as measured
SIZES = (8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20, 8 << 20, 16 << 20, 64 << 20)
LAMPORT_LIMIT, ONE_SHOT_LIMIT = 256 << 10, 1 << 20
SENTINEL_RANGE = (16 << 10, 4 << 20)
NORM_ROWS, MANY_ROWS = (1, 4, 8, 16, 32), (128, 512, 1024, 2048)
HIDDEN = 8192
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# FlashInfer 0.6.14, trtllm one-shot with programmatic launch, bf16, on two H200 of the same kind: by bytes; fused, by rows.
FLASHINFER_US = {16 << 10: 2.43, 128 << 10: 2.64, 512 << 10: 3.94}
FLASHINFER_NORM_US = {1: 4.79, 8: 5.36, 32: 6.48}


class Timer:
    """Times bodies in graphs. `exchange` is the all-gather of small values between the ranks."""

    def __init__(self, exchange: Callable, watch: DeviceWatch, repeats: int):
        self.exchange, self.watch, self.repeats = exchange, watch, repeats

    def us_per_call(self, body: Callable[[], object]) -> float:
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


@dataclass
class Bench:
    """One rank of the bench. `record`: where rank 0 appends its lines, or None."""

    gpus: GpuWorld
    collectives: DeviceCollectives
    timer: Timer
    nccl: dist.ProcessGroup | None
    record: Path | None

    def note(self, algorithm: str, num_bytes: int, dtype: str, us: float, peer: dict[str, object], **more: object) -> None:
        if self.gpus.world.rank != 0 or self.record is None:
            return
        size = self.gpus.world.size
        case = {"algorithm": algorithm, "bytes": num_bytes, "world": size, "ranks_per_gpu": self.gpus.ranks_per_gpu,
                "dtype": dtype, "heap": self.collectives.heap.kind, "pdl": self.collectives.is_pdl, **more}  # fmt: skip
        # Over NVLink every rank must take in at least what the others know and it does not.
        link_us = 2 * (size - 1) / size * num_bytes / LINK_BYTES_PER_US
        ceiling = {"all_reduce_us": max(EMPTY_KERNEL_US, link_us)} if self.gpus.ranks_per_gpu == 1 else {}
        Record("all_reduce", case, {"all_reduce_us": us}, ceiling, peer, True).append_to(
            self.record, self.gpus.device_name, "engine.bench.comm", size
        )

    def fail(self, what: str) -> None:
        sys.exit(f"{what} is wrong on rank {self.gpus.world.rank}")

    def plain(self, num_bytes: int, dtype: str, threads: list[int]) -> None:
        x, wanted = self._operands((num_bytes // DTYPES[dtype].itemsize,), DTYPES[dtype])
        out, peer = torch.empty_like(x), {}
        line = f"{dtype} {num_bytes >> 10:7d} KB"
        if self.nccl is not None:
            y = x.clone()
            us = self.timer.us_per_call(lambda: dist.all_reduce(y, group=self.nccl))
            peer = {"name": "nccl in a graph", "all_reduce_us": round(us, 4)}
            if dtype == "bf16" and num_bytes in FLASHINFER_US:
                peer["flashinfer_us"] = FLASHINFER_US[num_bytes]
            line += f"  nccl {us:7.2f}"
        for name, more, body in self._algorithms(num_bytes, x, out, threads):
            out.fill_(float("nan"))
            body()
            torch.cuda.synchronize()
            self.timer.watch.check()
            if not torch.equal(out, wanted):
                self.fail(f"{name} at {num_bytes} bytes of {dtype}")
            us = self.timer.us_per_call(body)
            line += f"  {name.removeprefix('all_reduce_')}{''.join(f'/{value}' for value in more.values())} {us:7.2f}"
            self.note(name, num_bytes, dtype, us, peer, **more)
        self.gpus.say(line)

    def norm(self, rows: int, dtype: str) -> None:
        kind = DTYPES[dtype]
        x, updated, weight, fresh, wanted = self._norm_operands(rows, kind)
        normed = torch.full_like(x, float("nan"))
        self.collectives.all_reduce_lamport_norm(x, updated, weight, 1e-6, normed)
        self._check_norm(updated, fresh, normed, wanted, f"the fused norm of {rows} rows of {dtype}")
        us = self.timer.us_per_call(lambda: self.collectives.all_reduce_lamport_norm(x, updated, weight, 1e-6, normed))
        peer: dict[str, object] = {}
        if self.nccl is not None and dtype == "bf16" and rows in FLASHINFER_NORM_US:
            peer = {"name": "FlashInfer 0.6.14 trtllm one-shot, pdl", "all_reduce_us": FLASHINFER_NORM_US[rows]}
        self.note("all_reduce_lamport_norm", rows * HIDDEN * kind.itemsize, dtype, us, peer, rows=rows)
        self.gpus.say(f"{dtype} norm {rows:3d} rows {us:6.2f}")

    def norm_of_many(self, rows: int, dtype: str) -> None:
        """The peer is NCCL's sum, and a kernel for residual and norm behind it."""
        kind, (world, collectives) = DTYPES[dtype], (self.gpus.world, self.collectives)
        summands = collectives.summands(rows, HIDDEN, kind)
        if summands is None:
            return
        x, updated, weight, fresh, wanted = self._norm_operands(rows, kind)
        other, out = updated.clone(), torch.empty_like(x)
        summands.copy_(x)
        normed = collectives.all_reduce_two_shot_norm(summands, updated, weight, 1e-6)
        share = -(-rows // world.size)
        own = slice(world.rank * share, (world.rank + 1) * share)
        self._check_norm(updated[own], fresh[own], normed, wanted, f"the norm of {rows} rows of {dtype}")
        us = self.timer.us_per_call(lambda: collectives.all_reduce_two_shot_norm(summands, updated, weight, 1e-6))
        peer: dict[str, object] = {}
        if self.nccl is not None:
            kernel = load_add_norm(Build(default_cache_folder()), kind)

            def apart() -> None:
                dist.all_reduce(x, group=self.nccl)
                launch_add_norm(kernel, x, other, weight, 1e-6, out)

            peer = {"name": "nccl in a graph, then residual and norm", "all_reduce_us": round(self.timer.us_per_call(apart), 4)}
        self.note("all_reduce_two_shot_norm", rows * HIDDEN * kind.itemsize, dtype, us, peer, rows=rows)
        self.gpus.say(f"{dtype} norm {rows:4d} rows {us:6.2f}  nccl and norm {peer.get('all_reduce_us', '')}")

    def _norm_operands(self, rows: int, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        """This rank's part, residual, weight; the residual and its norm as they are to be afterwards."""
        x, total = self._operands((rows, HIDDEN), kind)
        generator = torch.Generator("cuda").manual_seed(6)
        residual = torch.randn(rows, HIDDEN, generator=generator, device="cuda").to(kind)
        weight = torch.randn(HIDDEN, generator=generator, device="cuda").to(kind)
        fresh = (total.float() + residual.float()).to(kind)
        scale = torch.rsqrt(fresh.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return x, residual, weight, fresh, ((fresh.float() * scale).to(kind).float() * weight.float()).to(kind)

    def _check_norm(
        self, updated: torch.Tensor, fresh: torch.Tensor, normed: torch.Tensor, wanted: torch.Tensor, what: str
    ) -> None:
        torch.cuda.synchronize()
        self.timer.watch.check()
        # The mean of squares is added in another order: a normed value may round to its neighbour, twice.
        is_near = torch.allclose(normed.float(), wanted.float(), rtol=4 * torch.finfo(wanted.dtype).eps)
        if not torch.equal(updated, fresh) or not is_near:
            self.fail(what)

    def _operands(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part, and the sum of all."""
        generator = torch.Generator("cuda").manual_seed(5)
        parts = [torch.randn(*shape, generator=generator, device="cuda").to(dtype) for _ in range(self.gpus.world.size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return parts[self.gpus.world.rank].clone(), total.to(dtype)

    def _algorithms(
        self, num_bytes: int, x: torch.Tensor, out: torch.Tensor, threads: list[int]
    ) -> Iterator[tuple[str, dict[str, object], Callable[[], object]]]:
        collectives = self.collectives
        if num_bytes <= LAMPORT_LIMIT:
            for t in threads:
                yield "all_reduce_lamport", {"threads": t}, lambda t=t: collectives.all_reduce_lamport(x, out, t)
        if SENTINEL_RANGE[0] <= num_bytes <= SENTINEL_RANGE[1]:
            yield "all_reduce_sentinel", {}, lambda: collectives.all_reduce_sentinel(x, out)
        if num_bytes <= ONE_SHOT_LIMIT:
            yield "all_reduce_one_shot", {}, lambda: collectives.all_reduce_one_shot(x, out)
        yield "all_reduce_two_shot", {}, lambda: collectives.all_reduce_two_shot(x, out)


@click.command()
@click.option("--repeats", default=11, show_default=True, type=click.IntRange(1))
@click.option("--threads", default="256", show_default=True, help="Threads a CTA of the Lamport kernel; several: 64,128,256.")
@click.option("--pdl/--no-pdl", default=True, show_default=True, help="Programmatic dependent launch.")
@click.option("--min-bytes", default=SIZES[0], show_default=True)
@click.option("--max-bytes", default=SIZES[-1], show_default=True)
@click.option("--dtypes", default="bf16", show_default=True, help="Of bf16, fp16, fp32; several with commas.")
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
def main(repeats: int, threads: str, pdl: bool, min_bytes: int, max_bytes: int, dtypes: str, record: Path | None) -> None:
    """Time the collectives of this world."""
    commit()
    gpus = GpuWorld.open(Environment.read())
    world, group, is_one_each = gpus.world, gpus.group, gpus.ranks_per_gpu == 1
    capacity = Capacity(two_shot_bytes=min(max_bytes, 64 << 20))
    heap = IpcHeap(world.rank, world.size, world.device.index, layout_for(world.size, capacity), group.exchange)
    watch, kernels = DeviceWatch(20.0, gpus.ranks_per_gpu), load_collectives(Build(default_cache_folder()))
    collectives = DeviceCollectives(heap, watch, kernels, capacity, pdl, gpus.ranks_per_gpu)
    group.exchange(None)  # all heaps are ready to be written to
    nccl = group.open_nccl() if is_one_each else None
    bench = Bench(gpus, collectives, Timer(group.exchange, watch, repeats), nccl, record)
    for dtype in dtypes.split(","):
        for num_bytes in SIZES:
            if min_bytes <= num_bytes <= max_bytes:
                bench.plain(num_bytes, dtype, list(map(int, threads.split(","))))
        for rows in NORM_ROWS:
            bench.norm(rows, dtype)
        for rows in MANY_ROWS:
            bench.norm_of_many(rows, dtype)
    torch.cuda.synchronize()
    heap.close()
    group.close()


if __name__ == "__main__":
    main()
