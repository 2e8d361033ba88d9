"""Put-with-signal on real GPUs: every message whole, in order, never lapped; in graphs, with a late producer or consumer.

Each check runs every kind of channel: packets, the writes-only signal with waits in the kernel, and stream waits.
"""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

WORDS = 512  # 8-byte words of the largest message; the last one is the sum of the others and the number
KINDS = {"packet": ("kernel", False), "writes only": ("kernel", True), "stream": ("stream", False)}


@dataclass
class Ends:
    """What a check works with: `channels[kind]` is (from rank 0 to rank 1, and back)."""

    exchange: object
    heap: object
    watch: object
    deadline: object
    channels: dict


@contextmanager
def open_ends(rank: int, size: int, limit_s: float = 10.0) -> Iterator[Ends]:
    from comm.device_kernels import load_signal
    from comm.device_signal import DeviceSignalChannel
    from comm.device_watch import DeviceWatch
    from comm.heap import Layout
    from comm.heap_ipc import IpcHeap
    from comm.stream_deadline import StreamDeadline
    from engine.bench.gpu_world import GpuWorld
    from kernels.build import Build, default_cache_folder
    from launch.environment import Environment

    gpus = GpuWorld.open(Environment.read(), 120.0)
    stems = [(f"{kind}.{way}", kind, producer) for kind in KINDS for way, producer in (("there", 0), ("back", 1))]
    layout = Layout.of(*(DeviceSignalChannel.regions(stem, WORDS * 8) for stem, _, _ in stems))
    heap = IpcHeap(rank, size, gpus.world.device.index, layout, gpus.group.exchange)
    watch = DeviceWatch(limit_s, gpus.ranks_per_gpu)
    kernels, deadline = load_signal(Build(default_cache_folder())), StreamDeadline(watch, limit_s + 1.0)
    channels: dict = {kind: [] for kind in KINDS}
    for stem, kind, producer in stems:
        wait, is_writes_only = KINDS[kind]
        channel = DeviceSignalChannel(heap, watch, kernels, stem, producer, 1 - producer, wait, is_writes_only, deadline)
        channels[kind].append(channel)
    assert [there.shape for there, _ in channels.values()] == ["packet", "signal", "signal"]
    gpus.group.exchange(None)
    yield Ends(gpus.group.exchange, heap, watch, deadline, channels)
    torch.cuda.synchronize()
    gpus.group.exchange(None)
    heap.close()
    gpus.group.close()


def message(number: torch.Tensor, words: int = WORDS) -> torch.Tensor:
    """Message `number` (int64 scalar on the GPU): words that differ, and their checksum."""
    body = (torch.arange(words - 1, device="cuda") + 1) * 1_000_003 * number
    return torch.cat([body, (body.sum() + number)[None]])


def stream_one_way(rank: int, ends: Ends, there, num_messages: int, sizes: tuple[int, ...]) -> None:
    """A producer that meets nobody on its way must still not lap the consumer, whoever is late."""
    mine, common = random.Random(rank), random.Random(9)
    number, bad = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
    for step in range(num_messages):
        number += 1
        words = common.choice(sizes)
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(3 * 10**5))
        if rank == 0:
            there.put(message(number, words))
        else:
            out = torch.full((words + 1,), -1, dtype=torch.int64, device="cuda")
            there.take(out[:words])
            bad += (out[:words] != message(number, words)).sum() + (out[words] != -1)
        if step % 500 == 0:
            ends.deadline.synchronize()
    ends.deadline.synchronize()
    assert bad.item() == 0


def check_one_way(rank: int, size: int) -> None:
    with open_ends(rank, size) as ends:
        for there, _ in ends.channels.values():
            with torch.cuda.stream(torch.cuda.Stream()):
                stream_one_way(rank, ends, there, 2000, (1, 2, 8, 31, 32, 33, 64, WORDS))


def set_number(ends: Ends, rank: int, stem: str, number: int) -> None:
    """As if `number` messages had passed, before any has."""
    import cupy

    value = ctypes.c_uint32(number)
    cupy.cuda.runtime.memcpy(ends.heap.address(rank, f"{stem}.state"), ctypes.addressof(value), 4, 1)  # host to device
    torch.cuda.synchronize()


def check_wrap_around(rank: int, size: int) -> None:
    with open_ends(rank, size) as ends:
        for kind, (there, _) in ends.channels.items():
            set_number(ends, rank, f"{kind}.there", 2**32 - 20)
            ends.exchange(None)
            with torch.cuda.stream(torch.cuda.Stream()):
                stream_one_way(rank, ends, there, 100, (8, WORDS))


def bounce(rank: int, there, back, x: torch.Tensor, y: torch.Tensor, rounds: int, is_relayed: bool) -> None:
    """`x` of rank 0 goes there and back `rounds` times and ends in `y` of both ranks."""
    if is_relayed and rank == 1:
        for _ in range(rounds):
            there.relay(y, back)
    elif is_relayed:
        there.put(x)
        for _ in range(rounds - 1):
            back.relay(y, there)
        back.take(y)
    else:
        for index in range(rounds):
            if rank == 0:
                there.put(x if index == 0 else y)
                back.take(y)
            else:
                there.take(y)
                back.put(y)


def check_replays(rank: int, size: int) -> None:
    """Graphs of 1, 3 and 4 round trips, by put and take and by relay, replayed with eager messages in between."""
    with open_ends(rank, size) as ends:
        number, bad = (torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(2))
        x, y = (torch.zeros(WORDS, dtype=torch.int64, device="cuda") for _ in range(2))
        stream, common = torch.cuda.Stream(), random.Random(4)
        for there, back in ends.channels.values():
            graphs = []
            with torch.cuda.stream(stream):
                for rounds, is_relayed in ((1, False), (3, True), (4, False), (4, True)):
                    bounce(rank, there, back, x, y, rounds, is_relayed)
                    ends.deadline.synchronize()
                    ends.exchange(None)
                    graphs.append(torch.cuda.CUDAGraph())
                    with torch.cuda.graph(graphs[-1], stream=stream):
                        bounce(rank, there, back, x, y, rounds, is_relayed)
                for _ in range(300):
                    number += 1
                    x.copy_(message(number) if rank == 0 else torch.full_like(x, -2))
                    y.fill_(-1)
                    if common.random() < 0.2:
                        bounce(rank, there, back, x, y, 2, common.random() < 0.5)
                    else:
                        common.choice(graphs).replay()
                    bad += (y != message(number)).sum()
                ends.deadline.synchronize()
                x.fill_(0)  # payloads of all zeros pass like any other
                y.fill_(-1)
                graphs[0].replay()
                bad += (y != 0).sum()
                ends.deadline.synchronize()
        assert bad.item() == 0


def check_deadline(rank: int, size: int, kind: str, verb: str) -> str:
    """Both ranks take what nobody puts, in a graph that is replayed twice; or put what nobody takes."""
    from launch.errors import PeerTimeout

    with open_ends(rank, size, limit_s=0.5) as ends:
        there, back = ends.channels[kind]
        x = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(2):
                if verb == "take":
                    (back if rank == 0 else there).take(x)
                else:
                    (there if rank == 0 else back).put(x)
        with torch.cuda.stream(stream):
            graph.replay()
            graph.replay()
            with pytest.raises(PeerTimeout) as caught:
                ends.deadline.synchronize()
        ends.exchange(None)
        return str(caught.value)


def check_noted_launches(rank: int, size: int) -> str:
    """Rank 1 launches takes of what comes, then of what nobody puts, and waits for neither: its thread ends these."""
    from launch.errors import PeerTimeout

    with open_ends(rank, size, limit_s=0.5) as ends:
        there, _ = ends.channels["stream"]
        x = torch.zeros(WORDS, dtype=torch.int64, device="cuda")
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            (there.put if rank == 0 else there.take)(x)
        text = ""
        with torch.cuda.stream(stream):
            for _ in range(50):
                graph.replay()
                there.note_launch()
            stream.synchronize()
            time.sleep(3.0)  # twice the limit of the deadline
            ends.watch.check()
            ends.exchange(None)
            if rank == 1:
                for _ in range(3):
                    graph.replay()
                    there.note_launch()
                stream.synchronize()  # has no end but the thread's
                with pytest.raises(PeerTimeout) as caught:
                    ends.watch.check()
                text = str(caught.value)
        ends.deadline.close()
        ends.exchange(None)
        return text


def test_one_way_messages_arrive_whole_and_in_order():
    run_ranks(2, check_one_way, timeout_s=120)


def test_numbers_wrap_around():
    run_ranks(2, check_wrap_around, timeout_s=120)


def test_graphs_of_any_length_replayed_among_eager_messages():
    run_ranks(2, check_replays, timeout_s=120)


def test_a_thread_ends_the_waits_of_launches_that_nobody_waits_for():
    assert "rank 0 did not arrive at signal_take" in run_ranks(2, check_noted_launches, timeout_s=120)[1]


@pytest.mark.parametrize(
    "kind, verb", [("packet", "take"), ("writes only", "take"), ("stream", "take"), ("packet", "put"), ("stream", "put")]
)
def test_a_silent_peer_ends_the_wait(kind, verb):
    texts = run_ranks(2, check_deadline, kind, verb, timeout_s=120)
    for rank, text in enumerate(texts):
        assert f"rank {1 - rank} did not arrive at signal_{verb}" in text
