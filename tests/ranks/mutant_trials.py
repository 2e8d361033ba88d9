"""Runs the mutants of `tests/ranks/mutants.py` on two GPU ranks, beside the product under the same schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comm.device_collectives import EPOCH_WORDS, Capacity, DeviceCollectives, layout_for
from comm.device_kernels import ENTRY_POINTS, SIGNAL_ENTRY_POINTS
from comm.device_signal import DeviceSignalChannel
from comm.device_watch import DeviceWatch
from comm.heap import Layout
from comm.heap_ipc import IpcHeap
from comm.process_group import ProcessGroup
from comm.stream_deadline import StreamDeadline
from kernels.build import HEADERS, Build
from kernels.elements import ELEMS
from kernels.launch_kernel import load
from launch.errors import PeerTimeout
from launch.world import World
from tests.ranks.mutants import DEADLINE, MISMATCH, MUTANTS, NEAR_WRAP, SIGNAL_MUTANTS, Mutant, Schedule, SignalMutant

DTYPE = torch.bfloat16
DEADLINE_S = 1.0
SLEEP_CYCLES = 40_000_000  # about 20 ms of a GPU's clock: longer than the host takes to enqueue a schedule
NUM_COUNTERS = 5 * EPOCH_WORDS  # the words of the region `epochs` that count calls; what follows holds the sentinel's sizes
CAPACITY = Capacity(two_shot_bytes=1 << 20)
STEMS = ("all_reduce_lamport", "all_reduce_sentinel", "all_reduce_one_shot", "all_reduce_two_shot")


@dataclass(frozen=True)
class Outcome:
    """What each rank met, by rank: None, or the fault's kind and a detail. `calm`: the mutant, one call at a time."""

    control: list[str | None]
    calm: list[str | None]
    mutant: list[str | None]


class HostCounted:
    """A kernel whose call number is counted by the host, and thus constant in a graph, for mutants that take it so."""

    def __init__(self, kernel: Any):
        self._kernel, self._count = kernel, 0

    def launch(self, grid: int, block: int, args: tuple, stream: int, **options: Any) -> None:
        self._count += 1
        args[0].epochs = self._count  # where the product passes the counters' address
        self._kernel.launch(grid, block, args, stream, **options)


class Trials:
    """One rank's place. *Collective*: both ranks call the same methods in the same order."""

    def __init__(self, rank: int, size: int, cache: Path):
        self.rank, self.size = rank, size
        self.device = rank % torch.cuda.device_count()
        torch.cuda.set_device(self.device)
        # Loaded now: the first use of a kernel of torch's waits for the device, which may be spinning on a peer.
        torch.cuda._sleep(1)
        torch.zeros(4, device="cuda", dtype=DTYPE).copy_(torch.ones(4, device="cuda", dtype=DTYPE))
        world = World(rank, size, rank, size, "test", True, torch.device("cuda", self.device))
        self.group, self._build = ProcessGroup(world, 120.0), Build(cache)

    def reduce(self, folder: Path, stem: str, schedule: Schedule, mutant: Mutant | None = None) -> list[str | None]:
        """The kernels of `stem` in `folder` under `schedule`; `mutant` if they are one. What each rank met, by rank."""
        kernels = self._kernels(folder, stem, {name: ((name, DTYPE), kind) for name, kind in ENTRY_POINTS[stem].items()})
        if mutant is not None and mutant.is_host_counted:
            kernels = {name: HostCounted(kernel) for name, kernel in kernels.items()}
        heap = IpcHeap(self.rank, self.size, self.device, layout_for(self.size, CAPACITY), self.group.exchange)
        per_gpu = -(-self.size // torch.cuda.device_count())
        watch = DeviceWatch(DEADLINE_S, per_gpu)
        collectives = DeviceCollectives(heap, watch, kernels, CAPACITY, True, per_gpu)
        fill_words(heap.address(self.rank, "epochs"), schedule.count, NUM_COUNTERS)
        if mutant is not None and mutant.empty is not None:
            span = heap.layout.span("sentinel_inbox")
            fill_words(heap.address(self.rank, "sentinel_inbox"), mutant.empty, (span.stop - span.start) // 4)
        fault = self._fault(watch, self._run(getattr(collectives, stem), schedule))
        heap.close()
        return self.group.exchange(fault)

    def signal(self, folder: Path, mutant: SignalMutant) -> list[str | None]:
        """Messages from rank 0 to rank 1, by the kernels in `folder`."""
        kernels = self._kernels(folder, mutant.stem, {name: (name, kind) for name, kind in SIGNAL_ENTRY_POINTS.items()})
        layout = Layout.of(DeviceSignalChannel.regions("there", 8 * mutant.words))
        heap = IpcHeap(self.rank, self.size, self.device, layout, self.group.exchange)
        watch = DeviceWatch(DEADLINE_S)
        deadline = StreamDeadline(watch, 10 * DEADLINE_S)
        channel = DeviceSignalChannel(heap, watch, kernels, "there", 0, 1, mutant.wait, mutant.is_writes_only, deadline)
        generator = torch.Generator("cuda").manual_seed(1)
        sent = torch.randint(-(1 << 60), 1 << 60, (mutant.num_messages, mutant.words), generator=generator, device="cuda")
        taken = torch.full_like(sent, -1) if self.rank == 1 else sent
        self._meet()
        if self.rank == mutant.late:
            torch.cuda._sleep(SLEEP_CYCLES)
        for message, out in zip(sent, taken):
            if self.rank == 0:
                channel.put(message)
            else:
                channel.take(out)
        fault = self._fault(watch, list(zip(taken, sent)))
        heap.close()
        return self.group.exchange(fault)

    def _kernels(self, folder: Path, stem: str, entries: dict[str, tuple[Any, type]]) -> dict[Any, Any]:
        module = load(self._build.cubin(folder / f"{stem}.cu", [folder, HEADERS], {"ELEM": ELEMS[DTYPE]}), stem)
        return {key: module.function(name, (kind,)) for name, (key, kind) in entries.items()}

    def _run(self, reduce: Callable, schedule: Schedule) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Enqueue the calls; results and what they should be. All memory is there before the first call."""
        if schedule.num_replays:
            return self._run_graph(reduce, schedule)
        xs, outs, wanted = self._plan(schedule, 0)
        self._meet()
        for call, (x, out) in enumerate(zip(xs, outs)):
            if schedule.is_calm:
                self._meet()
            elif self.rank == 1 and call in schedule.late_calls:
                torch.cuda._sleep(SLEEP_CYCLES)
            reduce(x, out)
        return list(zip(outs, wanted))

    def _run_graph(self, reduce: Callable, schedule: Schedule) -> list[tuple[torch.Tensor, torch.Tensor]]:
        plans = [self._plan(schedule, replay) for replay in range(schedule.num_replays)]
        xs, outs = ([torch.empty_like(x) for x in tensors] for tensors in plans[0][:2])
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for x, out in zip(xs, outs):
                reduce(x, out)
        self._meet()
        with torch.cuda.stream(stream):
            for inputs, results, _ in plans:
                if self.rank == 1:
                    torch.cuda._sleep(SLEEP_CYCLES)
                for x, given in zip(xs, inputs):
                    x.copy_(given)
                graph.replay()
                for out, result in zip(outs, results):
                    result.copy_(out)
        return [pair for _, results, wanted in plans for pair in zip(results, wanted)]

    def _plan(self, schedule: Schedule, replay: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        """This rank's inputs, poisoned outputs, and the sums, of each call."""
        xs, outs, sums = [], [], []
        for call, n in enumerate(schedule.sizes):
            if schedule.is_chained and call > 0:
                parts = [sums[-1]] * self.size
                xs.append(outs[-1])
            else:
                parts = [part(peer, 1000 * replay + call, n, schedule.data) for peer in range(self.size)]
                xs.append(parts[self.rank])
            outs.append(torch.full((n,), float("nan"), dtype=DTYPE, device="cuda"))
            total = parts[0].float()
            for other in parts[1:]:
                total = total + other.float()
            sums.append(total.to(DTYPE))
        return xs, outs, sums

    def _meet(self) -> None:
        torch.cuda.synchronize()
        self.group.exchange(None)

    def _fault(self, watch: DeviceWatch, results: list[tuple[torch.Tensor, torch.Tensor]]) -> str | None:
        torch.cuda.synchronize()
        try:
            watch.check()
        except PeerTimeout as error:
            return f"{DEADLINE}: {error}"
        for call, (out, wanted) in enumerate(results):
            is_same = out.view(torch.int16) == wanted.view(torch.int16)
            if out.is_floating_point():
                is_same |= out.isnan() & wanted.isnan()
            if not is_same.all():
                return f"{MISMATCH}: call {call}, {int((~is_same).sum())} of {is_same.numel()}"
        return None


def part(rank: int, call: int, n: int, data: str) -> torch.Tensor:
    """What `rank` gives to call `call`. Integers up to 8: sums of two, and their doublings, are exact in bf16."""
    if data == "integers":
        generator = torch.Generator("cuda").manual_seed(10 * call + rank)
        return torch.randint(-8, 9, (n,), generator=generator, device="cuda").to(DTYPE)
    if data == "all ones":
        return torch.full((n,), -1, dtype=torch.int16, device="cuda").view(DTYPE)
    return torch.full((n,), float(data), dtype=DTYPE, device="cuda")


def fill_words(address: int, word: int, num_words: int) -> None:
    """Set words of 4 bytes in this GPU's memory, and wait for it."""
    from cuda.bindings import driver

    (result,) = driver.cuMemsetD32(address, word, num_words)
    assert not result, result
    torch.cuda.synchronize()


def run_all(rank: int, size: int, root: Path, names: list[str]) -> dict[str, Outcome]:
    """The outcome of each of `names`, whose edited sources are in `root/<name's place>/control` and `/mutant`."""
    trials = Trials(rank, size, root / "cache")
    outcomes = {}
    for name in names:
        folder = root / folder_of(name)
        if name in SIGNAL_MUTANTS:
            mutant = SIGNAL_MUTANTS[name]
            control = trials.signal(folder / "control", mutant)
            outcomes[name] = Outcome(control, [], trials.signal(folder / "mutant", mutant))
            continue
        mutant = MUTANTS[name]
        outcomes[name] = Outcome(
            trials.reduce(folder / "control", mutant.stem, mutant.schedule),
            trials.reduce(folder / "mutant", mutant.stem, mutant.schedule.calm(), mutant) if mutant.has_calm else [],
            trials.reduce(folder / "mutant", mutant.stem, mutant.schedule, mutant),
        )
    trials.group.close()
    return outcomes


def folder_of(name: str) -> str:
    return str([*MUTANTS, *SIGNAL_MUTANTS].index(name))


def run_near_wrap(rank: int, size: int, sources: Path, cache: Path) -> dict[str, list[str | None]]:
    """The product's kernels with numbers that wrap, a rank late before every call."""
    trials = Trials(rank, size, cache)
    met = {stem: trials.reduce(sources, stem, NEAR_WRAP) for stem in STEMS}
    trials.group.close()
    return met
