"""Hashes of the tokens that each rank's device chose: equal on all ranks, and a flipped token of one rank is found at its step.

`python -m pytest -q tests/ranks/test_token_hashes.py`, about 30 s a degree; 8 ranks share GPUs and need MPS.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

FLIPPED_STEPS = (0, 21)


def strays(rank: int, size: int, folder: str) -> list:
    """(first stray, number of hashed steps) of a run without a fault, and with the last rank's token flipped at each of
    `FLIPPED_STEPS`."""
    from comm.choice import connect
    from engine.bench.token_hashes import TokenHashes
    from engine.eager import EagerStep
    from engine.graph.cuda_operators import open_operators
    from engine.graph.row_state import RowState
    from engine.graph.step import GraphStep, buckets_for
    from engine.loading import build_replica, draw_blueprint
    from engine.loop import follow
    from engine.settings import EngineSettings
    from launch.devices import resolve_device
    from launch.environment import Environment
    from launch.world import World
    from tests.cpu.engine_harness import Run, lead_all, request
    from tests.flipped_token import flip_token

    environment = Environment.read()
    world = World.from_environment(environment, resolve_device("cuda", environment, is_sharing=True))
    comm = connect(world, "ipc")
    settings = EngineSettings(
        folder, device="cuda", dtype="float32", is_gpu_sharing=True, kv_memory_bytes=1 << 24, max_batch=4, max_model_len=256
    )
    replica = build_replica(draw_blueprint(settings, world), world, comm)
    prefill, limits, found = replica.backend._operators, replica.scheduler.limits, []
    step = EagerStep(prefill.config, prefill.plan, prefill.weights, comm, replica.backend.kv)
    for flipped_step in (None, *FLIPPED_STEPS):
        # As `engine.graph.loading.open_graphs`, with a fault in the operators of one rank before they are captured.
        operators, _ = open_operators(step, replica.full_vocab, buckets_for(limits.max_batch)[-1], limits.max_model_len)
        if flipped_step is not None and rank == size - 1:
            flip_token(operators, flipped_step)
        max_pages = -(-limits.max_model_len // step.kv.page_size)
        state = RowState(limits.max_batch, max_pages, replica.full_vocab, step.device, comm.check)
        replica.burst_backend = GraphStep(operators, state, limits.max_batch)
        hashes = TokenHashes(replica)
        if rank:
            assert follow(replica) == 0
        else:
            requests = [request([5 + row] * (3 + row), row, max_tokens=16 * (1 + row % 3)) for row in range(9)]
            run = Run(answers=[[] for _ in requests])
            lead_all(replica, requests, run)
            assert run.stats.num_waits <= len(requests)  # a row that joins takes a step of its own
        found.append((hashes.first_stray(), len(hashes.hashes)))
    torch.cuda.synchronize()
    comm.close()
    return found


@pytest.mark.parametrize("size", (2, 8))
def test_a_flipped_token_of_one_rank_is_found_at_its_step(size, tmp_path):
    from tests.token_cases import save_mild_model

    ranks = run_ranks(size, strays, str(save_mild_model(tmp_path)), timeout_s=240)
    (plain, num_steps), *faulty = ranks[0]
    assert plain is None and num_steps > 40
    assert [stray for stray, _ in faulty] == [(step, [size - 1]) for step in FLIPPED_STEPS]
    assert all(stray is None for found in ranks[1:] for stray, _ in found), "rank 0 alone compares"
