"""Drafts handed from rank 0 to all others by replayed graphs, thousands of steps with random delays, every one checked there.

A graph holds `GRAPH_STEPS` steps of one shape. Rank 0 makes the drafts of a step and hands them on through `HandedDrafts`, as the
engine's steps do; nothing comes back to it but acknowledgements, so it goes as far ahead as these let it. Behind each step it
notes how far that is. The others take the drafts and hold them against what is due, in device memory. The host only launches
graphs and keeps the deadline; it reads the counts once, at the end.

Who is late changes from replay to replay: rank 0 between its steps, rank 0 before them, one of the others before them, nobody.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from comm.device_kernels import SIGNAL_ENTRY_POINTS, load_signal
from comm.device_signal import NUM_SLOTS, DeviceSignalChannel
from comm.device_watch import DeviceWatch
from comm.draft_channels import draft_regions, open_draft_channels, stem_of
from comm.heap import DeviceHeap, Layout
from comm.heap_ipc import IpcHeap
from comm.stream_deadline import StreamDeadline
from engine.bench.gpu_world import GpuWorld
from engine.graph.drafters import HandedDrafts
from engine.graph.row_state import RowState, Speculable
from kernels.build import HEADERS, Build, default_cache_folder
from kernels.launch_kernel import load
from launch.environment import Environment
from launch.errors import PeerTimeout
from tests.draft_payload import FAULTS, LEADS, SHAPES, NumberedDrafts, Payload, lead_bucket

GRAPH_STEPS, TENTHS = 20, 10
NUM_VARIANTS = 3  # of a shape's graph on rank 0: without delays, and with delays at other places in each
PAUSE_CYCLES = 2_000_000  # about 1 ms: many steps long
DELAY_CYCLES = 300_000  # at most, between two steps; about 170 us
DELAYED_SHARE = 0.5  # of the steps of a graph with delays
ON_TIME = -1


@dataclass(frozen=True)
class Replay:
    """`shape`: its place in `SHAPES`. `variant`: of rank 0's graph. `late`: the rank that pauses before it, or `ON_TIME`."""

    shape: int
    variant: int
    late: int


def plan_tenth(rng: random.Random, size: int, num_replays: int) -> list[Replay]:
    """The same replays in every tenth, so that their times can be compared, in another order. `rng`: alike on all ranks."""
    replays = []
    for idx in range(num_replays):
        late = {0: 0, 1: 1 + idx // 5 % (size - 1)}.get(idx % 5, ON_TIME)
        replays.append(Replay(idx % len(SHAPES), idx // len(SHAPES) % NUM_VARIANTS, late))
    rng.shuffle(replays)
    return replays


def draw_delays(rng: random.Random, variant: int) -> dict[int, int]:
    """Cycles by which steps of a graph are late; of the first variant none is."""
    return {place: rng.randrange(DELAY_CYCLES) for place in range(GRAPH_STEPS) if variant and rng.random() < DELAYED_SHARE}


@dataclass(frozen=True)
class DraftSoakResult:
    """Of one rank. `steps`: that it has counted. `faults`, `leads`: counts by `FAULTS` (receivers) and by `LEADS` (rank 0).
    `tenths_us`: us a step. `timeout`: what a wait that was given up says; the tenths end there."""

    steps: int
    faults: dict[str, int]
    leads: dict[str, int]
    tenths_us: tuple[float, ...]
    timeout: str | None


class DraftSoak:
    """*Collective*: all ranks do the same with an instance each. `channels`: of `open_draft_channels`."""

    def __init__(self, gpus: GpuWorld, heap: DeviceHeap, channels: list[DeviceSignalChannel], deadline: StreamDeadline):
        self._gpus, self._deadline, device = gpus, deadline, gpus.world.device
        self._is_first = gpus.world.rank == 0
        self._plan = random.Random(5)  # alike on all ranks
        self._drafter = NumberedDrafts(device)
        self._handed = HandedDrafts(self._drafter if self._is_first else None, channels, "numbered drafts")
        most_rows, most_drafts = SHAPES[-1]
        self._state = RowState(most_rows, 1, 8, device, lambda: None, Speculable(most_rows, most_drafts, most_drafts))
        self._step = self._drafter.step if self._is_first else torch.zeros(1, dtype=torch.int64, device=device)
        self._payloads = {shape: Payload(*shape, device) for shape in SHAPES}
        self._faults = torch.zeros(len(FAULTS), dtype=torch.int64, device=device)
        self._leads = torch.zeros(len(LEADS), dtype=torch.int64, device=device)
        self._acks = acks_of(heap) if self._is_first else None
        self._ones = torch.ones(gpus.world.size - 1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream()
        self._capture()

    def run(self, num_steps: int) -> DraftSoakResult:
        """At least `num_steps` steps, in whole graphs and ten equal parts."""
        num_replays = -(-num_steps // (TENTHS * GRAPH_STEPS))
        before = int(self._step)
        tenths, timeout = [], None
        self._gpus.group.exchange(None)
        with torch.cuda.stream(self._stream):
            try:
                for _ in range(TENTHS):
                    tenths.append(self._run_tenth(num_replays))
            except PeerTimeout as error:
                timeout = str(error)
        torch.cuda.synchronize()
        faults, leads = (dict(zip(names, counts.tolist())) for names, counts in ((FAULTS, self._faults), (LEADS, self._leads)))
        return DraftSoakResult(int(self._step) - before, faults, leads, tuple(tenths), timeout)

    def _run_tenth(self, num_replays: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for replay in plan_tenth(self._plan, self._gpus.world.size, num_replays):
            if replay.late == self._gpus.world.rank:
                torch.cuda._sleep(PAUSE_CYCLES)
            self._graphs[replay.shape][replay.variant if self._is_first else 0].replay()
        end.record()
        self._deadline.synchronize()
        return start.elapsed_time(end) * 1e3 / (num_replays * GRAPH_STEPS)

    def _capture(self) -> None:
        """Also loads what a graph launches: what waits for the GPU must not do so while a peer's kernel waits for us."""
        mine = random.Random(100 + self._gpus.world.rank)
        torch.cuda.synchronize()  # what was made on another stream is there
        with torch.cuda.stream(self._stream):
            torch.cuda._sleep(1)
            for shape in SHAPES:
                self._check(self._payloads[shape].at(self._step), shape)
            self._synchronize()
            for shape in SHAPES:
                self._run_step(shape)
                self._synchronize()
            variants = range(NUM_VARIANTS if self._is_first else 1)
            self._graphs = [[self._graph_of(shape, draw_delays(mine, variant)) for variant in variants] for shape in SHAPES]
            self._faults.zero_()
            self._leads.zero_()
        self._synchronize()

    def _synchronize(self) -> None:
        self._deadline.synchronize()
        torch.cuda.synchronize()
        self._gpus.group.exchange(None)

    def _graph_of(self, shape: tuple[int, int], delays: dict[int, int]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for place in range(GRAPH_STEPS):
                if place in delays:
                    torch.cuda._sleep(delays[place])
                self._run_step(shape)
        return graph

    def _run_step(self, shape: tuple[int, int]) -> None:
        rows, num_drafts = shape
        drafts = self._handed.propose(self._state.speculative_rows(rows), num_drafts)
        if not self._is_first:
            self._step.add_(1)
        self._check(drafts, shape)

    def _check(self, drafts: torch.Tensor, shape: tuple[int, int]) -> None:
        if self._acks is None:
            self._faults.add_(self._payloads[shape].faults(drafts, self._step))
        else:
            self._leads.index_add_(0, lead_bucket(self._step - self._acks.amax(1)), self._ones)


class _Words:
    """Acknowledgements in the heap, offered to torch: `count` channels, `stride` bytes from one to the next."""

    def __init__(self, address: int, count: int, stride: int):
        self.__cuda_array_interface__ = {
            "shape": (count, NUM_SLOTS), "strides": (stride, 4), "typestr": "<i4", "data": (address, False), "version": 3,
        }  # fmt: skip


def acks_of(heap: DeviceHeap) -> torch.Tensor:
    """int32 `[channels, 3]`: the number that each consumer acknowledged last for each slot, as rank 0 sees it; not a copy."""
    at = [heap.address(0, f"{stem_of(peer)}.acks") for peer in range(1, heap.size)]
    strides = {there - here for here, there in zip(at, at[1:])} or {4 * NUM_SLOTS}
    assert len(strides) == 1, "the regions of the channels are alike"
    acks = torch.as_tensor(_Words(at[0], len(at), strides.pop()), device="cuda")
    assert acks.data_ptr() == at[0]
    return acks


@contextmanager
def open_soak(wait: str, limit_s: float, sources: Path | None = None) -> Iterator[DraftSoak]:
    """*Collective*. `sources`: of the channels' kernels, where not the product's."""
    gpus = GpuWorld.open(Environment.read(), 120.0)
    rank, size = gpus.world.rank, gpus.world.size
    build = Build(default_cache_folder() if sources is None else sources.parent / "cache")
    heap = IpcHeap(rank, size, gpus.world.device.index, Layout.of(draft_regions(size)), gpus.group.exchange)
    watch = DeviceWatch(limit_s, gpus.ranks_per_gpu)
    deadline = StreamDeadline(watch, limit_s + 10.0)
    if sources is None:
        kernels = load_signal(build)
    else:
        module = load(build.cubin(sources / "signal_channel.cu", [sources, HEADERS], {"ELEM": 0}), "signal_channel")
        kernels = {name: module.function(name, (kind,)) for name, kind in SIGNAL_ENTRY_POINTS.items()}
    channels = open_draft_channels(heap, watch, kernels, gpus.ranks_per_gpu == 1, wait, deadline)
    gpus.group.exchange(None)  # all heaps are ready to be written to
    yield DraftSoak(gpus, heap, channels, deadline)
    torch.cuda.synchronize()
    heap.close()
    gpus.group.close()
