"""All-reduces on real GPUs, against sums computed from the seeds of all ranks. Needs a GPU; 4 and 8 ranks need MPS."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch

from tests.ranks_harness import run_bodies, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

SIZES = (1, 3, 7, 64, 129, 1000, 4096, 8192, 8197, 65536, 300_001)
ALGORITHMS = ("all_reduce_lamport", "all_reduce_sentinel", "all_reduce_one_shot", "all_reduce_two_shot")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORLDS = (2, 4, 8)


def part(rank: int, call: int, n: int, dtype: torch.dtype, is_integer: bool = False) -> torch.Tensor:
    """What `rank` contributes to call number `call`: every rank can make every rank's."""
    generator = torch.Generator("cuda").manual_seed(1000 * call + rank)
    if is_integer:
        return torch.randint(-8, 9, (n,), generator=generator, device="cuda").to(dtype)
    return torch.randn(n, generator=generator, device="cuda").to(dtype)


def expected_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """fp32, rank order, rounded once."""
    total = parts[0].float()
    for other in parts[1:]:
        total = total + other.float()
    return total.to(parts[0].dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def check_values(rank: int, size: int, heap_kind: str = "ipc") -> None:
    from tests.ranks.device_world import device_world

    with device_world(rank, size, heap_kind=heap_kind) as world:
        call = 0
        for dtype in DTYPES:
            for name in ALGORITHMS:
                reduce = getattr(world.collectives, name)
                for n in SIZES:
                    for is_integer in (True, False):
                        call += 1
                        parts = [part(peer, call, n, dtype, is_integer) for peer in range(size)]
                        out = torch.full((n + 16,), float("nan"), device="cuda", dtype=dtype)
                        before = parts[rank].clone()
                        reduce(parts[rank], out[:n])
                        assert torch.equal(bits(out[:n]), bits(expected_sum(parts))), (name, dtype, n, is_integer)
                        assert out[n:].isnan().all(), "wrote past the end"
                        assert torch.equal(bits(parts[rank]), bits(before)), "changed its input"
                # An unaligned view, in place.
                parts = [part(peer, call, 1001, dtype) for peer in range(size)]
                mine = parts[rank][1:]
                reduce(mine)
                assert torch.equal(bits(mine), bits(expected_sum([p[1:] if i != rank else part(i, call, 1001, dtype)[1:]
                                                                  for i, p in enumerate(parts)])))  # fmt: skip
        world.watch.check()


def check_special_values(rank: int, size: int, heap_kind: str = "ipc") -> None:
    from tests.ranks.device_world import device_world

    values = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, 3e38, 65504.0]
    with device_world(rank, size, heap_kind=heap_kind) as world:
        for dtype in DTYPES:
            for name in ALGORITHMS:
                for kind in range(4):
                    parts = []
                    for peer in range(size):
                        order = random.Random(10 * peer + kind)
                        row = [(-0.0, 0.0)[kind]] * 512 if kind < 2 else [order.choice(values) for _ in range(512)]
                        parts.append(torch.tensor(row, device="cuda").to(dtype))
                    out = torch.full((512,), 7.0, device="cuda", dtype=dtype)
                    getattr(world.collectives, name)(parts[rank], out)
                    wanted = expected_sum(parts)
                    same = (bits(out) == bits(wanted)) | (out.isnan() & wanted.isnan())
                    assert same.all(), (name, dtype, kind)
                    hashes = world.agree(bits(out).long().sum().item())
                    assert len(set(hashes)) == 1, "ranks hold different bits"


def check_many_calls(rank: int, size: int, num_calls: int, heap_kind: str = "ipc") -> None:
    """Back to back, changing sizes and algorithms, stragglers; every result compared on the device, read once at the end."""
    from tests.ranks.device_world import device_world

    rng, mine = random.Random(7), random.Random(rank)
    with device_world(rank, size, heap_kind=heap_kind) as world:
        mismatches = torch.zeros(1, dtype=torch.int64, device="cuda")
        base = [part(peer, 0, 70_000, torch.bfloat16, True) for peer in range(size)]
        for call in range(num_calls):
            name, n, shift = rng.choice(ALGORITHMS), rng.choice((8, 1000, 8192, 60_000)), rng.randrange(9000)
            if mine.random() < 0.02:
                torch.cuda._sleep(mine.randrange(10**6))
            parts = [p[shift : shift + n] + call % 5 for p in base]
            out = torch.full((n,), float("nan"), device="cuda", dtype=torch.bfloat16)
            getattr(world.collectives, name)(parts[rank].contiguous(), out)
            mismatches += (out != expected_sum(parts)).sum()
            if call % 200 == 0:
                torch.cuda.synchronize()
                world.watch.check()
        assert mismatches.item() == 0


def replays(world, rank: int, body: Callable[[], None], count: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Numbers from 0, and what replays `body`, captured in a graph, each time, now and then late. On a stream of its own."""
    stream, graph, mine = torch.cuda.Stream(), torch.cuda.CUDAGraph(), random.Random(rank)

    def run() -> None:
        if mine.random() < 0.1:
            torch.cuda._sleep(mine.randrange(10**6))
        graph.replay()

    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        body()
        torch.cuda.synchronize()
        world.agree(None)
        with torch.cuda.graph(graph, stream=stream):
            body()
        for replay in range(count):
            yield replay, run
        torch.cuda.synchronize()


def check_graph(rank: int, size: int, heap_kind: str = "ipc") -> None:
    from tests.ranks.device_world import device_world

    n = 8192
    with device_world(rank, size, heap_kind=heap_kind) as world:
        x, out = torch.empty(n, device="cuda", dtype=torch.bfloat16), torch.empty(n, device="cuda", dtype=torch.bfloat16)

        def body() -> None:
            for name in ALGORITHMS:
                getattr(world.collectives, name)(x, out)
                x.copy_(out * 0.25)

        x.fill_(1.0)
        for replay, run in replays(world, rank, body, 300):
            parts = [part(peer, replay, n, torch.bfloat16) for peer in range(size)]
            x.copy_(parts[rank])
            run()
            wanted = expected_sum(parts)
            for _ in ALGORITHMS[1:]:
                quarter = wanted * 0.25
                wanted = expected_sum([quarter] * size)
            assert torch.equal(bits(out), bits(wanted)), replay
            if replay % 7 == 0:  # eager calls between replays go on counting
                y = part(rank, replay, 512, torch.bfloat16)
                world.collectives.all_reduce_lamport(y)
                assert torch.equal(bits(y), bits(expected_sum([part(p, replay, 512, torch.bfloat16) for p in range(size)])))


def check_norm(rank: int, size: int, heap_kind: str = "ipc") -> None:
    from tests.ranks.device_world import device_world

    with device_world(rank, size, heap_kind=heap_kind) as world:
        for dtype in DTYPES:
            for rows, hidden in ((1, 8192), (8, 8192), (16, 3584), (3, 896), (70, 1024)):
                call = rows * hidden
                parts = [part(peer, call, rows * hidden, dtype).view(rows, hidden) for peer in range(size)]
                old, weight = part(90, call, rows * hidden, dtype).view(rows, hidden), part(91, call, hidden, dtype)
                wanted = (expected_sum(parts).float() + old.float()).to(dtype)
                exact = wanted.double() * (wanted.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
                for is_next_early in (False, True):
                    residual, normed = old.clone(), torch.full_like(old, float("nan"))
                    norm = partial(world.collectives.all_reduce_lamport_norm, is_next_early=is_next_early)
                    norm(parts[rank], residual, weight, 1e-6, normed)
                    assert torch.equal(bits(residual), bits(wanted)), (dtype, rows, hidden)
                    error = (normed.double() - exact).norm() / exact.norm()
                    assert error < {torch.bfloat16: 5e-3, torch.float16: 6e-4, torch.float32: 1e-6}[dtype], (error, dtype, rows)
                    assert len(set(world.agree(bits(normed).long().sum().item()))) == 1


def check_norm_of_parts(rank: int, size: int, heap_kind: str = "ipc") -> None:
    """A rank's part that comes as sums to be added is, to the bit, that part added in order and rounded."""
    from tests.ranks.device_world import device_world

    with device_world(rank, size, heap_kind=heap_kind) as world:
        for dtype in DTYPES:
            for num_parts, rows, hidden in ((1, 1, 8192), (3, 8, 3584), (8, 16, 896), (16, 70, 1024)):
                sums = part(rank, num_parts, num_parts * rows * hidden, torch.float32).view(num_parts, rows, hidden)
                before, added = sums.clone(), sums[0].clone()
                for other in sums[1:]:
                    added += other
                residual, weight = part(90, rows, rows * hidden, dtype).view(rows, hidden), part(91, rows, hidden, dtype)
                found = [residual.clone(), torch.full_like(residual, float("nan"))]
                wanted = [residual.clone(), torch.full_like(residual, float("nan"))]
                world.collectives.all_reduce_lamport_norm(added.to(dtype), wanted[0], weight, 1e-6, wanted[1])
                world.collectives.all_reduce_lamport_norm(sums, found[0], weight, 1e-6, found[1], is_next_early=True)
                assert all(torch.equal(bits(a), bits(b)) for a, b in zip(found, wanted)), (dtype, num_parts, rows, hidden)
                assert not wanted[1].isnan().any() and torch.equal(bits(sums), bits(before))


def check_norms_of_two_models(rank: int, size: int, heap_kind: str = "ipc") -> None:
    """Rows of two widths in turn, as those of a target and of a draft model split over the same ranks: other CTAs a row, the same
    inbox and counters. Back to back in a replayed graph, with stragglers."""
    from tests.ranks.device_world import device_world

    shapes = ((5, 8192), (10, 896), (1, 896), (1, 8192), (32, 896), (20, 8192))
    with device_world(rank, size, heap_kind=heap_kind) as world:
        x, residual, normed = ([torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes] for _ in range(3))
        weights = [torch.ones(hidden, dtype=torch.bfloat16, device="cuda") for _, hidden in shapes]
        bases = [[part(peer, idx, rows * hidden, torch.bfloat16, True).view(rows, hidden) for peer in range(size)]
                 for idx, (rows, hidden) in enumerate(shapes)]  # fmt: skip
        mismatches = torch.zeros(1, dtype=torch.int64, device="cuda")

        def body() -> None:
            for old in residual:
                old.zero_()
            for operands in zip(x, residual, weights, normed):
                world.collectives.all_reduce_lamport_norm(*operands[:3], 1e-6, operands[3], is_next_early=True)

        for replay, run in replays(world, rank, body, 300):
            for own, base in zip(x, bases):
                own.copy_(base[rank] + replay % 5)
            run()
            for found, base, after in zip(residual, bases, normed):
                wanted = expected_sum([one + replay % 5 for one in base])
                scale = (wanted.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
                mismatches += (found != wanted).sum() + ((after.float() - wanted.float() * scale).abs() > 0.05).sum()
        assert mismatches.item() == 0


def check_norm_of_many_rows(rank: int, size: int, heap_kind: str = "ipc") -> None:
    """Summed and normed where the products lie: values of all shapes, then a chain of calls in a replayed graph, each of which
    overwrites what the last one read, with stragglers."""
    from tests.ranks.device_world import device_world

    shapes = ((1, 64), (7, 896), (65, 896), (130, 3584), (300, 4096), (513, 8192), (1030, 1024))
    with device_world(rank, size, heap_kind=heap_kind) as world:
        collectives = world.collectives
        for call, (dtype, (rows, hidden)) in enumerate((dtype, shape) for dtype in DTYPES for shape in shapes):
            summands = collectives.summands(rows, hidden, dtype)
            if summands is None:
                assert hidden * dtype.itemsize > 16384
                continue
            parts = [part(peer, call, rows * hidden, dtype).view(rows, hidden) for peer in range(size)]
            residual, weight = part(90, call, rows * hidden, dtype).view(rows, hidden), part(91, call, hidden, dtype)
            wanted = (residual.float() + expected_sum(parts).float()).to(dtype)
            scale = (wanted.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
            normed = ((wanted.float() * scale).to(dtype).float() * weight.float()).to(dtype)
            summands.copy_(parts[rank])
            collectives.heap.own_tensor("rows_normed", (rows, hidden), dtype).fill_(float("nan"))
            torch.cuda.synchronize()
            world.agree(None)  # peers write here
            updated = residual.clone()
            found = collectives.all_reduce_two_shot_norm(summands, updated, weight, 1e-6)
            share = -(-rows // size)
            own = torch.arange(rows, device="cuda") // share == rank
            assert torch.equal(bits(updated[own]), bits(wanted[own])), (dtype, rows, hidden)
            assert torch.equal(bits(updated[~own]), bits(residual[~own])), "wrote rows of other ranks"
            assert torch.allclose(found.float(), normed.float(), rtol=4 * torch.finfo(dtype).eps), (dtype, rows, hidden)
            assert len(set(world.agree(int(bits(found).long().sum())))) == 1, "ranks hold other bits"
        count, (rows, hidden) = 5, (200, 8192)
        bases = [[part(peer, call, rows * hidden, torch.bfloat16, True).view(rows, hidden) for peer in range(size)]
                 for call in range(count)]  # fmt: skip
        summands = collectives.summands(rows, hidden, torch.bfloat16)
        weight = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")
        own_bases = [base[rank].clone() for base in bases]
        found = torch.empty(count, rows, hidden, dtype=torch.bfloat16, device="cuda")
        mismatches = torch.zeros(1, dtype=torch.int64, device="cuda")

        def body() -> None:
            for base, kept in zip(own_bases, found):
                torch.add(base, 0, out=summands)
                kept.copy_(collectives.all_reduce_two_shot_norm(summands, torch.zeros_like(base), weight, 1e-6))

        for replay, run in replays(world, rank, body, 200):
            for own, base in zip(own_bases, bases):
                own.copy_(base[rank] + replay % 5)
            run()
            for base, after in zip(bases, found):
                wanted = expected_sum([one + replay % 5 for one in base]).float()
                scale = (wanted.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
                mismatches += ((after.float() - wanted * scale).abs() > 0.05).sum()
        assert mismatches.item() == 0


def check_deadline(rank: int, size: int) -> str:
    """Rank 0 calls, the others do not: its kernel must come back by itself, and the record name a peer."""
    from launch.errors import PeerTimeout
    from tests.ranks.device_world import device_world

    world = device_world(rank, size, deadline_s=1.0).__enter__()  # never closed: a broken world is left, not put in order
    text = "fine"
    if rank == 0:
        world.collectives.all_reduce_lamport(torch.ones(8192, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
        try:
            world.watch.check()
        except PeerTimeout as error:
            text = str(error)
    world.agree("over")
    return text


BODIES = {
    "values": (check_values,),
    "special values": (check_special_values,),
    "many calls": (check_many_calls, 2000),
    "graph replays": (check_graph,),
    "norm": (check_norm,),
    "norm of parts": (check_norm_of_parts,),
    "norms of two models": (check_norms_of_two_models,),
    "norm of many rows": (check_norm_of_many_rows,),
}


@cache
def outcomes(size: int, heap_kind: str = "ipc") -> dict[str, str | None]:
    return run_bodies(size, {name: (*body, heap_kind) for name, body in BODIES.items()}, timeout_s=300)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", WORLDS)
def test_collectives(size, name):
    assert outcomes(size)[name] is None, outcomes(size)[name]


def test_a_missing_peer_is_named_before_the_deadline():
    texts = run_ranks(2, check_deadline, timeout_s=90)
    assert "rank 1 did not arrive at all_reduce_lamport (call 1)" in texts[0]
