"""Greedy tokens of captured steps against eager steps and transformers, on one GPU: every batch, border and dtype, preemption.

`python -m pytest -q -s tests/gpu/test_graph_tokens.py`, under 60 s; prints what it counted. In fp32 the tokens are the same ones.
In bf16 the first difference of a row must be at a near-tie (`tests/near_ties.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tests.gpu.graph_engine import answer_on_gpu, open_replica
from tests.near_ties import MOST_TIES, Reference, Tally
from tests.token_cases import BATCHES, MAX_MODEL_LEN, PAGE_LENGTHS, Rows, page_cases, save_mild_model, split_cases

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PAGE_BYTES = {"float32": 2 * 3 * 16 * 2 * 64 * 4, "bfloat16": 2 * 3 * 16 * 2 * 64 * 2}  # keys and values, layers, tokens, heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_mild_model(tmp_path_factory.mktemp("mild"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder, "cuda")


@pytest.fixture(scope="module", params=DTYPES)
def pair(request, folder):
    """An eager replica and one with graphs, and their dtype."""
    # All rows of a case prefill in one step, so that every later one is a captured one.
    settings = {"dtype": request.param, "max_batch": max(BATCHES), "max_model_len": MAX_MODEL_LEN, "kv_memory_bytes": 1 << 30,
                "max_step_tokens": max(BATCHES) * MAX_MODEL_LEN}  # fmt: skip
    replicas = [open_replica(folder, steps, **settings) for steps in ("eager", "cuda")]
    yield *replicas, request.param
    for replica in replicas:
        replica.burst_backend = replica.backend = None  # the caches would stand beside those of the other dtype
    torch.cuda.empty_cache()


def check(eager, graph, reference: Reference, dtype: str, cases: Iterable[Rows], what: str, most_waits: float = 0.0) -> None:
    """`most_waits`: share of the steps that may be eager."""
    tallies = {name: Tally() for name in ("graph against eager", "graph against transformers", "eager against transformers")}
    for rows in cases:
        plain, run = answer_on_gpu(eager, rows.requests), answer_on_gpu(graph, rows.requests)
        # A row that was preempted is computed again in eager steps, in which the others take a token each.
        assert run.stats.num_waits <= most_waits * run.stats.num_steps, "steps were not captured"
        for tally, (wanted, found) in zip(
            tallies.values(), ((plain.token_ids, run.token_ids), (None, run.token_ids), (None, plain.token_ids))
        ):
            tally += reference.compare(rows.prompts, wanted, found, DTYPES[dtype])
    print()
    for name, tally in tallies.items():
        print(f"{what}, {dtype}, {name}: {tally}")
        assert tally.num_identical == tally.num_rows or dtype != "float32"
        assert tally.tie_rate < MOST_TIES


def test_tokens_across_page_borders(pair, reference):
    eager, graph, dtype = pair
    check(eager, graph, reference, dtype, page_cases(), "page borders")


def test_tokens_across_split_borders(pair, reference):
    eager, graph, dtype = pair
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    check(eager, graph, reference, dtype, split_cases(num_sms), "split borders")


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_after_preemption(folder, reference, dtype):
    """17 rows that end with 5 to 8 pages each, of which there are 50 in all."""
    settings = {"dtype": dtype, "max_batch": 17, "max_model_len": 256, "kv_memory_bytes": 50 * PAGE_BYTES[dtype]}
    eager, graph = (open_replica(folder, steps, **settings) for steps in ("eager", "cuda"))
    assert eager.scheduler.pool.num_pages == 50
    rows = Rows.draw([length + 5 for length in PAGE_LENGTHS] * 2, 70)
    check(eager, graph, reference, dtype, [rows], "after preemption", most_waits=0.5)
    print(f"preemptions: {eager.scheduler.num_preemptions} eager, {graph.scheduler.num_preemptions} with graphs")
    assert eager.scheduler.num_preemptions > 3 and graph.scheduler.num_preemptions > 3
