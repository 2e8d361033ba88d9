"""How many tokens to guess for a row: a fixed number, or as many as pay, by how the row's guesses have held lately."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

# What a row is taken for before it has shown anything: three of four guesses held. Counts as that many guesses.
PRIOR_TRIALS, PRIOR_HITS = 4.0, 3.0

# The same of rows in bursts, all together: what one row shows serves the next.
BURST_PRIOR_TRIALS, BURST_PRIOR_HITS = 1.0, 0.75
BURST_HISTORY = 64  # proposals, of all rows, that are remembered
RETRY_STEPS = 128  # without guesses before they are tried again
KEPT_ON_RETRY = 2  # proposals that are remembered then, so that it begins with few guesses
CHANGE_GAIN = 1.03  # another number of guesses ends a burst, which the device notices

Proposals = Iterable[tuple[int, int]]  # (drafts verified, how many of them held), the same as `DraftRow.history`


@dataclass
class HeldInBursts:
    """How guesses have held lately in bursts, over all rows. Where none were made for long, most of what came before is
    forgotten, so that they are tried again."""

    history: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=BURST_HISTORY))
    num_without: int = 0

    def note(self, num_proposed: int, num_held: int) -> None:
        """A step of a row: guesses that were verified, and how many of them held."""
        self.history.append((num_proposed, num_held))
        self.num_without = 0

    def note_without(self) -> None:
        """A step, of all rows, without guesses."""
        self.num_without += 1
        if self.num_without % RETRY_STEPS == 0:
            while len(self.history) > KEPT_ON_RETRY:
                self.history.popleft()

    @property
    def rate(self) -> float:
        return hit_rate(self.history, BURST_PRIOR_HITS, BURST_PRIOR_TRIALS)


@dataclass(frozen=True)
class FixedDepth:
    """`most` guesses, always."""

    most: int

    def choose(self, history: Proposals) -> int:
        return self.most

    def choose_for_burst(self, held: HeldInBursts, running: int | None = None) -> int:
        return self.most


@dataclass(frozen=True)
class AdaptiveDepth:
    """1 to `most` guesses: the number that gives most tokens for the time of a step.

    `cost`: of guessing one more token and verifying it, as a share of a step without guesses. `start_cost`: of verifying at all.
    """

    most: int
    cost: float
    start_cost: float = 0.0

    def choose(self, history: Proposals) -> int:
        p = hit_rate(history)
        return max(range(1, self.most + 1), key=lambda num: self._gain(p, num))

    def choose_for_burst(self, held: HeldInBursts, running: int | None = None) -> int:
        """0 to `most`; `running`, if that is about as good."""
        best = max(range(self.most + 1), key=lambda num: self._gain(held.rate, num))
        is_near = running is not None and self._gain(held.rate, best) < CHANGE_GAIN * self._gain(held.rate, running)
        return running if is_near and not (running == 0 and best > 0) else best

    def _gain(self, p: float, num_drafts: int) -> float:
        """Tokens for the time of a step without guesses."""
        start = self.start_cost if num_drafts else 0.0
        return expected_tokens(p, num_drafts) / (1.0 + start + self.cost * num_drafts)


Depth = FixedDepth | AdaptiveDepth


def hit_rate(history: Proposals, hits: float = PRIOR_HITS, trials: float = PRIOR_TRIALS) -> float:
    """The chance of a guess to hold when all before it did. A proposal shows one trial for each guess that held and one more for
    the first that did not; what comes behind that says nothing. `hits` of `trials`: what is taken for granted beforehand."""
    for proposed, held in history:
        hits += held
        trials += held + (held < proposed)
    return hits / trials


def expected_tokens(p: float, num_drafts: int) -> float:
    """Tokens that a step gives with `num_drafts` guesses, each of which holds with chance `p` if all before it did."""
    return sum(p**num for num in range(num_drafts + 1))
