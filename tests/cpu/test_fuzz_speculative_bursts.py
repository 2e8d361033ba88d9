"""Any rows, any number of drafts, any shortage: drafts in bursts change no token, lose no page, and every run ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.drafts.depth import AdaptiveDepth, FixedDepth, StepCosts
from engine.drafts.speculation import Speculation
from engine.graph.drafters import NgramDrafts
from tests.cpu.engine_harness import answer, request, twin_bursts, twin_draft_model
from tests.cpu.tiny import make_model, save_model

VOCAB = 131
PAGE_BYTES = 2 * 2 * 16 * 16 * 4 * 2  # keys and values, 2 layers, 16 tokens, heads of 16 floats, 2 KV heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("qwen2"), tmp_path_factory.mktemp("target"))


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    options: dict

    def request(self, idx: int):
        return request(self.prompt, idx, **self.options)


@st.composite
def any_row(draw) -> Row:
    word = draw(st.lists(st.integers(3, VOCAB - 1), min_size=1, max_size=9))
    options = {"max_tokens": draw(st.integers(1, 45)), "stop_ids": draw(st.lists(st.integers(0, VOCAB - 1), max_size=2))}
    options |= draw(
        st.sampled_from(
            (
                {}, {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 12}, {"temperature": 1.0, "top_p": 0.8},
                {"temperature": 1.0, "repetition_penalty": 1.2}, {"min_tokens": 3}, {"logprobs": 1}, {"temperature": 1.0, "n": 2},
            )
        )
    )  # fmt: skip
    return Row(word * draw(st.integers(1, 4)), options)


@given(
    some=st.lists(any_row(), min_size=1, max_size=6),
    num_drafts=st.integers(1, 9),
    is_adaptive=st.booleans(),
    many=st.sampled_from((0.0, 0.05, 1.0)),
    is_ngram=st.booleans(),
    size=st.sampled_from((1, 1, 2)),
    max_batch=st.integers(1, 6),
    num_pages=st.sampled_from((8, 9, 12, 40)),
    max_step_tokens=st.sampled_from((8, 64)),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_whatever_is_asked(folder, some, num_drafts, is_adaptive, many, is_ngram, size, max_batch, num_pages, max_step_tokens):
    limits = {"max_batch": max_batch, "kv_memory_bytes": num_pages * PAGE_BYTES, "max_model_len": 100}
    limits |= {"max_step_tokens": max_step_tokens}
    depth = AdaptiveDepth(num_drafts, StepCosts(0.05, 0.1, 0.01, many)) if is_adaptive else FixedDepth(num_drafts)
    make = (lambda replica: NgramDrafts()) if is_ngram else twin_draft_model(folder)
    wanted = answer(folder, [row.request(idx) for idx, row in enumerate(some)], **limits)
    speculation = Speculation(None, depth)
    run = answer(
        folder, [row.request(idx) for idx, row in enumerate(some)], size, speculation=speculation,
        bursts=partial(twin_bursts, make_drafter=make), **limits,
    )  # fmt: skip
    assert [[c.token_ids for c in row] for row in run.answers] == [[c.token_ids for c in row] for row in wanted.answers]
    assert [[c.finish_reason for c in row] for row in run.answers] == [[c.finish_reason for c in row] for row in wanted.answers]
    assert len(set(run.digests)) == 1
    stats = speculation.stats
    assert stats.num_accepted <= stats.num_proposed and stats.num_decoded >= stats.num_decodes
