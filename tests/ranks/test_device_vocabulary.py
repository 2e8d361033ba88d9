"""Arg-max, draw and gather over a split vocabulary on real GPUs, against torch and the sampler. 4 and 8 ranks need MPS.

`-s` shows the times of `test_times`.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from tests.ranks_harness import run_bodies, run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WORLDS = (1, 2, 4, 8)
NAN, INF = float("nan"), float("inf")
SHAPES = ((1, 1), (1, 7), (3, 129), (8, 1001), (2, 19008), (1, 76032), (64, 515), (70, 64), (256, 33))  # rows, local columns
POISON = -7


def full_logits(kind: str, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The whole rows, equal on all ranks."""
    generator = torch.Generator("cuda").manual_seed(width)
    ties = torch.randint(-2, 3, (rows, width), generator=generator, device="cuda").float()
    specks = torch.rand(rows, width, generator=generator, device="cuda")
    made = {
        "random": lambda: torch.randn(rows, width, generator=generator, device="cuda"),
        "ties": lambda: ties,
        "zeros of both signs": lambda: torch.where(specks < 0.5, -0.0, 0.0),
        "nothing": lambda: torch.full_like(ties, -INF),
        "NaN": lambda: torch.where(specks < 3 / width, NAN, ties),
        "infinite": lambda: torch.where(specks < 3 / width, INF, ties),
        "mostly masked": lambda: torch.where(specks < 1 - 3 / width, -INF, ties),
    }
    return made[kind]().to(dtype)


KINDS = ("random", "ties", "zeros of both signs", "nothing", "NaN", "infinite", "mostly masked")


def shard(full: torch.Tensor, rank: int, local: int, pad: int = 0, poison: float = NAN) -> tuple[torch.Tensor, int, int]:
    """(logits, first id, valid columns) of `rank`. Padding, and `pad` columns around every row, hold `poison`."""
    first = min(rank * local, full.shape[1])
    valid = min(local, full.shape[1] - first)
    memory = torch.full((full.shape[0], local + 2 * pad), poison, device="cuda", dtype=full.dtype)
    logits = memory[:, pad : pad + local]
    logits[:, :valid] = full[:, first : first + valid]
    return logits, first, valid


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def first_highest(full: torch.Tensor) -> torch.Tensor:
    from comm.vocabulary import local_best

    return local_best(full, 0, full.shape[1]).ids


def check_argmax(rank: int, size: int) -> None:
    from tests.ranks.device_world import device_world

    with device_world(rank, size) as world:
        assert world.rank == rank
        for dtype in DTYPES:
            for number, (rows, local) in enumerate(SHAPES):
                for kind in KINDS:
                    width = max(1, size * local - (number % 3) * (local // 2))  # with 2, the last rank holds only padding
                    full = full_logits(kind, rows, width, dtype)
                    logits, first, valid = shard(full, rank, local, pad=number % 4, poison=(NAN, INF)[number % 2])
                    ids = torch.full((rows + 3,), POISON, device="cuda")
                    values = torch.full((rows + 3,), -77.0, device="cuda")
                    returned = world.vocabulary.argmax(logits, first, valid, ids[:rows], values[:rows])
                    what = (dtype, rows, local, width, kind)
                    assert torch.equal(returned, first_highest(full)), what
                    assert torch.equal(returned, full.float().argmax(1)), what
                    chosen = full.float().gather(1, returned[:, None])[:, 0]
                    assert torch.equal(values[:rows].nan_to_num(7e7), chosen.nan_to_num(7e7)), what
                    assert (ids[rows:] == POISON).all() and (values[rows:] == -77).all(), "wrote past the end"
        world.watch.check()


def options_of(rows: int, window: int, first_position: int, temperatures: list[float]):
    from comm.vocabulary import DrawOptions
    from engine.sampler import stream_key, stream_start

    keys = [stream_key(9, row, 0) for row in range(rows)]
    starts = [[stream_start(key, first_position + i) for i in range(window)] for key in keys]
    return keys, DrawOptions(
        torch.tensor(temperatures, dtype=torch.float64, device="cuda"),
        torch.tensor(starts, device="cuda"),
        torch.zeros(rows, dtype=torch.int64, device="cuda"),
    )


def check_draw(rank: int, size: int) -> None:
    """The sampler's ids, while positions advance on the GPU. Logits are bf16 values: differences are exact enough."""
    from engine.sampler import draw, filter_logits
    from engine.sampling_params import SamplingParams
    from tests.ranks.device_world import device_world

    window = 5
    with device_world(rank, size) as world:
        for dtype in DTYPES:
            for rows, local in ((1, 19008), (16, 1001), (64, 300), (3, 7)):
                width = size * local - local // 2
                full = (4 * full_logits("random", rows, width, torch.bfloat16)).to(dtype)
                temperatures = [(0.0, 0.7, 1.0, 1.8)[(row + 1) % 4] for row in range(rows)]
                keys, options = options_of(rows, window, 0, temperatures)
                drawn = []
                for _ in range(window):
                    drawn.append(world.vocabulary.draw(*shard(full, rank, local), options).tolist())
                    options.positions.add_(1)
                assert len(set(map(str, world.agree(drawn)))) == 1, "ranks drew different ids"
                if rank == 0:
                    for position, ids in enumerate(drawn):
                        for row, (key, t) in enumerate(zip(keys, temperatures)):
                            logits = full[row].float().cpu()
                            params = SamplingParams(temperature=t)
                            wanted = draw(*filter_logits(logits, params), key, position) if t else int(logits.argmax())
                            assert ids[row] == wanted, (dtype, rows, local, position, row)
        # Nothing to choose from is said by the value.
        bad = torch.zeros(3, size * 40, device="cuda")
        bad[0], bad[1, 5 * size], bad[2, 7] = -INF, NAN, INF
        _, options = options_of(3, 1, 0, [1.0, 1.0, 1.0])
        values = torch.zeros(3, device="cuda")
        world.vocabulary.draw(*shard(bad, rank, 40), options, values=values)
        assert not values.isfinite().any()


def check_many_calls(rank: int, size: int, num_calls: int) -> None:
    """Back to back: changing rows, widths, kinds of call, stragglers; compared on the device, read at the end."""
    from comm.vocabulary import DrawOptions
    from tests.ranks.device_world import device_world

    shared, mine = random.Random(7), random.Random(rank)
    with device_world(rank, size) as world:
        pool = []
        for local in (40, 1001, 9504, 30_000):
            full = full_logits("ties", 16, size * local, torch.bfloat16) + full_logits("random", 16, size * local, torch.bfloat16)
            pool.append((full, shard(full, rank, local)[0], first_highest(full), local))
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        ids, values = torch.full((16,), POISON, device="cuda"), torch.zeros(16, device="cuda")
        _, options = options_of(16, 2, 0, [0.0] * 16)
        for call in range(num_calls):
            full, logits, wanted, local = shared.choice(pool)
            rows, begin, what = shared.choice((1, 1, 2, 8)), shared.randrange(8), shared.random()
            part = slice(begin, begin + rows)
            if mine.random() < 0.02:
                torch.cuda._sleep(mine.randrange(10**6))
            ids.fill_(POISON)
            if what < 0.6:
                world.vocabulary.argmax(logits[part], rank * local, local, ids[:rows], values[:rows])
                bad += (ids[:rows] != wanted[part]).sum()
            elif what < 0.8:
                some = DrawOptions(options.temperatures[:rows], options.starts[:rows], options.positions[:rows])
                world.vocabulary.draw(logits[part], rank * local, local, some, ids[:rows])
                bad += (ids[:rows] != wanted[part]).sum()
            else:
                root = shared.choice((None, 0, 0, size - 1))
                gathered = world.vocabulary.gather(logits[part], root)
                if gathered is not None:
                    bad += (bits(gathered) != bits(full[part])).sum()
            if call % 200 == 0:
                torch.cuda.synchronize()
                world.watch.check()
        assert bad.item() == 0


def check_gather(rank: int, size: int) -> None:
    from tests.ranks.device_world import device_world

    with device_world(rank, size) as world:
        call = 0
        for dtype in DTYPES:
            for shape in ((1,), (1, 7), (3, 1001), (8, 4096), (2, 2, 515), (64, 19008 // size), (2, 300_001)):
                for root in (None, 0, size - 1):
                    call += 1
                    generator = torch.Generator("cuda").manual_seed(call)
                    parts = [torch.randn(shape, generator=generator, device="cuda").to(dtype) for _ in range(size)]
                    parts[-1].view(-1)[0], parts[0].view(-1)[-1] = NAN, -0.0
                    wanted, offset = torch.cat(parts, -1), call % 3
                    memory = torch.empty(parts[rank].numel() + offset, device="cuda", dtype=dtype)
                    x = memory[offset:].view(shape)
                    x.copy_(parts[rank])
                    target = torch.full((wanted.numel() + 8,), NAN, device="cuda", dtype=dtype)
                    is_receiver = root in (None, rank)
                    out = target[: wanted.numel()].view(wanted.shape) if is_receiver else None
                    got = world.vocabulary.gather(x, root, out)
                    assert (got is not None) == is_receiver
                    if is_receiver:
                        assert torch.equal(bits(got), bits(wanted)), (dtype, shape, root)
                        assert target[wanted.numel() :].isnan().all(), "wrote past the end"
                    assert torch.equal(bits(x), bits(parts[rank])), "changed its input"
        # A root never gets lapped by ranks that receive nothing.
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        x = torch.arange(5000.0, device="cuda")
        for call in range(600):
            if rank == 0 and call % 50 == 0:
                torch.cuda._sleep(10**6)
            got = world.vocabulary.gather(x + call * size + rank, root=0)
            if got is not None:
                bad += (got.view(size, -1) != x + call * size + torch.arange(size, device="cuda")[:, None]).sum()
        assert bad.item() == 0


def check_graph(rank: int, size: int) -> None:
    """Arg-max feeds a change of the logits, a draw advances its positions, and a gather follows, in a replayed graph."""
    from tests.ranks.device_world import device_world

    rows, local, window = 4, 5000, 8
    with device_world(rank, size) as world:
        full = full_logits("random", rows, size * local, torch.bfloat16)
        logits, first, valid = shard(full, rank, local)
        _, options = options_of(rows, window, 0, [0.0, 1.0, 0.5, 2.0])
        ids, drawn = (torch.full((rows,), POISON, device="cuda") for _ in range(2))
        gathered = torch.full((rows, size * local), NAN, device="cuda", dtype=torch.bfloat16)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

        def body() -> None:
            world.vocabulary.argmax(logits, first, valid, ids)
            world.vocabulary.draw(logits, first, valid, options, drawn)
            world.vocabulary.gather(logits, None, gathered)
            options.positions.add_(1)

        # Made now, and by all before anyone goes on: where ranks share a GPU, new memory waits for the peers' kernels, which may
        # be waiting for this rank. The comparisons are made once as well, for the memory and the code that they load.
        shifted = [full.roll(shift, 1) for shift in range(7)]
        highest = [first_highest(fresh) for fresh in shifted]
        assert not torch.equal(ids, highest[0]) and not torch.equal(bits(gathered), bits(full))
        torch.cuda.synchronize()
        world.agree(None)
        with torch.cuda.stream(stream):
            body()
            eager = [drawn.tolist()]
            for _ in range(window - 1):
                body()
                eager.append(drawn.tolist())
            torch.cuda.synchronize()
            world.agree(None)
            with torch.cuda.graph(graph, stream=stream):
                body()
            for replay in range(300):
                fresh, wanted = shifted[replay % 7], highest[replay % 7]
                logits.copy_(fresh[:, first : first + local])
                ids.fill_(POISON)
                graph.replay()
                assert torch.equal(ids, wanted), replay
                assert torch.equal(bits(gathered), bits(fresh)), replay
                if replay == 0:
                    assert drawn.tolist() == eager[0], "the window begins again after its last position"
                if replay % 7 == 0:  # eager calls between replays go on counting
                    assert torch.equal(world.vocabulary.argmax(logits, first, valid), wanted)


def check_deadline(rank: int, size: int) -> str:
    """Rank 0 calls, the others do not: its kernel must come back by itself, name a peer and leave an id that exists."""
    from launch.errors import PeerTimeout
    from tests.ranks.device_world import device_world

    world = device_world(rank, size, deadline_s=1.0).__enter__()  # never closed: a broken world is left, not put in order
    text = "fine"
    if rank == 0:
        ids = world.vocabulary.argmax(torch.ones(2, 64, device="cuda"), 0, 64)
        torch.cuda.synchronize()
        assert all(0 <= token_id < 128 for token_id in ids.tolist())
        try:
            world.watch.check()
        except PeerTimeout as error:
            text = str(error)
    world.agree("over")
    return text


def time_calls(rank: int, size: int) -> list[str]:
    """us a call in a graph of 100, the maximum over ranks, the median of 11."""
    from engine.bench.comm import Timer
    from tests.ranks.device_world import device_world

    lines, local = [], 76032
    with device_world(rank, size) as world:
        timer = Timer(world.group.exchange, world.watch, 11)
        for rows in (1, 8, 32):
            full = full_logits("random", rows, size * local, torch.bfloat16)
            logits, first, valid = shard(full, rank, local)
            _, options = options_of(rows, 1, 0, [1.0] * rows)
            ids = torch.full((rows,), POISON, device="cuda")
            argmax_us = timer.us_per_call(lambda x=logits, f=first, v=valid, i=ids: world.vocabulary.argmax(x, f, v, i))
            assert torch.equal(ids, first_highest(full))
            draw_us = timer.us_per_call(lambda x=logits, f=first, v=valid, o=options, i=ids: world.vocabulary.draw(x, f, v, o, i))
            out = torch.empty_like(full) if rank == 0 else None
            gather_us = timer.us_per_call(lambda x=logits, o=out: world.vocabulary.gather(x, 0, o))
            assert out is None or torch.equal(bits(out), bits(full))
            local_us = timer.us_per_call(lambda x=logits: x.argmax(1))
            lines.append(
                f"{size} ranks, {rows:2d} rows of {local} bf16: argmax {argmax_us:6.2f} us, draw {draw_us:6.2f} us, "
                f"gather to rank 0 {gather_us:7.2f} us (torch.argmax of the shard alone {local_us:6.2f} us)"
            )
    return lines


BODIES = {
    "argmax": (check_argmax,),
    "draw": (check_draw,),
    "gather": (check_gather,),
    "many calls": (check_many_calls, 3000),
    "graph replays": (check_graph,),
}


@cache
def outcomes(size: int) -> dict[str, str | None]:
    return run_bodies(size, BODIES, timeout_s=300)


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("size", WORLDS)
def test_vocabulary(size, name):
    assert outcomes(size)[name] is None, outcomes(size)[name]


def test_a_missing_peer_is_named_before_the_deadline():
    texts = run_ranks(2, check_deadline, timeout_s=90)
    assert "rank 1 did not arrive at argmax_lamport (call 1)" in texts[0]


def test_times():
    for line in run_ranks(2, time_calls, timeout_s=120)[0]:
        print(line)
