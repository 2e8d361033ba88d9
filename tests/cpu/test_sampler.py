"""Sampling: greedy is exact, filters never leak, draws follow the distribution and depend on the row alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.sampler import SamplerState, apply_penalties, draw, filter_logits, gumbel, sample, stream_key, top_logprobs
from engine.sampling_params import SamplingParams


def state(prompt_ids=(0,), seed=1, row_key=0, forbidden_ids=(), **options) -> SamplerState:
    return SamplerState(SamplingParams(**options), stream_key(seed, row_key, 0), prompt_ids, forbidden_ids)


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1e-6])
def test_temperature_zero_is_the_argmax_whoever_shares_the_batch(temperature):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 5
    tokens = sample(logits, [state(temperature=temperature), state(temperature=1.0), state(temperature=0.0)])
    assert tokens[0] == int(logits[0].argmax()) and tokens[2] == int(logits[2].argmax())


def test_small_temperatures_stay_finite():
    logits = torch.tensor([[3e4, 2.9e4, -3e4, 0.0]])
    assert sample(logits, [state(temperature=1e-3)]) == [0]
    probabilities, _ = filter_logits(logits[0], SamplingParams(temperature=1e-3))
    assert torch.isfinite(probabilities).all()


@pytest.mark.parametrize("top_k", [0, -1, 5, 6, 1000])
def test_top_k_zero_minus_one_and_whole_vocabulary_are_off(top_k):
    _, ids = filter_logits(torch.arange(5.0), SamplingParams(temperature=1.0, top_k=top_k))
    assert sorted(ids.tolist()) == [0, 1, 2, 3, 4]


def test_top_k_one_and_top_p_zero_keep_the_top_token():
    logits = torch.tensor([[0.0, 1.0, 0.99]])
    for options in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert {sample(logits, [state(temperature=2.0, row_key=key, **options)])[0] for key in range(50)} == {1}


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.05, 3.0),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_filters_equal_transformers(seed, temperature, top_k, top_p, min_p):
    logits = torch.randn(16, generator=torch.Generator().manual_seed(seed)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    expected = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1).double()
    probabilities, ids = filter_logits(logits, params)
    ours = torch.zeros(16, dtype=torch.float64)
    ours[ids] = probabilities / probabilities.sum()
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


def test_repetition_penalty_covers_prompt_and_output_as_transformers():
    logits = torch.tensor([1.0, -1.0, 2.0, -2.0, 0.5])
    row = state(prompt_ids=[0, 1, 1], repetition_penalty=2.0)
    row.record(3)
    expected = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1, 1, 3]]), logits[None].clone())[0]
    assert torch.equal(apply_penalties(logits.clone(), row), expected)


def test_presence_and_frequency_cover_the_output_only():
    row = state(prompt_ids=[0, 0, 0], presence_penalty=0.5, frequency_penalty=0.25)
    row.record(1)
    row.record(1)
    assert apply_penalties(torch.zeros(3), row).tolist() == [0.0, -1.0, 0.0]


def test_logit_bias_and_minimum_length():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sample(logits, [state(logit_bias=((2, 10.0),))]) == [2]
    row = state(forbidden_ids=(1,), min_tokens=1)
    assert sample(logits, [row]) == [2]
    row.record(2)
    assert sample(logits, [row]) == [1]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.0, 1e-300, 0.25, 1.0]), min_size=1, max_size=8), st.integers(0, 10**6))
def test_draw_never_returns_probability_zero(weights, position):
    if max(weights) > 0:
        ids = torch.arange(len(weights)) * 7
        drawn = draw(torch.tensor(weights, dtype=torch.float64), ids, stream_key(1, 2, 3), position)
        assert weights[drawn // 7] > 0


def test_noise_is_finite_at_every_bit_pattern_and_has_its_law():
    noise = torch.cat([gumbel(stream_key(3, 0, 0), position, torch.arange(50_000)) for position in range(20)])
    assert noise.isfinite().all() and noise.unique().numel() > 0.999 * noise.numel()
    for value in (-1.0, 0.0, 1.0, 3.0):  # one million numbers: a deviation of 0.0025 is five sigma
        assert abs(float((noise <= value).double().mean()) - math.exp(-math.exp(-value))) < 0.0025


def test_a_million_draws_under_top_k_follow_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    probabilities, ids = filter_logits(logits, SamplingParams(temperature=1.0, top_k=2))
    assert ids.tolist() == [0, 1]
    noise = torch.stack([gumbel(stream_key(4, 0, 0), 0, torch.arange(1_000_000) * 2 + int(idx)) for idx in ids])
    drawn = (probabilities.log()[:, None] + noise).argmax(0)
    assert abs(float((drawn == 0).double().mean()) - 1 / (1 + math.exp(-1))) < 0.003


def test_the_draw_depends_neither_on_the_order_nor_on_ids_that_were_filtered():
    probabilities = torch.rand(40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(40)
    for position in range(50):
        drawn = draw(probabilities, ids, stream_key(1, 1, 1), position)
        order = torch.randperm(40, generator=torch.Generator().manual_seed(position))
        assert draw(probabilities[order], ids[order], stream_key(1, 1, 1), position) == drawn
        kept = (ids == drawn) | (ids % 3 == 0)
        assert draw(probabilities[kept], ids[kept], stream_key(1, 1, 1), position) == drawn


def test_two_models_that_nearly_agree_draw_alike():
    generator = torch.Generator().manual_seed(5)
    ids = torch.arange(1000)
    logits = torch.randn(1000, generator=generator) * 2
    other = logits + 0.2 * torch.randn(1000, generator=generator)
    p, q = logits.double().softmax(0), other.double().softmax(0)
    distance = 0.5 * float((p - q).abs().sum())
    key = stream_key(9, 9, 9)
    agreement = sum(draw(p, ids, key, position) == draw(q, ids, key, position) for position in range(3000)) / 3000
    assert agreement > (1 - distance) / (1 + distance) - 0.03


def test_draws_follow_the_distribution_through_the_public_path():
    logits = torch.tensor([[0.0, math.log(2.0), math.log(3.0)]])
    counts = [0, 0, 0]
    for key in range(6000):
        counts[sample(logits, [state(temperature=1.0, row_key=key)])[0]] += 1
    chi_square = sum((c - e) ** 2 / e for c, e in zip(counts, (1000, 2000, 3000)))
    assert chi_square < 13.8  # 2 degrees of freedom, p = 0.001; the streams are fixed, so this never flickers


def test_rows_of_one_seed_draw_independently_and_reproducibly():
    flat, ids = torch.ones(1000, dtype=torch.float64), torch.arange(1000)
    draws = [[draw(flat, ids, stream_key(7, key, 0), position) for position in range(20)] for key in range(100)]
    assert len({tuple(row) for row in draws}) == 100
    assert abs(sum(map(sum, draws)) / 2000 / 999 - 0.5) < 0.03
    assert draws[3] == [draw(flat, ids, stream_key(7, 3, 0), position) for position in range(20)]
    assert stream_key(7, 7, 0) != stream_key(7, "7", 0)
    assert stream_key(7, 0, 1) != stream_key(7, 0, 0)


def test_logits_are_left_alone():
    logits = torch.randn(2, 9)
    before = logits.clone()
    sample(logits, [state(temperature=1.0, repetition_penalty=1.3, logit_bias=((1, 2.0),)), state()])
    assert torch.equal(logits, before)


def test_logprobs_are_those_of_the_unfiltered_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0])
    chosen, top = top_logprobs(logits, 0, 5)
    expected = torch.log_softmax(logits.double(), -1)
    assert chosen == pytest.approx(float(expected[0]))
    assert [token for token, _ in top] == [2, 1, 0]
    assert top[0][1] == pytest.approx(float(expected[2]))


def test_rows_with_nothing_to_choose_from_are_none_whatever_their_rules():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    logits[0, 7], logits[1, 9], logits[2] = math.nan, math.inf, -math.inf
    rules = ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.5, "min_p": 0.1}, {"repetition_penalty": 1.2, "top_k": 3})
    for options in rules:
        tokens = sample(logits, [state(**options) for _ in range(4)])
        assert tokens[:3] == [None] * 3 and tokens[3] is not None, options
