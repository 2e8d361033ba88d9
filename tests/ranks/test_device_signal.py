"""Put-with-signal on real GPUs: every message whole, in order, never lapped; in graphs, with a late producer or consumer."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

WORDS = 64  # 8-byte words of a message; the last one is the sum of the others


def open_channel(rank: int, size: int):
    from comm.device_kernels import load_signal
    from comm.device_signal import DeviceSignalChannel
    from comm.device_watch import DeviceWatch
    from comm.heap import Layout
    from comm.heap_ipc import IpcHeap
    from comm.process_group import ProcessGroup
    from kernels.build import Build, default_cache_folder
    from launch.world import World

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    group = ProcessGroup(World(rank, size, rank, size, "test", True, torch.device("cuda", device)), 120.0)
    layout = Layout.of(*(DeviceSignalChannel.regions(stem, WORDS * 8) for stem in ("there", "back")))
    heap, watch = IpcHeap(rank, size, device, layout, group.exchange), DeviceWatch(10.0)
    kernels = load_signal(Build(default_cache_folder()))
    there = DeviceSignalChannel(heap, watch, kernels, "there", 0, 1)
    back = DeviceSignalChannel(heap, watch, kernels, "back", 1, 0)
    group.exchange(None)
    return group, heap, watch, there, back


def message(number: torch.Tensor) -> torch.Tensor:
    """Message `number` (int64 scalar on the GPU): words that differ, and their checksum."""
    body = (torch.arange(WORDS - 1, device="cuda") + 1) * 1_000_003 * number
    return torch.cat([body, body.sum()[None]])


def check_one_way(rank: int, size: int, num_messages: int) -> None:
    """A producer that meets nobody on its way must still not lap the consumer, whoever is late."""
    group, heap, watch, there, _ = open_channel(rank, size)
    mine = random.Random(rank)
    number = torch.zeros((), dtype=torch.int64, device="cuda")
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    out = torch.empty(WORDS, dtype=torch.int64, device="cuda")
    for step in range(num_messages):
        number += 1
        if mine.random() < 0.05:
            torch.cuda._sleep(mine.randrange(3 * 10**5))
        if rank == 0:
            there.put(message(number))
        else:
            out.fill_(-1)
            there.take(out)
            bad += (out != message(number)).sum()
        if step % 500 == 0:
            torch.cuda.synchronize()
            watch.check()
    assert bad.item() == 0
    watch.check()
    group.exchange(None)
    heap.close()


def check_ping_pong(rank: int, size: int, num_replays: int) -> float:
    """Four round trips a graph, replayed; returns microseconds a hop."""
    group, heap, watch, there, back = open_channel(rank, size)
    number = torch.zeros((), dtype=torch.int64, device="cuda")
    bad = torch.zeros((), dtype=torch.int64, device="cuda")
    x, y = (torch.zeros(WORDS, dtype=torch.int64, device="cuda") for _ in range(2))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def body() -> None:
        for _ in range(4):
            if rank == 0:
                there.put(x)
                back.take(y)
            else:
                there.take(y)
                back.put(y)

    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        group.exchange(None)
        with torch.cuda.graph(graph, stream=stream):
            body()
        for _ in range(num_replays):
            number += 1
            if rank == 0:
                x.copy_(message(number))
            graph.replay()
            bad += (y != message(number)).sum()
        torch.cuda.synchronize()
        watch.check()
        assert bad.item() == 0
        x.fill_(0)  # payloads of all zeros pass like any other
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        group.exchange(None)
        graph.replay()
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    watch.check()
    assert bool((y == 0).all())
    group.exchange(None)
    heap.close()
    return start.elapsed_time(end) * 1e3 / (20 * 8)


def test_one_way_messages_arrive_whole_and_in_order():
    run_ranks(2, check_one_way, 5000, timeout_s=120)


def test_ping_pong_in_a_replayed_graph():
    hops = run_ranks(2, check_ping_pong, 2000, timeout_s=120)
    print(f"us a hop: {max(hops):.2f}")
