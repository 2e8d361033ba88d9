"""Which rows take part in the next step, and with how many tokens: continuous batching with chunked prefill.

Pure and deterministic: every rank runs its own copy on the same calls and arrives at the same step. Rows join and leave at
every step. Rows that decode go first, one token each; what is left of the step's token budget goes to prompts, in arrival
order. If pages run out, the row that arrived last gives its pages back and is computed again later.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

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
    """Tokens `first` to `first + num_tokens` of `sequence` are computed in this step.

    `is_sampled`: the step computes the last known token, so the row's next token can be chosen. `num_logits`: rows of logits
    the step returns for it, the last of which is the one to sample from if `is_sampled`.
    """

    sequence: Sequence
    first: int
    num_tokens: int
    is_sampled: bool
    num_logits: int

    @classmethod
    def of(cls, sequence: Sequence, num_tokens: int) -> ScheduledRow:
        is_sampled = num_tokens == sequence.num_pending
        is_prompt = sequence.wants_prompt_logits and not sequence.is_prefilled
        return cls(sequence, sequence.num_computed, num_tokens, is_sampled, num_tokens if is_prompt else int(is_sampled))


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

    def schedule(self) -> list[ScheduledRow]:
        """Choose the next step's rows and take the pages they need. Empty only if there is no work."""
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
        return rows

    def complete(self, rows: list[ScheduledRow]) -> None:
        """Record that the step of `rows` has been computed: its keys and values are now in the cache."""
        for row in rows:
            sequence = row.sequence
            sequence.num_computed += row.num_tokens
            sequence.num_remembered_pages = self.pool.remember(
                sequence.pages, sequence.token_ids, sequence.num_remembered_pages, sequence.num_computed
            )

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
        sequence.num_computed = sequence.num_remembered_pages = 0
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)
