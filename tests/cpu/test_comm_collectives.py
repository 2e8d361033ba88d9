"""Every collective of every communicator, between real processes, checked by value."""

import math
import random
import time

import pytest
import torch

from comm.choice import connect
from launch.environment import Environment
from launch.world import World
from tests.ranks_harness import RankFailed, run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_BYTES = 1 << 14  # small, so that large messages are cheap to try
BITS = {4: torch.int32, 2: torch.int16}


def open_communicator(requested, **options):
    return connect(World.from_environment(Environment.read()), requested, max_bytes=MAX_BYTES, **options)


def values_of(rank, num_elements, dtype, seed=0):
    """What `rank` contributes; any rank can compute every other's."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    return torch.randn(num_elements, generator=generator).to(dtype)


def expected_sum(size, num_elements, dtype, seed=0):
    total = values_of(0, num_elements, dtype, seed).float()
    for peer in range(1, size):
        total = total + values_of(peer, num_elements, dtype, seed).float()
    return total.to(dtype)


def same_bits(a, b):
    return torch.equal(a.view(BITS[a.itemsize]), b.view(BITS[b.itemsize]))


def integers_are_exact(communicator):
    rank, size = communicator.rank, communicator.size
    for dtype in DTYPES:
        x = (torch.arange(1000) % 17 - 8 + rank).to(dtype)
        expected = ((torch.arange(1000) % 17 - 8) * size + size * (size - 1) // 2).to(dtype)
        assert same_bits(communicator.all_reduce(x), expected)


def every_size_and_tail_sums_in_rank_order(communicator):
    for dtype in DTYPES:
        in_slot = MAX_BYTES // dtype.itemsize
        for n in (1, 2, 3, 31, 33, 1023, in_slot - 1, in_slot, in_slot + 1, 3 * in_slot + 5):
            x = values_of(communicator.rank, n, dtype, seed=n)
            assert communicator.all_reduce(x) is x
            assert same_bits(x, expected_sum(communicator.size, n, dtype, seed=n)), (dtype, n)
    empty = torch.zeros(0)
    assert communicator.all_reduce(empty).numel() == 0


def shapes_and_neighbours_are_kept(communicator):
    buffer = torch.full((4, 6), 7.0)
    x = buffer[1:3]
    x.fill_(1.0)
    assert communicator.all_reduce(x).shape == (2, 6)
    assert torch.equal(buffer[1:3], torch.full((2, 6), float(communicator.size)))
    assert torch.equal(buffer[[0, 3]], torch.full((2, 6), 7.0))
    scalar = communicator.all_reduce(torch.tensor(1.0))
    assert scalar.shape == () and scalar == communicator.size
    with torch.inference_mode():
        assert communicator.all_reduce(torch.ones(3)).tolist() == [communicator.size] * 3


def special_values_pass(communicator):
    rank, size = communicator.rank, communicator.size
    for dtype in DTYPES:
        negative_zeros = communicator.all_reduce(torch.full((65,), -0.0, dtype=dtype))
        assert same_bits(negative_zeros, torch.full((65,), -0.0, dtype=dtype))
        positive_zeros = communicator.all_reduce(torch.zeros(65, dtype=dtype))
        assert same_bits(positive_zeros, torch.zeros(65, dtype=dtype))
        # One rank alone holds the odd value; the last one, so that it comes last in the sum.
        odd = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.0], dtype=dtype)
        x = odd.clone() if rank == size - 1 else torch.zeros(5, dtype=dtype)
        communicator.all_reduce(x)
        assert x[0].isnan() and x[1] == math.inf and x[2] == -math.inf
        assert same_bits(x[3:], torch.tensor([0.0, 1.0], dtype=dtype))
        both = torch.tensor([math.inf if rank == 0 else -math.inf], dtype=dtype)
        assert communicator.all_reduce(both).isnan().all()


def rounding_happens_once(communicator):
    # 256 + 1 is 256 in bf16: added one rank at a time in bf16, the ones would vanish.
    x = torch.tensor([256.0 if communicator.rank == 0 else 1.0]).to(torch.bfloat16)
    communicator.all_reduce(x)
    exact = torch.tensor([256.0 + communicator.size - 1]).to(torch.bfloat16)
    assert same_bits(x, exact)


def all_ranks_hold_the_same_bits(communicator):
    for dtype in DTYPES:
        x = values_of(communicator.rank, 4099, dtype, seed=5) * (10 ** (communicator.rank % 4))
        x[7] = math.nan
        communicator.all_reduce(x)
        flat = x.view(torch.uint8).to(torch.float32).view(1, -1)
        gathered = communicator.gather(flat)
        if communicator.rank == 0:
            rows = gathered.view(communicator.size, -1)
            assert all(torch.equal(rows[0], row) for row in rows)


def many_calls_with_changing_sizes_stay_right(communicator):
    sizes = random.Random(1)
    num_calls = 2500 if communicator.name == "one_shot" and communicator.size <= 3 else 150
    for call in range(num_calls):
        n = sizes.choice((1, 2, 5, 64, 63, 1000, 5_000))
        x = torch.full((n,), float(communicator.rank + call % 50))
        communicator.all_reduce(x)
        expected = communicator.size * (communicator.size - 1) / 2 + communicator.size * (call % 50)
        assert (x == expected).all(), (call, n)


def stragglers_harm_nobody(communicator):
    delays = random.Random(communicator.rank)
    for call in range(40):
        if delays.random() < 0.2:
            time.sleep(delays.random() * 0.01)
        x = torch.full((300,), float(call + communicator.rank))
        communicator.all_reduce(x)
        assert (x == call * communicator.size + communicator.size * (communicator.size - 1) / 2).all()
        if call % 7 == 0:
            assert communicator.broadcast_ints([call] if communicator.rank == 0 else None) == [call]
        if call % 11 == 0:
            gathered = communicator.gather(torch.tensor([[call + communicator.rank]]))
            if communicator.rank == 0:
                assert gathered.tolist() == [[call + peer for peer in range(communicator.size)]]


def gather_joins_the_last_dimension(communicator):
    rank, size = communicator.rank, communicator.size
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((1, 3), (2, 5), (3, 2, 7), (4, 20_001), (5,)):
            x = (torch.arange(math.prod(shape)) % 100 + 100 * rank).to(dtype).view(shape)
            before = x.clone()
            gathered = communicator.gather(x)
            assert torch.equal(x, before)
            if rank != 0:
                assert gathered is None
                continue
            first = torch.arange(math.prod(shape)) % 100
            parts = [(first + 100 * peer).to(dtype).view(shape) for peer in range(size)]
            assert torch.equal(gathered, torch.cat(parts, dim=-1))
    strided = torch.arange(12.0).view(3, 4).t() + rank
    gathered = communicator.gather(strided)
    if rank == 0:
        assert torch.equal(gathered, torch.cat([torch.arange(12.0).view(3, 4).t() + p for p in range(size)], dim=-1))


def broadcast_gives_all_ranks_rank_0s_data(communicator):
    for length in (0, 1, 3, 8191, 8192, 30_000):
        values = [(-1) ** i * (i << 32) for i in range(length)]
        assert communicator.broadcast_ints(values if communicator.rank == 0 else None) == values
    extremes = [-(2**63), 2**63 - 1]
    assert communicator.broadcast_ints(extremes if communicator.rank == 0 else None) == extremes
    value = {"text": "naïve 🚪", "numbers": [1, 2.5, None, True]}
    assert communicator.broadcast_object(value if communicator.rank == 0 else None) == value
    assert communicator.broadcast_object(None) is None


def barrier_holds_until_the_last(communicator):
    for late in range(min(communicator.size, 3)):
        communicator.barrier()
        if communicator.rank == late:
            time.sleep(0.05)
        released_at = time.monotonic()  # the same clock on all ranks of a machine
        arrived = communicator.gather(torch.tensor([released_at], dtype=torch.float64))
        communicator.barrier()
        left = communicator.gather(torch.tensor([time.monotonic()], dtype=torch.float64))
        if communicator.rank == 0:
            assert left.min() >= arrived.max()


def wrong_operands_are_refused(communicator):
    for dtype in (torch.float64, torch.int32, torch.bool):
        with pytest.raises(TypeError, match="float32, bfloat16 or float16"):
            communicator.all_reduce(torch.zeros(4, dtype=dtype))
    x = torch.zeros(4, 4)
    for view in (x.t()[:, :2], x[:, 1], x[:, :2]):
        with pytest.raises(ValueError, match="contiguous"):
            communicator.all_reduce(view)
    assert communicator.all_reduce(torch.ones(1)) == communicator.size  # still in step


CHECKS = (
    integers_are_exact,
    every_size_and_tail_sums_in_rank_order,
    shapes_and_neighbours_are_kept,
    special_values_pass,
    rounding_happens_once,
    all_ranks_hold_the_same_bits,
    gather_joins_the_last_dimension,
    broadcast_gives_all_ranks_rank_0s_data,
    barrier_holds_until_the_last,
    wrong_operands_are_refused,
    stragglers_harm_nobody,
    many_calls_with_changing_sizes_stay_right,
)


def run_checks(rank, size, requested):
    communicator = open_communicator(requested)
    assert (communicator.rank, communicator.size, communicator.name) == (rank, size, requested)
    for check in CHECKS:
        check(communicator)
        communicator.barrier()
    communicator.close()
    communicator.close()


@pytest.mark.parametrize(
    "requested, size", [("one_shot", 2), ("one_shot", 3), ("one_shot", 8), ("gloo", 2), ("gloo", 3), ("host_loop", 2)]
)
def test_collectives(requested, size):
    run_ranks(size, run_checks, requested, timeout_s=120)


def fail_on_rank_1(rank, size):
    if rank == 1:
        raise ValueError("odd rank out")
    time.sleep(600)


def test_harness_reports_the_first_failure_and_ends_the_rest():
    start = time.monotonic()
    with pytest.raises(RankFailed, match="odd rank out") as caught:
        run_ranks(3, fail_on_rank_1)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 30
