"""How many tokens to guess for a row: a fixed number, or as many as pay, by how guesses held lately and what a step takes."""

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
FEW_TOKENS = 16  # of a step; so many are multiplied while the weights are read, by the kernels for few rows

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
class StepCosts:
    """What a step takes, in steps of one row without guesses. Where the numbers are from: `engine.drafts.loading`.

    `draft`: guessing one more token of one row. `verify`: verifying at all. `token`, `many`: one more token of the step, whether
    a row's only one or a guess, up to `FEW_TOKENS` and beyond.
    """

    draft: float
    verify: float = 0.0
    token: float = 0.0
    many: float = 0.0

    def time(self, num_rows: int, num_drafts: int) -> float:
        """Of a step of `num_rows` rows with `num_drafts` guesses each. It computes `num_rows * (num_drafts + 1)` tokens; a model
        that guesses runs `num_drafts` times before it, and its steps grow with the rows as the target's do."""
        whole = self._growth(num_rows * (num_drafts + 1))
        return whole + self.verify + num_drafts * self.draft * self._growth(num_rows) if num_drafts else whole

    def _growth(self, num_tokens: int) -> float:
        """Of a step of so many tokens beside one of a single token."""
        num_few = min(num_tokens, FEW_TOKENS)
        return 1.0 + self.token * (num_few - 1) + self.many * (num_tokens - num_few)


@dataclass(frozen=True)
class FixedDepth:
    """`most` guesses, always."""

    most: int

    def choose(self, history: Proposals) -> int:
        return self.most

    def choose_for_burst(self, held: HeldInBursts, num_rows: int, running: int | None = None) -> int:
        return self.most


@dataclass(frozen=True)
class AdaptiveDepth:
    """1 to `most` guesses: the number that gives most tokens for the time of a step. In bursts 0 where any would lose by
    what steps take; that rows join and end is not in it, which the limit of rows guards against. None are tried where they would
    have to hold more often than they are believed to beforehand."""

    most: int
    costs: StepCosts

    def choose(self, history: Proposals) -> int:
        p = hit_rate(history)
        return max(range(1, self.most + 1), key=lambda num: self._gain(p, num))

    def choose_for_burst(self, held: HeldInBursts, num_rows: int, running: int | None = None) -> int:
        """0 to `most`, for each of `num_rows` rows; `running`, if that is about as good."""
        p = held.rate
        gains = [self._gain(p, num, num_rows) for num in range(self.most + 1)]
        best = gains.index(max(gains))
        is_near = running is not None and gains[best] < CHANGE_GAIN * gains[running]
        return running if is_near and not (running == 0 and best > 0) else best

    def _gain(self, p: float, num_drafts: int, num_rows: int = 1) -> float:
        """Tokens of a row for the time of a step of one row without guesses."""
        return expected_tokens(p, num_drafts) / self.costs.time(num_rows, num_drafts)


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
