"""Captured steps of 2, 4 and 8 ranks against eager steps of the same ranks, and transformers. 4 and 8 share GPUs and need MPS.

`python -m pytest -q -s tests/ranks/test_graph_ranks.py`, about two minutes a degree; prints what it counted.
"""

from __future__ import annotations

import random

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCAB = 1009


QWEN = {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


# Rows, their tokens, the numbers of their prompts, and their options. Prompts alone are prefilled plainly, then by padded steps
# (the second of a bucket captures), then from graphs.
CASES = (
    (1, 60, 0, {}), (3, 40, 0, {}), (20, 25, 0, {}), (2, 60, 0, QWEN), (20, 25, 0, QWEN), (3, 20, 0, {}),
    *((1, 6, number, {}) for number in range(1, 13)),
)  # fmt: skip


def rows(count: int, max_tokens: int, number: int, **options) -> list:
    from tests.cpu.engine_harness import request

    rng = random.Random(count + 1000 * number)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))] for _ in range(count)]
    return [
        request(prompt, idx, max_tokens=max_tokens, temperature=float(idx % 2), **options) for idx, prompt in enumerate(prompts)
    ]


def open_comm(all_reduce: str = "auto") -> tuple:
    """This rank's world and communicator."""
    from comm.choice import connect
    from launch.devices import resolve_device
    from launch.environment import Environment
    from launch.world import World

    environment = Environment.read()
    world = World.from_environment(environment, resolve_device("cuda", environment, is_sharing=True))
    return world, connect(world, "ipc", all_reduce=all_reduce)


def open_pair(folder: str, world, comm, is_profiled: bool = False, **settings) -> list:
    """A replica with eager steps, and one with graphs, profiled if that is asked for."""
    from engine.loading import build_replica, draw_blueprint
    from engine.settings import EngineSettings

    torch.cuda.synchronize()
    comm.barrier()  # taking memory waits for kernels of all ranks of a GPU, which must not wait for a rank in turn
    replicas = []
    for is_eager in (True, False):
        chosen = EngineSettings(
            folder, device="cuda", is_gpu_sharing=True, is_eager=is_eager, is_profiled=is_profiled and not is_eager, **settings
        )  # fmt: skip
        replicas.append(build_replica(draw_blueprint(chosen, world), world, comm))
    assert replicas[1].burst_backend is not None, replicas[1].why_single
    return replicas


def answer_both(replicas: list, make_requests) -> list:
    """The runs of both replicas; empty ones on other ranks than 0."""
    from engine.loop import follow
    from tests.cpu.engine_harness import Run, lead_all

    runs = []
    for replica in replicas:
        requests = make_requests()
        runs.append(Run(answers=[[] for _ in requests]))
        if replica.comm.rank:
            assert follow(replica) == 0
        else:
            lead_all(replica, requests, runs[-1])
    return runs


def answer_in_turn(rank: int, size: int, folder: str, is_profiled: bool, all_reduce: str = "auto") -> list:
    """(tokens with graphs, tokens of eager steps, host waits with graphs, digest) of each case. `is_profiled`: the graphs."""
    world, comm = open_comm(all_reduce)
    replicas = open_pair(
        folder, world, comm, is_profiled, dtype="float32", kv_memory_bytes=1 << 24, max_batch=9,
    )  # fmt: skip
    outcomes = []
    for count, max_tokens, number, options in CASES:
        plain, run = answer_both(replicas, lambda: rows(count, max_tokens, number, **options))  # noqa: B023
        tokens = [run.token_ids, plain.token_ids] if rank == 0 else [[], []]
        outcomes.append((*tokens, run.stats.num_waits, replicas[1].digest))
    assert is_profiled or len(replicas[1].backend._graphs) >= 2
    if is_profiled:
        burst = replicas[1].profiler.profile().kinds["burst"]
        assert burst.stages["all_reduce"] > 0 and sum(burst.stages.values()) == pytest.approx(burst.wall_us, rel=1e-3)
        assert rank or burst.is_whole
    torch.cuda.synchronize()
    comm.close()
    return outcomes


@pytest.mark.parametrize("size", (2, 4, 8))
def test_tokens_are_those_of_eager_steps(size, tmp_path):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200}
    folder = save_model(make_model("qwen2", **shape), tmp_path)
    for is_profiled in (False, True) if size == 2 else (False,):
        check_in_turn(run_ranks(size, answer_in_turn, str(folder), is_profiled, timeout_s=240))


@pytest.mark.parametrize("all_reduce", ("lamport", "one_shot"))
def test_tokens_are_the_same_by_one_algorithm_for_all_sums(all_reduce, tmp_path):
    """One-shot: the sum and the norm are kernels of their own in steps of few rows, too."""
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200}
    folder = save_model(make_model("qwen2", **shape), tmp_path)
    check_in_turn(run_ranks(2, answer_in_turn, str(folder), False, all_reduce, timeout_s=240))


def check_in_turn(ranks: list) -> None:
    for case in zip(*ranks):
        tokens, wanted, waits, _ = case[0]
        assert tokens == wanted and waits == 0
        assert len({digest for *_, digest in case}) == 1


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LOCAL_KV_HEADS = 1  # of two, at every degree here
NUM_PAGES = 50


def border_cases() -> list:
    """Page borders and split borders in small and large batches, and rows for which `NUM_PAGES` are too few, the last."""
    from tests.token_cases import PAGE_LENGTHS, Rows, page_cases, split_cases

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    cases = [case for case in page_cases() if len(case.prompts) in (3, 17, 64)]
    cases += [case for case in split_cases(num_sms, LOCAL_KV_HEADS) if len(case.prompts) in (1, 8)]
    return [*cases, Rows.draw([length + 5 for length in PAGE_LENGTHS] * 2, 70)]


def answer_borders(rank: int, size: int, folder: str) -> list:
    """(dtype, tokens of eager steps, tokens with graphs, host waits a step and preemptions with graphs) of each case; tokens
    and waits are rank 0's."""
    from tests.token_cases import MAX_MODEL_LEN

    world, comm = open_comm()
    outcomes = []
    *cases, short_of_pages = border_cases()
    for dtype in DTYPES:
        page_bytes = 2 * 3 * 16 * LOCAL_KV_HEADS * 64 * (4 if dtype == "float32" else 2)  # layers, tokens, heads
        pair = open_pair(folder, world, comm, dtype=dtype, kv_memory_bytes=1 << 29, max_batch=64, max_model_len=MAX_MODEL_LEN,
                         max_step_tokens=8 * MAX_MODEL_LEN)  # fmt: skip
        few = open_pair(folder, world, comm, dtype=dtype, kv_memory_bytes=NUM_PAGES * page_bytes, max_batch=17, max_model_len=256)
        assert few[1].scheduler.pool.num_pages == NUM_PAGES
        for replicas, case in [*((pair, case) for case in cases), (few, short_of_pages)]:
            plain, run = answer_both(replicas, lambda: case.requests)  # noqa: B023
            tokens = [plain.token_ids, run.token_ids] if rank == 0 else [[], []]
            waits = run.stats.num_waits / max(1, run.stats.num_steps)
            outcomes.append((dtype, *tokens, waits, replicas[1].scheduler.num_preemptions))
    torch.cuda.synchronize()
    comm.close()
    return outcomes


@pytest.mark.parametrize("size", (2, 4, 8))
def test_tokens_at_borders_and_after_preemption(size, tmp_path):
    """fp32: the same tokens as eager steps and transformers; bf16: first differences at near-ties only."""
    from tests.near_ties import MOST_TIES, Reference, Tally
    from tests.token_cases import save_mild_model

    folder, cases = save_mild_model(tmp_path), border_cases()
    outcomes = run_ranks(size, answer_borders, str(folder), timeout_s=280)[0]
    reference = Reference(folder, "cuda")
    tallies = {(dtype, name): Tally() for dtype in DTYPES for name in ("eager steps", "transformers")}
    for case, (dtype, plain, found, waits, preemptions) in zip(cases * len(DTYPES), outcomes, strict=True):
        assert (waits < 0.5 and preemptions > 3) if case is cases[-1] else waits == preemptions == 0
        for name, wanted in (("eager steps", plain), ("transformers", None)):
            tallies[dtype, name] += reference.compare(case.prompts, wanted, found, DTYPES[dtype])
    print()
    for (dtype, name), tally in tallies.items():
        print(f"TP {size}, {dtype}, graphs against {name}: {tally}")
        assert tally.num_identical == tally.num_rows or dtype != "float32"
        assert tally.tie_rate < MOST_TIES
