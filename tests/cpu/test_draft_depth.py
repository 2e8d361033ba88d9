"""How many tokens are guessed for a row: the estimate, the choice, and that it changes no token."""

from __future__ import annotations

import random

import pytest

from engine.drafts.depth import PRIOR_HITS, PRIOR_TRIALS, AdaptiveDepth, FixedDepth, expected_tokens, hit_rate
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
