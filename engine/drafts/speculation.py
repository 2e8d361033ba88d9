"""Speculation: guess the next few tokens of a row cheaply, let the target compute them all in one step, keep what holds.

**Why the text does not change.** The token at a position is a pure function of the logits there, the row's sampler state and
noise that is a hash of (seed, row, sample, position, id): see `engine.sampler`. The target's step gives the logits at the
row's last token and at each of its k drafts. Rank 0 runs the ordinary sampler over them in order. The first choice is always
valid. If it equals the first draft, the second logits were computed behind the right token, so the second choice is valid too;
and so on, until a choice differs from its draft. That choice is kept, what follows is dropped, and the cache is rolled back by
length. So every token is the one that would have been chosen without drafts, at any temperature, under all filters, penalties
and biases, and a row ends (stop ids and strings, minimum and maximum length) in the same code at the same token. Identical means
identical in fp32; where two logits are equal up to rounding, a step of several tokens may round the other way, as any other
batch would.

**Not rejection sampling.** Leviathan et al. (2023, arXiv:2211.17192) and Chen et al. (2023, arXiv:2302.01318) accept a draft x
with probability min(1, p(x)/q(x)) and otherwise draw from the normalised rest of p - q. That keeps the target's *distribution*;
this keeps its very *tokens*, and the distribution with them, and needs neither q nor a second random number. The price would be
acceptance: theirs is the most that any rule can reach, 1 - TV(p, q). For a draft that proposes one certain token (an n-gram, a
greedy model) nothing is lost: q(x) = 1, so theirs is p(x), which is how often the sampler chooses x. For a draft that samples,
drawing it independently of the target would give only the sum of p(x) q(x). So a draft model draws with the *same* noise,
through the same penalties and filters (`engine.drafts.model`): the two choices are coupled, equal whenever p = q, and agree at
least (1 - TV)/(1 + TV) of the time otherwise, as Gumbel noise per id promises (Daliri, Musco and Suresh 2024, arXiv:2408.07978).

Case in point: temperature 0, target a 0.35 and b 0.45, draft a 0.25, and it proposes a. min(1, p/q) on these raw numbers is 1
and lets a through; the target's choice is b, so here b is what is kept.

Rank 0 only. Drafts reach the other ranks in the step message. Where decode steps are graphs, the device guesses and verifies by
itself (`engine.graph.speculative_step`), and this module counts, and says how many guesses the next steps get.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.drafts.depth import Depth, HeldInBursts, expected_tokens
from engine.request import Sample
from engine.sampler import SamplerState

# A row whose drafts keep failing pays for them with every step. It then only tries now and then whether that has changed.
HISTORY_PROPOSALS = 16
POOR_ACCEPTANCE = 0.10
POOR_INTERVAL_STEPS = 16


@dataclass(eq=False)
class DraftRow:
    """A row as a drafter sees it.

    `token_ids`: prompt and output so far; only ever grows. `state`: the sampler's state after them; not to be changed.
    `max_tokens`: most tokens the row will have, prompt included. `num_wanted`: most ids to propose now.
    """

    seq_id: int
    token_ids: list[int]
    state: SamplerState
    max_tokens: int
    num_wanted: int = 0
    num_prompt: int = 0
    steps_since: int = 0
    history: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=HISTORY_PROPOSALS))

    @property
    def is_poor(self) -> bool:
        """The last proposals, as many as are remembered, were mostly wrong."""
        if len(self.history) < HISTORY_PROPOSALS:
            return False
        return sum(kept for _, kept in self.history) < POOR_ACCEPTANCE * sum(proposed for proposed, _ in self.history)


class Drafter(Protocol):
    """Where guesses come from."""

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        """For each row at most `num_wanted` ids that may follow its tokens, none if there is no guess.

        Every row has at least one more token than at its last call.
        """

    def drop(self, seq_id: int) -> None:
        """Forget a row that has ended, if it is known."""


@dataclass
class DraftStats:
    """Counts of a run. `num_proposals`: row-steps with drafts. `num_decodes`, `num_decoded`: all decode row-steps and the tokens
    they gave."""

    num_proposals: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_decodes: int = 0
    num_decoded: int = 0

    @property
    def acceptance(self) -> float:
        """Share of the verified draft tokens that the target chose as well; those past a row's end count as not chosen."""
        return self.num_accepted / self.num_proposed if self.num_proposed else 0.0

    @property
    def mean_accepted(self) -> float:
        """Draft tokens accepted a proposal."""
        return self.num_accepted / self.num_proposals if self.num_proposals else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens a row gains by a decode step; 1 without speculation."""
        return self.num_decoded / self.num_decodes if self.num_decodes else 0.0

    def line(self) -> str:
        return (
            f"speculation: {self.num_accepted} of {self.num_proposed} drafts accepted ({100 * self.acceptance:.1f} %), "
            f"{self.mean_accepted:.2f} a proposal, {self.tokens_per_step:.2f} tokens a step and row"
        )

    def as_record(self) -> dict[str, int | float]:
        return {
            "proposed": self.num_proposed,
            "accepted": self.num_accepted,
            "acceptance": round(self.acceptance, 4),
            "mean_accepted": round(self.mean_accepted, 4),
            "tokens_per_step": round(self.tokens_per_step, 4),
        }


class Speculation:
    """Asks the drafter for the right rows at the right time, and keeps the score."""

    def __init__(self, drafter: Drafter | None, depth: Depth):
        """`depth`: how many draft tokens a row gets in a step. `drafter`: None where the device guesses, in bursts."""
        self.drafter, self.depth = drafter, depth
        self.stats = DraftStats()
        self._rows: dict[int, DraftRow] = {}
        self._held = HeldInBursts()

    def propose(self, samples: Iterable[Sample], max_tokens_total: int) -> list[tuple[int, list[int]]]:
        """(seq_id, draft ids) for the rows among `samples` that have a guess. All have gained a token in the step just done."""
        rows = [self._row(sample, max_tokens_total) for sample in samples]
        rows = [row for row in rows if row.num_wanted > 0 and self._is_due(row)]
        proposals = zip(rows, self.drafter.propose(rows)) if rows else ()
        return [(row.seq_id, draft_ids) for row, draft_ids in proposals if draft_ids]

    def record(self, seq_id: int, num_proposed: int, num_accepted: int, num_chosen: int) -> None:
        """Note a decode step of a row: drafts that were verified, how many of them were chosen, tokens chosen in all."""
        stats = self.stats
        stats.num_decodes += 1
        stats.num_decoded += num_chosen
        if num_proposed == 0:
            return
        stats.num_proposals += 1
        stats.num_proposed += num_proposed
        stats.num_accepted += num_accepted
        if seq_id in self._rows:
            self._rows[seq_id].history.append((num_proposed, num_accepted))

    def record_burst(self, seq_id: int, num_proposed: int, num_held: int, num_chosen: int) -> None:
        """As `record`, of a step of a burst. `num_held`: drafts that the device took; the row may have ended before the last."""
        if num_proposed:
            self._held.note(num_proposed, num_held)
        self.record(seq_id, num_proposed, min(num_held, num_chosen), num_chosen)

    def note_plain_step(self) -> None:
        """A step of a burst had no drafts."""
        self._held.note_without()

    def choose_for_burst(self, num_rows: int, running: int | None = None) -> int:
        """How many drafts each of the `num_rows` rows of the next burst gets, or of the one that has `running`; 0 if none pay."""
        return self.depth.choose_for_burst(self._held, num_rows, running)

    def expected_tokens(self, num_drafts: int) -> float:
        """Tokens that a step of a burst with `num_drafts` drafts gives a row, as they have held lately."""
        return expected_tokens(self._held.rate, num_drafts)

    def drop(self, seq_id: int) -> None:
        self._rows.pop(seq_id, None)
        if self.drafter is not None:
            self.drafter.drop(seq_id)

    def drop_all(self) -> None:
        for seq_id in list(self._rows):
            self.drop(seq_id)

    def _row(self, sample: Sample, max_tokens_total: int) -> DraftRow:
        seq_id, prompt_ids, limit = sample.sequence.seq_id, sample.request.prompt_ids, sample.request.params.max_tokens
        row = self._rows.get(seq_id)
        if row is None:
            max_tokens = max_tokens_total if limit is None else min(max_tokens_total, len(prompt_ids) + limit)
            row = DraftRow(seq_id, list(prompt_ids), sample.state, max_tokens, num_prompt=len(prompt_ids))
            self._rows[seq_id] = row
        row.token_ids += sample.token_ids[len(row.token_ids) - row.num_prompt :]
        # The step chooses one token more than it verifies, so a row with room for one token has no use for a draft.
        row.num_wanted = min(self.depth.choose(row.history), row.max_tokens - len(row.token_ids) - 1)
        return row

    def _is_due(self, row: DraftRow) -> bool:
        row.steps_since += 1
        if row.is_poor and row.steps_since < POOR_INTERVAL_STEPS:
            return False
        row.steps_since = 0
        return True
