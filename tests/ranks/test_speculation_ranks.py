"""Steps with drafts on 2, 4 and 8 ranks, fp32: the tokens of eager steps, alike on all ranks. 4 and 8 share GPUs and need MPS.

`python -m pytest -q -s tests/ranks/test_speculation_ranks.py`, under a minute a degree.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCAB = 1009
RULES = ({}, {"temperature": 1.0}, {"temperature": 0.9, "top_k": 30, "top_p": 0.9})


def answer(rank: int, size: int, folder: str, source: dict) -> list:
    """(tokens with drafts, tokens of eager steps, acceptance, digest) of each of `RULES`; rank 0's but for the digest."""
    from engine.drafts.depth import FixedDepth
    from engine.drafts.speculation import Speculation
    from engine.loading import build_replica, draw_blueprint
    from engine.loop import follow
    from engine.settings import EngineSettings
    from tests.cpu.engine_harness import Run, lead_all
    from tests.gpu.test_speculation_graphs import LENGTHS, rows
    from tests.ranks.test_graph_ranks import open_comm

    world, comm = open_comm()
    torch.cuda.synchronize()
    comm.barrier()
    settings = {"dtype": "float32", "kv_memory_bytes": 1 << 24, "max_batch": 5, "is_gpu_sharing": True, "device": "cuda"}
    kinds = [EngineSettings(folder, is_eager=True, **settings), EngineSettings(folder, num_drafts=4, **source, **settings)]
    eager, drafted = (build_replica(draw_blueprint(kind, world), world, comm) for kind in kinds)
    assert drafted.burst_backend.speculable is not None
    outcomes = []
    for rules in RULES:
        tokens = []
        for replica in (drafted, eager):
            requests = rows(LENGTHS, 30, **rules)
            run, speculation = Run(answers=[[] for _ in requests]), Speculation(None, FixedDepth(4))
            if rank:
                assert follow(replica) == 0
            else:
                lead_all(replica, requests, run, speculation=speculation if replica is drafted else None)
            tokens.append(run.token_ids if rank == 0 else [])
            if replica is drafted:
                acceptance = speculation.stats.acceptance
        outcomes.append((*tokens, acceptance, drafted.digest))
    torch.cuda.synchronize()
    comm.close()
    return outcomes


@pytest.mark.parametrize("source", ("ngram", "model", "handed", "handed, stream waits", "split"))
@pytest.mark.parametrize("size", (2, 4, 8))
def test_tokens_are_those_of_eager_steps(size, source, tmp_path):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200, "max_position_embeddings": 1024}
    folder = save_model(make_model("qwen2", **shape), tmp_path)
    settings = {
        "ngram": {"is_ngram": True},
        "model": {"draft_model": str(folder)},
        "handed": {"draft_model": str(folder), "draft_placement": "first"},
        "handed, stream waits": {"draft_model": str(folder), "draft_placement": "first", "draft_wait": "stream"},
        "split": {"draft_model": str(folder), "draft_placement": "split"},
    }[source]
    ranks = run_ranks(size, answer, str(folder), settings, timeout_s=200)
    for case in zip(*ranks):
        found, wanted, acceptance, _ = case[0]
        print(f"TP {size}, {source}: {100 * acceptance:.0f} % accepted")
        assert found == wanted and (source == "ngram" or acceptance > 0.7)
        assert len({digest for *_, digest in case}) == 1
