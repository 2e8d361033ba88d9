"""Captured steps of 2, 4 and 8 ranks against eager steps of the same ranks; 4 and 8 share GPUs and need MPS.

`python -m pytest -q tests/ranks/test_graph_ranks.py`, about 40 s a degree.
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


def answer_in_turn(rank: int, size: int, folder: str) -> list:
    """(tokens with graphs, tokens of eager steps, host waits with graphs, digest) of each case."""
    from comm.choice import connect
    from engine.loading import build_replica, draw_blueprint
    from engine.loop import follow
    from engine.settings import EngineSettings
    from launch.devices import resolve_device
    from launch.environment import Environment
    from launch.world import World
    from tests.cpu.engine_harness import Run, lead_all

    environment = Environment.read()
    world = World.from_environment(environment, resolve_device("cuda", environment, is_sharing=True))
    comm = connect(world, "ipc")
    replicas = []
    for is_eager in (True, False):
        settings = EngineSettings(
            folder, device="cuda", dtype="float32", is_gpu_sharing=True, kv_memory_bytes=1 << 24, max_batch=9, is_eager=is_eager,
            overlap_tokens=129,  # of two ranks with a GPU each: steps of several prompts
        )  # fmt: skip
        replicas.append(build_replica(draw_blueprint(settings, world), world, comm))
    assert replicas[1].burst_backend is not None, replicas[1].why_single
    outcomes = []
    for count, max_tokens, number, options in CASES:
        runs = []
        for replica in replicas:
            run = Run(answers=[[] for _ in range(count)])
            if rank:
                assert follow(replica) == 0
            else:
                lead_all(replica, rows(count, max_tokens, number, **options), run)
            runs.append(run)
        outcomes.append((runs[1].token_ids if rank == 0 else [], runs[0].token_ids if rank == 0 else [],
                         runs[1].stats.num_waits, replicas[1].digest))  # fmt: skip
    assert len(replicas[1].backend._graphs) >= 2
    torch.cuda.synchronize()
    comm.close()
    return outcomes


@pytest.mark.parametrize("size", (2, 4, 8))
def test_tokens_are_those_of_eager_steps(size, tmp_path):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200}
    folder = save_model(make_model("qwen2", **shape), tmp_path)
    ranks = run_ranks(size, answer_in_turn, str(folder), timeout_s=240)
    for case in zip(*ranks):
        tokens, wanted, waits, _ = case[0]
        assert tokens == wanted and waits == 0
        assert len({digest for *_, digest in case}) == 1
