"""Many all-reduces with changing data and sizes, each result compared on the device with the exact integer sum."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

GRAPH_CALLS = 50


def soak(rank: int, size: int, num_calls: int) -> tuple[int, list[float]]:
    """Graphs of calls of several sizes; every replay sees other data. Mismatches, and us a call of each tenth."""
    from tests.ranks.device_world import device_world

    rng = random.Random(3)
    sizes = [rng.choice((8, 1000, 8192, 8192, 8192, 30_001)) for _ in range(GRAPH_CALLS)]
    with device_world(rank, size, deadline_s=20.0) as world:
        shift = torch.zeros((), dtype=torch.int64, device="cuda")
        mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
        pattern = torch.arange(40_000, device="cuda")
        inputs = [torch.empty(n, dtype=torch.bfloat16, device="cuda") for n in sizes]
        outputs = [torch.empty_like(x) for x in inputs]

        def fill() -> None:  # integers of at most 8, so that sums of eight ranks are exact
            for x in inputs:
                x.copy_((pattern[: x.numel()] + shift + 3 * rank) % 9 - 4)

        def reduce() -> None:
            for index, (x, out) in enumerate(zip(inputs, outputs)):
                name = ("all_reduce_lamport", "all_reduce_sentinel")[index % 2]
                getattr(world.collectives, name)(x, out)

        def check() -> None:
            for out in outputs:
                wanted = sum((pattern[: out.numel()] + shift + 3 * peer) % 9 - 4 for peer in range(size))
                mismatches.add_((out != wanted).sum())
            shift.add_(1)

        stream = torch.cuda.Stream()
        graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
        with torch.cuda.stream(stream):
            for body in (fill, reduce, check):
                body()
            torch.cuda.synchronize()
            world.agree(None)
            for graph, body in zip(graphs, (fill, reduce, check)):
                with torch.cuda.graph(graph, stream=stream):
                    body()
            tenths = []
            for _ in range(10):
                events = []
                for _ in range(num_calls // GRAPH_CALLS // 10):
                    graphs[0].replay()
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    start.record()
                    graphs[1].replay()
                    end.record()
                    graphs[2].replay()
                    events.append((start, end))
                torch.cuda.synchronize()
                world.watch.check()
                times = sorted(start.elapsed_time(end) for start, end in events)
                tenths.append(max(world.agree(times[len(times) // 2] * 1e3 / GRAPH_CALLS)))
        return int(mismatches), tenths


@pytest.mark.parametrize("size", (2, 8))
def test_soak(size):
    results = run_ranks(size, soak, 50_000, timeout_s=240)
    assert [mismatches for mismatches, _ in results] == [0] * size
    print(f"{size} ranks, us a call by tenth: " + " ".join(f"{us:.2f}" for us in results[0][1]))
