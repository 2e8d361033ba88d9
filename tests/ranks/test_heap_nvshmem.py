"""The NVSHMEM heap on real GPUs: memory of its own first, then the collectives over it. Needs nvshmem4py; 4 and 8 ranks need MPS.

The collectives are those of `test_device_collectives.py`, on the other heap. `-s` shows how long opening and closing took.
"""

from __future__ import annotations

import importlib.util
import time

import pytest
import torch

from tests.ranks.test_device_collectives import BODIES, WORLDS, outcomes
from tests.ranks_harness import run_ranks

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("nvshmem") is None, reason="nvshmem4py is not installed"),
]

NUM_BYTES = 3 << 20


def pattern(writer: int, reader: int) -> torch.Tensor:
    """What `writer` stores for `reader`: bytes that differ by both and by place."""
    return ((torch.arange(NUM_BYTES, device="cuda") * 7 + 31 * writer + 101 * reader) % 251).to(torch.uint8)


def copied(address: int) -> torch.Tensor:
    """The bytes there now, poisoned before they are read."""
    import cupy

    x = torch.full((NUM_BYTES,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cupy.cuda.runtime.memcpy(x.data_ptr(), address, NUM_BYTES, cupy.cuda.runtime.memcpyDefault)
    return x


def check_memory(rank: int, size: int, num_openings: int) -> list[tuple[float, float]]:
    """Every rank writes to every rank and reads from every rank; seconds of opening and closing, each time."""
    import cupy

    from comm.heap import Layout, Region
    from comm.heap_nvshmem import NvshmemHeap
    from comm.process_group import ProcessGroup
    from launch.errors import DoorbellError
    from launch.world import World

    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    group = ProcessGroup(World(rank, size, rank, size, "test", True, torch.device("cuda", device)), 120.0)
    layout = Layout.of([Region("odd", 1001)], [Region(f"from{peer}", NUM_BYTES) for peer in range(size)])
    times = []
    for _ in range(num_openings):
        start = time.monotonic()
        heap = NvshmemHeap(rank, size, device, layout, group.exchange)
        opened = time.monotonic()
        for peer in range(size):
            assert not copied(heap.address(rank, f"from{peer}")).any(), "not zeroed"
        group.exchange(None)
        for peer in range(size):
            mine = pattern(rank, peer)
            torch.cuda.synchronize()
            target = heap.address(peer, f"from{rank}")
            cupy.cuda.runtime.memcpy(target, mine.data_ptr(), NUM_BYTES, cupy.cuda.runtime.memcpyDefault)
        torch.cuda.synchronize()
        group.exchange(None)
        for peer in range(size):
            for writer in range(size):
                assert torch.equal(copied(heap.address(peer, f"from{writer}")), pattern(writer, peer)), (writer, peer)
        group.exchange(None)
        heap.fill("from0", 0x80)
        group.exchange(None)
        for peer in range(size):
            assert (copied(heap.address(peer, "from0")) == 0x80).all()
            assert torch.equal(copied(heap.address(peer, f"from{size - 1}")), pattern(size - 1, peer)), "filled too much"
        with pytest.raises(DoorbellError, match="in use in this process already"):
            NvshmemHeap(rank, size, device, layout, group.exchange)
        closing = time.monotonic()
        heap.close()
        heap.close()
        times.append((opened - start, time.monotonic() - closing))
    group.close()
    return times


def show(size: int, times: list[list[tuple[float, float]]]) -> None:
    for opening in zip(*times):
        print(f"{size} ranks: opened in {max(t for t, _ in opening):.2f} s, closed in {max(t for _, t in opening):.2f} s")


@pytest.mark.parametrize("size", (2, 4, 8))
def test_memory(size):
    show(size, run_ranks(size, check_memory, 1, timeout_s=90))


def test_it_opens_again_after_closing():
    show(2, run_ranks(2, check_memory, 2, timeout_s=90))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", WORLDS)
def test_collectives(size, name):
    assert outcomes(size, "nvshmem")[name] is None, outcomes(size, "nvshmem")[name]
