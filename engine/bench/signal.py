"""Put-with-signal latency between two GPUs, us a hop: messages to and fro in one CUDA graph, each waiting for the one before.

A hop is from one rank's payload to the other's copy of it. Three ways to make it: `put+take`, a kernel each, as an application
with work of its own between the two has it; `relay`, one kernel that takes a message and passes it on; and `hand-off`, put, take
and the first kernel of the step that verifies drafts, which reads what was taken: what drafts of another rank cost a step, for
messages of the sizes that drafts have. The ceiling is a bare packet in one kernel that never ends (`comm/link_echo.py`), measured
in the same run. Every case is checked before it is timed, eagerly and replayed. The median of repeats, the maximum over ranks.
Start it with torchrun, two ranks on two GPUs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
import torch.distributed as dist

from comm.device_kernels import load_link_echo, load_signal
from comm.device_signal import DeviceSignalChannel
from comm.device_watch import DeviceWatch
from comm.draft_channels import MAX_DRAFT_BYTES
from comm.heap import Layout
from comm.heap_ipc import IpcHeap
from comm.link_echo import LinkEcho
from comm.stream_deadline import StreamDeadline
from engine.bench.gpu_world import GpuWorld
from engine.bench.records import Record, commit
from kernels.build import Build, default_cache_folder
from launch.environment import Environment

SIZES = (32, 64, 512, 1024, MAX_DRAFT_BYTES, 4096)  # of drafts: 4 and 8 of one row, 4 and 8 of 16 rows, 16 of 16
ROUNDS = 50  # there-and-backs a graph
CHECKS = 20  # replays that are checked
ECHO_ROUNDS = 2000
KINDS = (("kernel", False), ("kernel", True), ("stream", True))  # wait, is_writes_only
Body = Callable[[torch.Tensor, torch.Tensor], None]
"""Moves `x` of rank 0 there and back `ROUNDS` times; it ends in `y` of both ranks."""


@dataclass(frozen=True)
class Bench:
    """What the cases share."""

    gpus: GpuWorld
    deadline: StreamDeadline
    repeats: int

    def time_hop(self, body: Body, num_bytes: int, name: str) -> float:
        """us a hop, the median over repeats of the maximum over ranks. *Collective*. Exits when a payload arrives wrong."""
        x, y = (torch.empty(num_bytes // 8, dtype=torch.int64, device="cuda") for _ in range(2))
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._check(lambda: body(x, y), x, y, 1, f"{name}, eager")
            self.gpus.group.exchange(None)
            with torch.cuda.graph(graph, stream=stream):
                body(x, y)
            self._check(graph.replay, x, y, CHECKS, f"{name}, replayed")
            return statistics.median(self._time(graph) for _ in range(self.repeats))

    def _check(self, run: Callable[[], None], x: torch.Tensor, y: torch.Tensor, times: int, name: str) -> None:
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for number in range(times):
            generator = torch.Generator("cuda").manual_seed(number)
            x.random_(generator=generator)
            y.fill_(-1)
            run()
            bad += (y != x).sum()
        self.deadline.synchronize()
        if int(bad):
            sys.exit(f"{name}: {int(bad)} words are wrong on rank {self.gpus.world.rank}")

    def _time(self, graph: torch.cuda.CUDAGraph) -> float:
        self.gpus.group.exchange(None)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()  # lines the ranks up
        start.record()
        graph.replay()
        end.record()
        self.deadline.synchronize()
        return max(self.gpus.group.exchange(start.elapsed_time(end) * 1e3 / (2 * ROUNDS)))

    def time_echo(self, echo: LinkEcho) -> float:
        """us a bare hop."""
        times = []
        for _ in range(self.repeats + 1):
            self.gpus.group.exchange(None)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            echo.run(100)  # lines the ranks up
            start.record()
            echo.run(ECHO_ROUNDS)
            end.record()
            self.deadline.synchronize()
            times.append(max(self.gpus.group.exchange(start.elapsed_time(end) * 1e3 / (2 * ECHO_ROUNDS))))
        return statistics.median(times[1:])


def by_put_and_take(rank: int, there: DeviceSignalChannel, back: DeviceSignalChannel) -> Body:
    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        for index in range(ROUNDS):
            if rank == 0:
                there.put(x if index == 0 else y)
                back.take(y)
            else:
                there.take(y)
                back.put(y)

    return body


def by_hand_off(rank: int, there: DeviceSignalChannel, back: DeviceSignalChannel) -> Body:
    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        for index in range(ROUNDS):
            if rank == 0:
                there.put(x if index == 0 else y)
            (back if rank == 0 else there).take(y)
            torch.cat((x[:1], y))  # as `engine.graph.speculative_step` begins to verify; it ends before the next put begins
            if rank == 1:
                back.put(y)

    return body


def by_relay(rank: int, there: DeviceSignalChannel, back: DeviceSignalChannel) -> Body:
    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        if rank == 1:
            for _ in range(ROUNDS):
                there.relay(y, back)
            return
        there.put(x)
        for _ in range(ROUNDS - 1):
            back.relay(y, there)
        back.take(y)

    return body


def by_nccl(rank: int, group: dist.ProcessGroup) -> Body:
    def body(x: torch.Tensor, y: torch.Tensor) -> None:
        for index in range(ROUNDS):
            if rank == 0:
                dist.send(x if index == 0 else y, 1, group=group)
                dist.recv(y, 1, group=group)
            else:
                dist.recv(y, 0, group=group)
                dist.send(y, 0, group=group)

    return body


WAYS = {"put+take": by_put_and_take, "relay": by_relay, "hand-off": by_hand_off}


def stem_of(wait: str, is_writes_only: bool, way: str) -> str:
    return f"{wait}.{'signal' if is_writes_only else 'packet'}.{way}"


def layout() -> Layout:
    stems = [stem_of(*kind, way) for kind in KINDS for way in ("there", "back")]
    return Layout.of([LinkEcho.region], *(DeviceSignalChannel.regions(stem, max(SIZES)) for stem in stems))


@click.command()
@click.option("--repeats", default=11, show_default=True, type=click.IntRange(1))
@click.option("--nccl/--no-nccl", default=True, show_default=True, help="Time NCCL's send and receive beside ours.")
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
def main(repeats: int, nccl: bool, record: Path | None) -> None:
    """Time put-with-signal between two ranks."""
    commit()
    gpus = GpuWorld.open(Environment.read())
    rank, exchange = gpus.world.rank, gpus.group.exchange
    if gpus.world.size != 2 or gpus.num_gpus < 2:
        sys.exit(f"this bench needs two ranks on two GPUs, not {gpus.world.size} on {gpus.num_gpus}")
    heap, watch = IpcHeap(rank, 2, gpus.world.device.index, layout(), exchange), DeviceWatch(20.0, gpus.ranks_per_gpu)
    build = Build(default_cache_folder())
    kernels, echo = load_signal(build), LinkEcho(heap, watch, load_link_echo(build))
    bench = Bench(gpus, StreamDeadline(watch, 30.0), repeats)
    exchange(None)  # both heaps are ready to be written to
    floor = bench.time_echo(echo)
    gpus.say(f"bare packet in one kernel  {floor:6.2f} us a hop")
    group = gpus.group.open_nccl() if nccl else None
    peers: dict[int, dict[str, object]] = {num_bytes: {} for num_bytes in SIZES}
    for num_bytes in SIZES if group is not None else ():
        us = bench.time_hop(by_nccl(rank, group), num_bytes, "nccl")
        peers[num_bytes] = {"name": "nccl send and receive in a graph", "hop_us": round(us, 4)}
        gpus.say(f"{num_bytes:5d} B  nccl                     {us:6.2f} us a hop")
    for wait, is_writes_only in KINDS:
        there, back = (
            DeviceSignalChannel(heap, watch, kernels, stem_of(wait, is_writes_only, way), producer, 1 - producer,
                                wait, is_writes_only, bench.deadline)
            for way, producer in (("there", 0), ("back", 1))
        )  # fmt: skip
        for num_bytes in SIZES:
            for launches, make_body in WAYS.items():
                if launches == "hand-off" and num_bytes > MAX_DRAFT_BYTES:
                    continue
                body = make_body(rank, there, back)
                us = bench.time_hop(body, num_bytes, f"{wait} {there.shape} {launches} {num_bytes} bytes")
                gpus.say(f"{num_bytes:5d} B  {wait:6} {there.shape:6} {launches:8}  {us:6.2f} us a hop")
                if rank == 0 and record is not None:
                    case = {"bytes": num_bytes, "wait": wait, "shape": there.shape, "launches": launches, "world": 2,
                            "ranks_per_gpu": 1, "heap": heap.kind}  # fmt: skip
                    Record("put_signal", case, {"hop_us": us}, {"hop_us": floor}, peers[num_bytes], True).append_to(
                        record, gpus.device_name, "engine.bench.signal", 2
                    )
    torch.cuda.synchronize()
    heap.close()
    gpus.group.close()


if __name__ == "__main__":
    main()
