"""Many all-reduces in replayed graphs: sizes, data, kernels and delays change, every result is checked on the device.

One flat buffer is filled from a table of integers in [-8, 8], cut into the messages of a graph, reduced in place, and compared
with the table's sums over the ranks, which bf16 holds exactly. Consecutive replays take other rows of the table and one of
several graphs (other sizes, other kernels), so whatever is left of an earlier call differs from what is due. In one replay of
five the ranks are late: one before the first call, all at places of their own between calls. Only undelayed replays are timed.

The host reads the count of mismatches once a tenth of the run, and the latency of each tenth is the median over its replays, the
maximum over ranks: that it does not drift is part of the result.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click
import torch

from comm.choice_table import pick
from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_kernels import load_collectives
from comm.device_watch import DeviceWatch
from comm.heap_ipc import IpcHeap
from engine.bench.gpu_world import GpuWorld
from engine.bench.records import Record, commit
from kernels.build import Build, default_cache_folder
from launch.environment import Environment

GRAPH_CALLS = 100
NUM_GRAPHS = 3
TENTHS = 10
DRIFT_LIMIT_PERCENT = 3.0
# Elements of a message and how often a graph has it: a decode step's, odd ones (in pairs, so that what follows is aligned again),
# and one each for the kernels of larger messages.
SIZES = (((8192,), 40), ((8,), 15), ((1000,), 15), ((30_000,), 10), ((4097, 4095), 9), ((65_536,), 1), ((1_100_000,), 1))
TABLE_ROWS = 31  # a prime: a row meets every graph
LARGEST = 8  # of an input; sums of eight ranks stay below 256, exact in bf16
KERNELS = ("all_reduce_lamport", "all_reduce_sentinel", "chosen")
DELAYED_SHARE = 0.2
DELAYS = 6  # in a delayed graph, each at most
DELAY_CYCLES = 60_000  # about 35 us


@dataclass(frozen=True)
class SoakResult:
    """`tenths_us`: us a call, of each tenth."""

    calls: int
    mismatches: int
    tenths_us: tuple[float, ...]

    @property
    def drift_percent(self) -> float:
        return 100 * (max(self.tenths_us) / min(self.tenths_us) - 1)


def draw_calls(rng: random.Random) -> list[tuple[str, int]]:
    """(kernel, elements) of the calls of one graph, alike on all ranks; every draw has the same elements in all."""
    groups = [group for group, times in SIZES for _ in range(times)]
    rng.shuffle(groups)
    return [(rng.choice(KERNELS) if n <= 65_536 else "chosen", n) for group in groups for n in group]


def table_of(rank: int, length: int) -> torch.Tensor:
    """What `rank` puts in: int8 `[TABLE_ROWS, length]`. Every rank can make every rank's."""
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randint(
        -LARGEST, LARGEST + 1, (TABLE_ROWS, length), generator=generator, device="cuda", dtype=torch.int8
    )


class Soak:
    """`reduce` maps each name in `KERNELS` to an in-place all-reduce; `check_peers` raises if a kernel gave up waiting.

    *Collective*: all ranks do the same with an instance each.
    """

    def __init__(self, gpus: GpuWorld, reduce: dict[str, Callable[[torch.Tensor], object]], check_peers: Callable[[], None]):
        self._gpus, self._reduce, self._check_peers = gpus, reduce, check_peers
        self._plan = random.Random(3)  # alike on all ranks
        rank, size = gpus.world.rank, gpus.world.size
        length = sum(sum(group) * times for group, times in SIZES)
        self._rows = table_of(rank, length).bfloat16()
        self._sums = torch.zeros_like(self._rows)
        for peer in range(size):
            self._sums += table_of(peer, length)
        self._row = torch.zeros(1, dtype=torch.int64, device="cuda")
        self._mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
        self._buffer, self._wanted = (torch.empty(1, length, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        self._stream = torch.cuda.Stream()
        self._capture()

    def run(self, num_calls: int) -> SoakResult:
        """At least `num_calls` calls, in whole graphs and ten equal parts."""
        num_replays = -(-num_calls // (TENTHS * GRAPH_CALLS))
        before = int(self._mismatches)
        with torch.cuda.stream(self._stream):
            for _ in range(20):  # clocks, caches
                self._replay(self._plan.randrange(NUM_GRAPHS), False)
            torch.cuda.synchronize()
            self._gpus.group.exchange(None)
            tenths = [self._run_tenth(num_replays) for _ in range(TENTHS)]
        return SoakResult(TENTHS * num_replays * GRAPH_CALLS, int(self._mismatches) - before, tuple(tenths))

    def _run_tenth(self, num_replays: int) -> float:
        timed = []
        for replay in range(num_replays):
            is_delayed = replay > 0 and self._plan.random() < DELAYED_SHARE
            events = self._replay(self._plan.randrange(NUM_GRAPHS), is_delayed)
            timed += [] if is_delayed else [events]
        torch.cuda.synchronize()
        self._check_peers()
        us = statistics.median(start.elapsed_time(end) for start, end in timed) * 1e3 / GRAPH_CALLS
        return max(self._gpus.group.exchange(us))

    def _replay(self, index: int, is_delayed: bool) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        late = self._plan.randrange(self._gpus.world.size)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._fill.replay()
        if is_delayed and late == self._gpus.world.rank:
            torch.cuda._sleep(5 * DELAY_CYCLES)
        start.record()
        (self._delayed if is_delayed else self._plain)[index].replay()
        end.record()
        self._check.replay()
        return start, end

    def _capture(self) -> None:
        mine = random.Random(100 + self._gpus.world.rank)
        plans = [draw_calls(self._plan) for _ in range(NUM_GRAPHS)]
        with torch.cuda.stream(self._stream):
            for body in (self._fill_buffer, partial(self._reduce_all, plans[0], {}), self._compare):  # loads every kernel
                body()
            torch.cuda.synchronize()
            self._check_peers()
            self._gpus.group.exchange(None)
            self._fill, self._check = self._graph_of(self._fill_buffer), self._graph_of(self._compare)
            self._plain = [self._graph_of(partial(self._reduce_all, plan, {})) for plan in plans]
            self._delayed = []
            for plan in plans:
                delays = {mine.randrange(GRAPH_CALLS): mine.randrange(DELAY_CYCLES) for _ in range(DELAYS)}
                self._delayed.append(self._graph_of(partial(self._reduce_all, plan, delays)))
        self._gpus.group.exchange(None)

    def _graph_of(self, body: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            body()
        return graph

    def _fill_buffer(self) -> None:
        self._row.add_(1).remainder_(TABLE_ROWS)
        torch.index_select(self._rows, 0, self._row, out=self._buffer)

    def _reduce_all(self, calls: list[tuple[str, int]], delays: dict[int, int]) -> None:
        begin = 0
        for index, (name, n) in enumerate(calls):
            if index in delays:
                torch.cuda._sleep(delays[index])
            self._reduce[name](self._buffer[0, begin : begin + n])
            begin += n

    def _compare(self) -> None:
        torch.index_select(self._sums, 0, self._row, out=self._wanted)
        self._mismatches.add_((self._buffer != self._wanted).sum())


def soak(gpus: GpuWorld, num_calls: int) -> SoakResult:
    """Open the collectives of this world, run, close. *Collective*."""
    rank, size, exchange = gpus.world.rank, gpus.world.size, gpus.group.exchange
    capacity = Capacity(two_shot_bytes=4 << 20)
    heap = IpcHeap(rank, size, gpus.world.device.index, layout_for(size, capacity), exchange)
    watch = DeviceWatch(20.0, gpus.ranks_per_gpu)
    kernels = load_collectives(Build(default_cache_folder()), (torch.bfloat16,))
    collectives = DeviceCollectives(heap, watch, kernels, capacity, ranks_per_gpu=gpus.ranks_per_gpu)
    exchange(None)  # all heaps are ready to be written to

    def chosen(x: torch.Tensor) -> None:
        num_bytes = x.numel() * x.element_size()
        getattr(collectives, pick(num_bytes, size, gpus.ranks_per_gpu == 1, is_capturing=True))(x)

    reduce = {
        "all_reduce_lamport": collectives.all_reduce_lamport,
        "all_reduce_sentinel": collectives.all_reduce_sentinel,
        "chosen": chosen,
    }
    result = Soak(gpus, reduce, watch.check).run(num_calls)
    heap.close()
    return result


@click.command()
@click.option("--calls", default=1_000_000, show_default=True, type=click.IntRange(1))
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the record to.")
def main(calls: int, record: Path | None) -> None:
    """Soak the collectives of this world; exit code 1 when a result was wrong."""
    commit()
    gpus = GpuWorld.open(Environment.read())
    mine = soak(gpus, calls)
    mismatches = sum(gpus.group.exchange(mine.mismatches))
    gpus.say(f"{mine.calls} calls on {gpus.world.size} ranks, {mismatches} mismatches, drift {mine.drift_percent:.1f} %, "
             "us a call by tenth: " + " ".join(f"{us:.2f}" for us in mine.tenths_us))  # fmt: skip
    if gpus.world.rank == 0 and record is not None:
        case = {"world": gpus.world.size, "ranks_per_gpu": gpus.ranks_per_gpu, "heap": "ipc", "dtype": "bf16",
                "algorithm": "lamport, sentinel, chosen"}  # fmt: skip
        metrics = {"calls": mine.calls, "mismatches": mismatches, "drift_percent": mine.drift_percent}
        metrics |= {f"tenth_{index}_us": us for index, us in enumerate(mine.tenths_us, 1)}
        Record("soak", case, metrics, {"mismatches": 0, "drift_percent": DRIFT_LIMIT_PERCENT}, {}, True).append_to(
            record, gpus.device_name, "engine.bench.soak", gpus.world.size
        )
    gpus.group.close()
    if mismatches:
        sys.exit(f"{mismatches} elements were wrong")


if __name__ == "__main__":
    main()
