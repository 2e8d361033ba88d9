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
        chosen = [AdaptiveDepth(8, cost).choose(proposals(p, 4, 500)) for p in rates]
        assert chosen == sorted(chosen) and chosen[0] == 1 and 1 < chosen[-1] <= 8
    cheap, dear = (AdaptiveDepth(8, cost).choose(proposals(0.8, 4, 500)) for cost in (0.025, 0.3))
    assert cheap > dear
    assert FixedDepth(5).choose(proposals(0.0, 5, 50)) == 5


@pytest.mark.parametrize("p", (0.2, 0.6, 0.8, 0.95))
def test_what_it_chooses_is_near_the_best_fixed_number(p):
    """Tokens for the time of a step, by a row's short memory, against the best number for the true rate."""
    cost, depth, rng = 0.06, AdaptiveDepth(8, 0.06), random.Random(3)
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


def simulate(depth, p: float, num_tokens: int, num_rows: int = 1, seed: int = 3) -> float:
    """How many times faster than without guesses: tokens a row by the time of its steps, whose costs are those of `depth`."""
    rng, held, tokens, time, running = random.Random(seed), HeldInBursts(), 0, 0.0, None
    while tokens < num_tokens * num_rows:
        num = depth.choose_for_burst(held, running)
        time += 1.0 + (depth.start_cost + depth.cost * num if num else 0.0)
        running = num
        if num == 0:
            held.note_without()
            tokens += num_rows
            continue
        for proposed, kept in proposals(p, num, num_rows, rng.randrange(1 << 30)):
            held.note(proposed, kept)
            tokens += kept + 1
    return tokens / num_rows / time


DEPTH_72B = AdaptiveDepth(8, 0.045, 0.12)  # as measured with a draft of 0.5B


@pytest.mark.parametrize("num_rows", (1, 8))
def test_bursts_lose_next_to_nothing_where_nothing_holds(num_rows):
    assert simulate(DEPTH_72B, 0.0, 128, num_rows) > 0.97
    assert simulate(DEPTH_72B, 0.0, 4000, num_rows) > 0.985


@pytest.mark.parametrize("num_rows", (1, 8))
@pytest.mark.parametrize("p", (0.3, 0.6, 0.8, 0.95))
def test_bursts_come_near_the_best_fixed_number(p, num_rows):
    best = max(simulate(FixedCost(num, DEPTH_72B), p, 4000, num_rows) for num in range(1, 9))
    assert simulate(DEPTH_72B, p, 4000, num_rows) > 0.93 * max(best, 1.0)


class FixedCost(FixedDepth):
    """A fixed number of guesses at the costs of another depth."""

    def __init__(self, most: int, costs: AdaptiveDepth):
        super().__init__(most)
        object.__setattr__(self, "cost", costs.cost)
        object.__setattr__(self, "start_cost", costs.start_cost)


def test_guesses_are_tried_again_and_a_good_row_is_found_out():
    held = HeldInBursts()
    while DEPTH_72B.choose_for_burst(held):
        held.note(DEPTH_72B.choose_for_burst(held), 0)
    assert len(held.history) < 9
    tries = [DEPTH_72B.choose_for_burst(held) for _ in range(RETRY_STEPS) if held.note_without() is None]
    assert not any(tries[:-1]) and tries[-1] > 0, "after so many steps, and not before"
    while held.rate < 0.9:
        num = DEPTH_72B.choose_for_burst(held)
        assert num > 0
        held.note(num, num)
    assert DEPTH_72B.choose_for_burst(held) == 8


def test_a_burst_is_not_ended_for_a_little():
    held = HeldInBursts()
    for _ in range(30):
        held.note(4, 2)
    free = DEPTH_72B.choose_for_burst(held)
    near = free + 1
    assert DEPTH_72B.choose_for_burst(held, near) == near and DEPTH_72B.choose_for_burst(held, free) == free
    assert DEPTH_72B.choose_for_burst(held, 0) == free, "from none to some it is always worth it"
    assert FixedDepth(3).choose_for_burst(held, 0) == 3
