"""Which rows take part in the next step, and with how many tokens: continuous batching with chunked prefill.

Pure and deterministic: every rank runs its own copy on the same calls and arrives at the same step. Rows join and leave at
every step. Rows that decode go first, one token each; what is left of the step's token budget goes to prompts, in arrival
order. If pages run out, the row that arrived last gives its pages back and is computed again later.

Drafts (guessed tokens, see `engine.drafts`) come last of all: they get the budget and the pages that nobody else wants in the
step. A draft never delays a prompt and never preempts a row, and it leaves no page behind that could make a later step do so.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from collections.abc import Sequence as Ints
from dataclasses import dataclass, replace
from types import MappingProxyType

from engine.pages import PagePool
from engine.sequence import Sequence


@dataclass(frozen=True)
class Limits:
    """`max_batch` rows at once; at most `max_step_tokens` tokens a step; `max_model_len` tokens a row, prompt included."""

    max_batch: int
    max_step_tokens: int
    max_model_len: int


@dataclass(frozen=True)
class ScheduledRow:
    """Tokens `first` to `first + num_tokens` of `sequence` are computed in this step, `draft_ids` counted as its last tokens.

    `is_sampled`: the step computes the last known token, so the row's next token can be chosen. `num_logits`: rows of logits
    the step returns for it. If `is_sampled`, the last `1 + len(draft_ids)` of them are to be sampled from: the first always,
    each further one as long as the tokens chosen so far are the drafts.
    """

    sequence: Sequence
    first: int
    num_tokens: int
    is_sampled: bool
    num_logits: int
    draft_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        is_sampled = num_tokens == sequence.num_pending
        is_prompt = sequence.wants_prompt_logits and not sequence.is_prefilled
        return cls(sequence, sequence.num_computed, num_tokens, is_sampled, num_tokens if is_prompt else int(is_sampled))

    @property
    def is_decode(self) -> bool:
        """The row computes one token that was chosen, not given, and whatever drafts follow it."""
        return self.num_tokens == 1 + len(self.draft_ids) and self.first >= self.sequence.num_prompt

    def with_drafts(self, draft_ids: Ints[int]) -> ScheduledRow:
        count = len(draft_ids)
        return replace(
            self, num_tokens=self.num_tokens + count, num_logits=self.num_logits + count, draft_ids=tuple(draft_ids)
        )


class Scheduler:
    def __init__(self, limits: Limits, pool: PagePool):
        self.limits, self.pool = limits, pool
        self.waiting: deque[Sequence] = deque()
        self.running: OrderedDict[int, Sequence] = OrderedDict()
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def finish(self, seq_id: int) -> None:
        """Drop a row, wherever it is, and give its pages back."""
        sequence = self.running.pop(seq_id, None)
        if sequence is None:
            self.waiting = deque(waiting for waiting in self.waiting if waiting.seq_id != seq_id)
        else:
            self.pool.release(sequence.pages)

    def append(self, sequence: Sequence, token_ids: Ints[int]) -> None:
        """Take in the tokens chosen for `sequence` after a step, in order. Pages that held only rejected drafts go back."""
        sequence.append(token_ids)
        self._remember(sequence)
        self.pool.trim(sequence.pages, sequence.num_computed)

    def read_ahead(self, sequence: Sequence, token_ids: Ints[int]) -> Ints[int]:
        """Take in what the next steps were launched without knowing. Returns the tokens that are behind it."""
        rest = sequence.read_ahead(token_ids)
        if len(rest) < len(token_ids):
            self._remember(sequence)
        return rest

    def schedule(self, drafts: Mapping[int, Ints[int]] = MappingProxyType({})) -> list[ScheduledRow]:
        """Choose the next step's rows and take the pages they need. Empty only if there is no work.

        `drafts`: guesses by seq_id. A row in steady decode computes as many of them as there is room for, maybe none.
        """
        rows: list[ScheduledRow] = []
        budget = self.limits.max_step_tokens
        # A row that prefills still waits its turn behind those that decode, so that a long prompt never stalls them.
        for sequence in sorted(self.running.values(), key=lambda s: s.num_pending > 1):
            if budget == 0 or sequence.seq_id not in self.running:
                continue
            num_tokens = min(sequence.num_pending, budget)
            if self._make_room(sequence, num_tokens, rows):
                rows.append(ScheduledRow.of(sequence, num_tokens))
                budget -= num_tokens
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_batch:
            row = self._admit(budget)
            if row is None:
                break
            rows.append(row)
            budget -= row.num_tokens
        for idx, row in enumerate(rows):
            if row.is_decode and row.sequence.seq_id in drafts:
                rows[idx] = self._add_drafts(row, drafts[row.sequence.seq_id], budget)
                budget -= len(rows[idx].draft_ids)
        return rows

    def complete(self, rows: list[ScheduledRow], num_open: int = 0) -> None:
        """Record that the step of `rows` has been computed: its keys and values are now in the cache. `num_open`: last tokens of
        each row for which `advance` will do so."""
        for row in rows:
            sequence = row.sequence
            sequence.num_computed += row.num_tokens - len(row.draft_ids) - num_open
            sequence.drafted = row.draft_ids
            self._remember(sequence)

    def room_ahead(self, lengths: Mapping[Sequence, int], limit: int, width: int = 1) -> int:
        """How many more steps, at most `limit`, there are pages for without taking any from another row.

        `lengths`: rows in decode, and how many tokens each will have computed, at most, when the steps begin. `width`: tokens
        that a step computes of a row.
        """
        pool = self.pool
        for num_steps in range(limit, 0, -1):
            grown = (pool.num_needed(length + num_steps * width) - len(sequence.pages) for sequence, length in lengths.items())
            if sum(max(0, missing) for missing in grown) <= pool.num_available:
                return num_steps
        return 0

    def reserve_ahead(self, lengths: Mapping[Sequence, int], num_steps: int, width: int = 1) -> None:
        """Take the pages of `num_steps` more steps, for which there is room."""
        for sequence, length in lengths.items():
            self.pool.extend(sequence.pages, length + num_steps * width)

    def go_ahead(self, sequences: Ints[Sequence], num_steps: int) -> None:
        """Let the next step be scheduled without the tokens of `num_steps` steps of `sequences` that were computed ahead: takes
        the place of `advance` for them. `read_ahead` brings the tokens."""
        for sequence in sequences:
            sequence.num_computed += num_steps
            sequence.num_ahead += num_steps

    def advance(self, sequence: Sequence, token_ids: Ints[int]) -> None:
        """Take in tokens of steps that were computed ahead, in order. The row keeps the pages of those that are still to come."""
        sequence.num_computed += len(token_ids)
        sequence.token_ids += token_ids
        self._remember(sequence)

    def _remember(self, sequence: Sequence) -> None:
        """Only what has been chosen and is known counts: a page that holds a draft must not be found by another row."""
        num_known = min(sequence.num_computed, len(sequence.token_ids))
        sequence.num_remembered_pages = self.pool.remember(
            sequence.pages, sequence.token_ids, sequence.num_remembered_pages, num_known
        )

    def _add_drafts(self, row: ScheduledRow, draft_ids: Ints[int], budget: int) -> ScheduledRow:
        sequence, pool = row.sequence, self.pool
        num_known = len(sequence.token_ids)
        # The step chooses one token more than it has drafts, and the row ends when it is full.
        room = min(budget, sequence.max_tokens_total - num_known - 1)
        room = min(room, (len(sequence.pages) + pool.num_available) * pool.page_size - num_known)
        granted = draft_ids[: max(room, 0)]
        pool.extend(sequence.pages, num_known + len(granted))
        return row.with_drafts(granted)

    def _admit(self, budget: int) -> ScheduledRow | None:
        sequence = self._next_waiting()
        if sequence is None:
            return None
        if not sequence.wants_prompt_logits:
            sequence.pages = self.pool.match_prefix(sequence.token_ids)
        sequence.num_computed = len(sequence.pages) * self.pool.page_size
        sequence.num_prefix_reused = max(sequence.num_prefix_reused, sequence.num_computed)
        sequence.num_remembered_pages = len(sequence.pages)
        num_tokens = min(sequence.num_pending, budget)
        # Admit only what can be prefilled whole beside the rows that run: otherwise two long prompts evict each other.
        missing = self.pool.num_needed(len(sequence.token_ids) + 1) - len(sequence.pages)
        fits = missing <= self.pool.num_available or not self.running
        if not (fits and self.pool.extend(sequence.pages, sequence.num_computed + num_tokens)):
            self.pool.release(sequence.pages)
            sequence.num_computed = sequence.num_remembered_pages = 0
            return None
        self.waiting.remove(sequence)
        self.running[sequence.seq_id] = sequence
        return ScheduledRow.of(sequence, num_tokens)

    def _next_waiting(self) -> Sequence | None:
        waiting_ids = {sequence.seq_id for sequence in self.waiting if sequence.after is None}
        for sequence in self.waiting:
            leader = self.running.get(sequence.after) if sequence.after is not None else None
            if sequence.after in waiting_ids or (leader is not None and not leader.is_prefilled):
                continue
            return sequence
        return None

    def _make_room(self, sequence: Sequence, num_tokens: int, rows: list[ScheduledRow]) -> bool:
        while not self.pool.extend(sequence.pages, sequence.num_computed + num_tokens):
            scheduled = {row.sequence.seq_id for row in rows}
            victim = next((s for s in reversed(self.running.values()) if s.seq_id not in scheduled), sequence)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        del self.running[sequence.seq_id]
        self.pool.release(sequence.pages)
        sequence.num_computed = sequence.num_remembered_pages = sequence.num_draft_computed = 0
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
