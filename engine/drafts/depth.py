"""How many tokens to guess for a row: a fixed number, or as many as pay, by how the row's guesses have held lately."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# What a row is taken for before it has shown anything: three of four guesses held. Counts as that many guesses.
PRIOR_TRIALS, PRIOR_HITS = 4.0, 3.0

Proposals = Iterable[tuple[int, int]]  # (drafts verified, how many of them held), the same as `DraftRow.history`


@dataclass(frozen=True)
class FixedDepth:
    """`most` guesses, always."""

    most: int

    def choose(self, history: Proposals) -> int:
        return self.most


@dataclass(frozen=True)
class AdaptiveDepth:
    """1 to `most` guesses: the number that gives most tokens for the time of a step.

    `cost`: of guessing one more token and verifying it, as a share of a step without guesses.
    """

    most: int
    cost: float

    def choose(self, history: Proposals) -> int:
        p = hit_rate(history)
        return max(range(1, self.most + 1), key=lambda num: expected_tokens(p, num) / (1.0 + self.cost * num))


Depth = FixedDepth | AdaptiveDepth


def hit_rate(history: Proposals) -> float:
    """The chance of a guess to hold when all before it did. A proposal shows one trial for each guess that held and one more for
    the first that did not; what comes behind that says nothing."""
    hits, trials = PRIOR_HITS, PRIOR_TRIALS
    for proposed, held in history:
        hits += held
        trials += held + (held < proposed)
    return hits / trials


def expected_tokens(p: float, num_drafts: int) -> float:
    """Tokens that a step gives with `num_drafts` guesses, each of which holds with chance `p` if all before it did."""
    return sum(p**num for num in range(num_drafts + 1))
