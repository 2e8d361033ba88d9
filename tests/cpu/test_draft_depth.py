"""How many tokens are guessed for a row: the estimate, the choice, and that it changes no token."""

from __future__ import annotations

import random

import pytest

from engine.drafts.depth import (
    PRIOR_HITS,
    PRIOR_TRIALS,
    RETRY_STEPS,
    AdaptiveDepth,
    FixedDepth,
    HeldInBursts,
    StepCosts,
    expected_tokens,
    hit_rate,
)
from engine.drafts.speculation import HISTORY_PROPOSALS


def proposals(p: float, num_drafts: int, count: int, seed: int = 1) -> list[tuple[int, int]]:
    """`count` proposals whose guesses hold with chance `p` each, up to the first that does not."""
    rng, found = random.Random(seed), []
    for _ in range(count):
        held = 0
        while held < num_drafts and rng.random() < p:
            held += 1
        found.append((num_drafts, held))
    return found


def test_expected_tokens_by_hand():
    assert expected_tokens(0.0, 5) == 1.0 and expected_tokens(1.0, 5) == 6.0
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(0.8, 5) == pytest.approx((1 - 0.8**6) / 0.2)


@pytest.mark.parametrize("p", (0.0, 0.3, 0.6, 0.9, 1.0))
@pytest.mark.parametrize("num_drafts", (1, 4, 8))
def test_the_rate_is_found_whatever_was_proposed(p, num_drafts):
    """What comes behind a wrong guess is not counted as wrong: the estimate does not depend on how many were proposed."""
    assert hit_rate(()) == PRIOR_HITS / PRIOR_TRIALS
    assert hit_rate(proposals(p, num_drafts, 4000)) == pytest.approx(p, abs=0.02)


def test_more_is_guessed_the_better_it_holds_and_the_less_it_costs():
    rates = (0.0, 0.3, 0.6, 0.8, 0.95)
    for cost in (0.025, 0.06, 0.15):
        chosen = [AdaptiveDepth(8, StepCosts(cost)).choose(proposals(p, 4, 500)) for p in rates]
        assert chosen == sorted(chosen) and chosen[0] == 1 and 1 < chosen[-1] <= 8
    cheap, dear = (AdaptiveDepth(8, StepCosts(cost)).choose(proposals(0.8, 4, 500)) for cost in (0.025, 0.3))
    assert cheap > dear
    assert FixedDepth(5).choose(proposals(0.0, 5, 50)) == 5


@pytest.mark.parametrize("p", (0.2, 0.6, 0.8, 0.95))
def test_what_it_chooses_is_near_the_best_fixed_number(p):
    """Tokens for the time of a step, by a row's short memory, against the best number for the true rate."""
    cost, depth, rng = 0.06, AdaptiveDepth(8, StepCosts(0.06)), random.Random(3)
    history: list[tuple[int, int]] = []
    tokens = time = 0.0
    for _ in range(4000):
        num = depth.choose(history[-HISTORY_PROPOSALS:])
        held = 0
        while held < num and rng.random() < p:
            held += 1
        history.append((num, held))
        tokens, time = tokens + held + 1, time + 1 + cost * num
    best = max(expected_tokens(p, num) / (1 + cost * num) for num in range(1, 9))
    assert tokens / time > 0.96 * best


def simulate(depth, p: float, num_tokens: int, num_rows: int = 1, costs: StepCosts | None = None, seed: int = 3) -> float:
    """How many times faster than without guesses: tokens a row by the time of its steps. `costs`: the true ones, those that
    `depth` believes in by default."""
    costs = costs or depth.costs
    rng, held, tokens, time, running = random.Random(seed), HeldInBursts(), 0, 0.0, None
    while tokens < num_tokens * num_rows:
        num = depth.choose_for_burst(held, num_rows, running)
        time += costs.time(num_rows, num)
        running = num
        if num == 0:
            held.note_without()
            tokens += num_rows
            continue
        for proposed, kept in proposals(p, num, num_rows, rng.randrange(1 << 30)):
            held.note(proposed, kept)
            tokens += kept + 1
    return tokens / num_rows / time * costs.time(num_rows, 0)


DEPTH_72B = AdaptiveDepth(8, StepCosts(0.04, 0.09, 0.015))  # as measured with a draft of 0.5B
DEPTH_7B = AdaptiveDepth(8, StepCosts(0.2, 0.12, 0.005, 0.015))  # a draft of a tenth of the bytes; dear beyond 16


def best_fixed(depth: AdaptiveDepth, p: float, num_rows: int) -> float:
    """Of 1 to 8 guesses, always as many."""
    return max(simulate(FixedDepth(num), p, 4000, num_rows, depth.costs) for num in range(1, 9))


def test_the_time_of_a_step_by_hand():
    costs = StepCosts(draft=0.2, verify=0.12, token=0.01, many=0.05)
    assert costs.time(1, 0) == 1.0 and costs.time(16, 0) == pytest.approx(1.15) and costs.time(20, 0) == pytest.approx(1.35)
    # 4 tokens, 3 guesses; 24 tokens of 8 rows, whose guesses are steps of 8 tokens.
    assert costs.time(1, 3) == pytest.approx(1.03 + 0.12 + 3 * 0.2)
    assert costs.time(8, 2) == pytest.approx(1.15 + 8 * 0.05 + 0.12 + 2 * 0.2 * 1.07)


@pytest.mark.parametrize("num_rows", (1, 8))
def test_bursts_lose_next_to_nothing_where_nothing_holds(num_rows):
    assert simulate(DEPTH_72B, 0.0, 128, num_rows) > 0.97
    assert simulate(DEPTH_72B, 0.0, 4000, num_rows) > 0.985


@pytest.mark.parametrize("num_rows", (1, 8))
@pytest.mark.parametrize("p", (0.3, 0.6, 0.8, 0.95))
def test_bursts_come_near_the_best_fixed_number(p, num_rows):
    best = best_fixed(DEPTH_72B, p, num_rows)
    assert simulate(DEPTH_72B, p, 4000, num_rows) > 0.93 * max(best, 1.0)


@pytest.mark.parametrize("p", (0.4, 0.6, 0.8))
def test_with_more_rows_fewer_are_guessed_and_none_where_they_lose(p):
    held = HeldInBursts()
    for proposal in proposals(p, 8, 64):
        held.note(*proposal)
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    chosen = [DEPTH_7B.choose_for_burst(held, num_rows) for num_rows in batches]
    assert chosen[0] > 0 == chosen[-1], "one row gains by guesses, and 256 lose"
    beyond = chosen[batches.index(16) :]
    assert beyond == sorted(beyond, reverse=True)
    for num_rows, num_drafts in zip(batches, chosen):
        gains = [expected_tokens(held.rate, num) * DEPTH_7B.costs.time(num_rows, 0) / DEPTH_7B.costs.time(num_rows, num)
                 for num in range(9)]  # fmt: skip
        assert gains[num_drafts] == max(gains) and (num_drafts > 0) == (max(gains[1:]) > 1.0)


@pytest.mark.parametrize("num_rows", (1, 4, 16, 64, 128, 256))
@pytest.mark.parametrize("p", (0.0, 0.3, 0.6, 0.8, 0.95))
def test_no_batch_loses_by_it_and_where_guesses_pay_most_is_had(p, num_rows):
    found, best = simulate(DEPTH_7B, p, 2000, num_rows), best_fixed(DEPTH_7B, p, num_rows)
    if DEPTH_7B.choose_for_burst(HeldInBursts(), num_rows) == 0:
        assert num_rows >= 64 and found == pytest.approx(1.0) and (p > 0.9 or best < 1.0), "only more than three of four would do"
    else:
        assert found > 0.93 * max(best, 1.0)


def test_costs_of_one_row_would_have_lost_with_many():
    """What the rows add is needed: as if there were one, 128 rows lose where nothing need be lost."""
    blind = AdaptiveDepth(8, StepCosts(0.2, 0.12, 0.005))
    assert simulate(blind, 0.6, 2000, 128, DEPTH_7B.costs) < 0.9 < 0.99 < simulate(DEPTH_7B, 0.6, 2000, 128)


def test_rows_that_come_and_go():
    """Guesses are given up when rows join, and are there again as soon as few are left."""
    held = HeldInBursts()
    for proposal in proposals(0.8, 4, 64):
        held.note(*proposal)
    few = DEPTH_7B.choose_for_burst(held, 2)
    assert few > 1 and DEPTH_7B.choose_for_burst(held, 200, running=few) == 0
    for _ in range(10 * RETRY_STEPS):
        held.note_without()
        assert DEPTH_7B.choose_for_burst(held, 200, running=0) == 0, "not tried in vain either"
    assert DEPTH_7B.choose_for_burst(held, 2, running=0) > 0


def test_guesses_are_tried_again_and_a_good_row_is_found_out():
    held = HeldInBursts()
    while DEPTH_72B.choose_for_burst(held, 1):
        held.note(DEPTH_72B.choose_for_burst(held, 1), 0)
    assert len(held.history) < 9
    tries = [DEPTH_72B.choose_for_burst(held, 1) for _ in range(RETRY_STEPS) if held.note_without() is None]
    assert not any(tries[:-1]) and tries[-1] > 0, "after so many steps, and not before"
    while held.rate < 0.9:
        num = DEPTH_72B.choose_for_burst(held, 1)
        assert num > 0
        held.note(num, num)
    assert DEPTH_72B.choose_for_burst(held, 1) == 8


def test_a_burst_is_not_ended_for_a_little():
    held = HeldInBursts()
    for _ in range(30):
        held.note(4, 2)
    free = DEPTH_72B.choose_for_burst(held, 1)
    near = free + 1
    assert DEPTH_72B.choose_for_burst(held, 1, near) == near and DEPTH_72B.choose_for_burst(held, 1, free) == free
    assert DEPTH_72B.choose_for_burst(held, 1, 0) == free, "from none to some it is always worth it"
    assert FixedDepth(3).choose_for_burst(held, 1, 0) == 3
