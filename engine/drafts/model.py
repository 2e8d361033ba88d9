"""A small model as drafter. It runs whole on rank 0, on its own KV cache, whatever the target's parallel degree.

A proposal of k tokens takes k batched steps: the first catches up on what its rows have said since, the others continue. Each
token is drawn as the target will draw it, with the same sampler, state and noise, only from this model's logits; why
that matters is told in `engine.drafts.speculation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.drafts.speculation import DraftRow
from engine.pages import PagePool
from engine.replica import StepBackend, build_batch
from engine.sampler import SamplerState, sample
from engine.scheduler import Limits, ScheduledRow
from engine.sequence import Sequence


@dataclass(eq=False)
class Chain:
    """One row's proposal in the making. `state` is a copy that records the drafts as if they had been chosen."""

    row: DraftRow
    sequence: Sequence
    state: SamplerState
    draft_ids: list[int] = field(default_factory=list)

    @property
    def is_long_enough(self) -> bool:
        return len(self.draft_ids) == self.row.num_wanted

    def next_row(self) -> ScheduledRow:
        """The step that computes the newest draft."""
        first = len(self.sequence.token_ids) + len(self.draft_ids) - 1
        return ScheduledRow(self.sequence, first, 1, True, 1, (self.draft_ids[-1],))


class ModelDrafter:
    """`Drafter` that runs a model.

    `full_vocab`: the model's vocabulary rows. `num_ids`: ids the target may choose; ids that only one of the two models has are
    never proposed, and a row that holds an id unknown to this model gets no drafts. `limits.max_step_tokens` bounds a step while
    catching up. A row takes the pages of its whole possible length before its first draft: a row for which they are not there
    gets no drafts until they are, and one that has begun never has to stop.
    """

    def __init__(
        self, backend: StepBackend, pool: PagePool, limits: Limits, full_vocab: int, num_ids: int, device: torch.device
    ):
        self.backend, self.pool, self.limits, self.device = backend, pool, limits, device
        self.full_vocab, self.num_ids = full_vocab, num_ids
        self._sequences: dict[int, Sequence] = {}

    @torch.inference_mode()
    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        chains = {row.seq_id: Chain(row, sequence, row.state.fork()) for row, sequence in self._known(rows)}
        growing = list(chains.values())
        if growing:
            logits = self._catch_up([chain.sequence for chain in growing])
        while growing:
            growing = _choose(growing, logits)
            if growing:
                logits = self._run([chain.next_row() for chain in growing])
        for chain in chains.values():
            chain.sequence.drafted = tuple(chain.draft_ids[:-1])  # the last draft is proposed but not computed
        return [chains[row.seq_id].draft_ids if row.seq_id in chains else [] for row in rows]

    def drop(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None:
            self.pool.release(sequence.pages)

    def _known(self, rows: list[DraftRow]) -> Iterator[tuple[DraftRow, Sequence]]:
        """The rows that this model can follow now, brought up to date."""
        for row in rows:
            sequence = self._sequences.get(row.seq_id)
            known = 0 if sequence is None else len(sequence.token_ids)
            if len(row.token_ids) + row.num_wanted > self.limits.max_model_len:
                continue
            if max(row.token_ids[known:]) >= self.full_vocab:
                continue
            if sequence is None:
                sequence = self._open(row)
            else:
                sequence.append(row.token_ids[known:])
            if sequence is not None:
                yield row, sequence

    def _open(self, row: DraftRow) -> Sequence | None:
        sequence = Sequence(row.seq_id, list(row.token_ids), row.num_prompt, row.max_tokens)
        sequence.pages = self.pool.match_prefix(sequence.token_ids)
        sequence.num_remembered_pages = len(sequence.pages)
        sequence.num_computed = len(sequence.pages) * self.pool.page_size
        if not self.pool.extend(sequence.pages, min(row.max_tokens, self.limits.max_model_len)):
            self.pool.release(sequence.pages)
            return None
        self._sequences[row.seq_id] = sequence
        return sequence

    def _catch_up(self, sequences: list[Sequence]) -> torch.Tensor:
        """Compute all that is pending, in steps of bounded size. Logits at the last tokens `[len(sequences), num_ids]`."""
        parts = [self._run(rows) for rows in self._steps(sequences)]
        for sequence in sequences:
            sequence.num_remembered_pages = self.pool.remember(
                sequence.pages, sequence.token_ids, sequence.num_remembered_pages, sequence.num_computed
            )
        return torch.cat(parts)

    def _steps(self, sequences: list[Sequence]) -> Iterator[list[ScheduledRow]]:
        rows: list[ScheduledRow] = []
        budget = self.limits.max_step_tokens
        for sequence in sequences:
            while sequence.num_pending:
                row = ScheduledRow.of(sequence, min(sequence.num_pending, budget))
                rows.append(row)
                sequence.num_computed += row.num_tokens
                budget -= row.num_tokens
                if budget == 0:
                    yield rows
                    rows, budget = [], self.limits.max_step_tokens
        if rows:
            yield rows

    def _run(self, rows: list[ScheduledRow]) -> torch.Tensor:
        """fp32 logits `[rows with logits, num_ids]`, -inf where this model has no such id."""
        logits = self.backend.run(build_batch(rows, self.pool.page_size, self.device))[:, : min(self.full_vocab, self.num_ids)]
        missing = self.num_ids - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def _choose(chains: list[Chain], logits: torch.Tensor) -> list[Chain]:
    """Add a token to each chain. Returns those that go on."""
    growing: list[Chain] = []
    for chain, token_id in zip(chains, sample(logits, [chain.state for chain in chains])):
        if token_id is None:  # not a number: no guess, and the target decides alone
            continue
        chain.draft_ids.append(token_id)
        chain.state.record(token_id)
        if not chain.is_long_enough:
            growing.append(chain)
    return growing
