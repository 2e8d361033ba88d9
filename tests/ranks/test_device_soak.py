"""The soak (`engine/bench/soak.py`) in small, and that its check can fail."""

from __future__ import annotations

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CALLS = 50_000


def soak_ranks(rank: int, size: int) -> tuple[int, int, tuple[float, ...]]:
    from engine.bench.gpu_world import GpuWorld
    from engine.bench.soak import soak
    from launch.environment import Environment

    result = soak(GpuWorld.open(Environment.read()), CALLS)
    return result.calls, result.mismatches, result.tenths_us


def soak_without_a_sum(rank: int, size: int) -> int:
    """All-reduces that leave their input as it is."""
    from engine.bench.gpu_world import GpuWorld
    from engine.bench.soak import KERNELS, Soak
    from launch.environment import Environment

    reduce = dict.fromkeys(KERNELS, lambda x: x.mul_(1))
    return Soak(GpuWorld.open(Environment.read()), reduce, lambda: None).run(1000).mismatches


@pytest.mark.parametrize("size", (2, 8))
def test_soak(size):
    results = run_ranks(size, soak_ranks, timeout_s=240)
    assert [(calls, mismatches) for calls, mismatches, _ in results] == [(CALLS, 0)] * size
    print(f"{size} ranks, us a call by tenth: " + " ".join(f"{us:.2f}" for us in results[0][2]))


def test_the_soak_counts_sums_that_are_missing():
    # A replay compares 1.9 million elements; a zero in the other rank's part, one of 17, hides a missing sum.
    assert min(run_ranks(2, soak_without_a_sum, timeout_s=120)) > 10 * 10**6
