"""Any rows, coming at any time, any shortage: bursts, those that go on from a prefill, and padded prefill change no answer."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.graph.prefill import TwinPrefill
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.tiny import make_model, save_model

VOCAB = 131
PAGE_BYTES = 2 * 2 * 16 * 16 * 4 * 2  # keys and values, 2 layers, 16 tokens, heads of 16 floats, 2 KV heads
RULES = (
    {}, {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 12}, {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2}, {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.4, "logit_bias": ((5, 3.0), (9, -20.0))}, {"min_tokens": 3}, {"logprobs": 1},
    {"prompt_logprobs": 0}, {"temperature": 1.0, "n": 3},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("qwen2"), tmp_path_factory.mktemp("model"))


class Drip:
    """Requests that come one by one, at looks that `rng` chooses; where rank 0 has nothing to do, at once."""

    def __init__(self, requests: list, rng: random.Random):
        self._requests, self._rng = list(reversed(requests)), rng

    @property
    def is_exhausted(self) -> bool:
        return not self._requests

    def poll(self, wait_s: float):
        is_there = self._requests and (wait_s > 0 or self._rng.random() < 0.4)
        return self._requests.pop() if is_there else None


@st.composite
def any_row(draw) -> tuple[list[int], dict]:
    word = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=20))
    options = {"max_tokens": draw(st.integers(1, 40)), "stop_ids": draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))}
    return word * draw(st.integers(1, 3)), options | draw(st.sampled_from(RULES))


@given(
    some=st.lists(any_row(), min_size=1, max_size=9),
    size=st.sampled_from((1, 1, 2)),
    max_batch=st.integers(1, 6),
    num_pages=st.sampled_from((8, 9, 12, 40)),
    max_step_tokens=st.sampled_from((8, 30, 200)),
    graph_tokens=st.sampled_from((0, 16, 512)),
    most_single=st.sampled_from((0, 4)),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_comes(folder, some, size, max_batch, num_pages, max_step_tokens, graph_tokens, most_single, seed):
    limits = {"max_batch": max_batch, "kv_memory_bytes": num_pages * PAGE_BYTES, "max_model_len": 110}
    limits |= {"max_step_tokens": max_step_tokens}

    def bursts(replica):
        backend = twin_bursts(replica)
        backend._operators.most_single = most_single  # rows that decode beside prompts, taken as such
        replica.backend = TwinPrefill(backend._operators, replica.scheduler.limits, graph_tokens)
        return backend

    def rows() -> list:
        return [request(prompt, idx, **options) for idx, (prompt, options) in enumerate(some)]

    wanted = answer(folder, rows(), **limits)
    found = rows()
    run = answer(folder, found, size, bursts=bursts, source=Drip(found, random.Random(seed)), **limits)
    for name in ("token_ids", "finish_reason", "stop_reason", "text"):
        assert [[getattr(each, name) for each in row] for row in run.answers] == [
            [getattr(each, name) for each in row] for row in wanted.answers
        ]
    assert len(set(run.digests)) == 1
