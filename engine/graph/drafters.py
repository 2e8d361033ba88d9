"""Drafters on the device: a small model with a cache of its own, or the row itself; and drafts that another rank has made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Channels
from typing import Protocol

import torch

from engine.graph.decode_step import compute_rows
from engine.graph.operators import Operators
from engine.graph.prefill import PrefillStep
from engine.graph.row_state import SpeculativeRows
from engine.graph.speculative_step import DeviceDrafter, spread
from engine.replica import build_batch
from engine.scheduler import ScheduledRow
from engine.sequence import Sequence
from kernels.ngram_drafts import ngram_drafts

FEW_TOKENS = 4  # that a row is brought up to date with token by token


class NgramDrafts:
    """`DeviceDrafter` that copies from the row itself. `launch`: `kernels.ngram_drafts`, as kernel or twin."""

    description = "n-grams of the row"

    def __init__(self, launch: Callable[..., torch.Tensor] = ngram_drafts):
        self._launch = launch

    def catch_up(self, sequences: list[Sequence]) -> None:
        pass  # a burst begins with all tokens of its rows

    def note_end(self, sequences: list[Sequence]) -> None:
        pass

    def note_launch(self) -> None:
        pass

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        drafts = torch.empty(len(rows), num_drafts, dtype=torch.int64, device=rows.history.device)
        return self._launch(rows.history, rows.rows.positions, drafts)


class DraftChannel(Protocol):
    """`comm.device_signal.DeviceSignalChannel`, or what stands in for it: asynchronous, capturable."""

    def put(self, payload: torch.Tensor) -> None: ...

    def take(self, out: torch.Tensor) -> None: ...

    def note_launch(self) -> None: ...


class HandedDrafts:
    """`DeviceDrafter` of several ranks of which the first has the drafter, `inner` (None on the others), and hands on what it
    proposes. `channels`: on the first rank one to each of the others, on these the one from it.

    A rank's step goes on when its drafts are there: the hand-off is all that it waits for.
    """

    def __init__(self, inner: DeviceDrafter | None, channels: Channels[DraftChannel], description: str):
        self._inner, self._channels = inner, channels
        self.description = f"{description} on rank 0"

    def catch_up(self, sequences: list[Sequence]) -> None:
        if self._inner is not None:
            self._inner.catch_up(sequences)

    def note_end(self, sequences: list[Sequence]) -> None:
        if self._inner is not None:
            self._inner.note_end(sequences)

    def note_launch(self) -> None:
        for channel in self._channels:
            channel.note_launch()

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        if self._inner is None:
            drafts = torch.empty(len(rows), num_drafts, dtype=torch.int64, device=rows.history.device)
            self._channels[0].take(drafts)
            return drafts
        drafts = self._inner.propose(rows, num_drafts)
        for channel in self._channels:
            channel.put(drafts)
        return drafts


class ModelDrafts:
    """`DeviceDrafter` that runs a model, whole on every rank or split over them.

    `operators`: of the model, on a cache that has a page for every page of the target's, so that a row's pages are the same in
    both. `prefill`: of the same model. `max_step_tokens`: of a step that catches up.

    A draft is drawn as the target will draw: with the same temperature, filters and noise. The first of a row's steps computes
    the token before the last as well: where all drafts held, the last of them has not been through this model yet.
    """

    def __init__(self, operators: Operators, prefill: PrefillStep, max_step_tokens: int, description: str):
        self._operators, self._prefill, self._max_step_tokens = operators, prefill, max_step_tokens
        self.description = description

    def catch_up(self, sequences: list[Sequence]) -> None:
        """All but the token before the last, which the first step computes anyway: a row that had drafts in the step before needs
        nothing, and one that had none, because others joined, the token of that step."""
        for rows in self._steps(sequences):
            device = self._operators.kv.keys.device
            self._prefill.run(build_batch(rows, self._operators.kv.page_size, device))

    def _steps(self, sequences: list[Sequence]) -> Iterator[list[ScheduledRow]]:
        """Rows that lack a few tokens take one a step, as rows that decode do: such steps have graphs. Prompts go with the last
        of these."""
        begun = [sequence for sequence in sequences if sequence.num_draft_computed]
        few = [sequence for sequence in begun if 0 < self._num_lacking(sequence) <= FEW_TOKENS]
        for num_left in range(max(map(self._num_lacking, few), default=0), 1, -1):
            yield [self._take(sequence, 1) for sequence in few if self._num_lacking(sequence) == num_left]
        rows, budget = [], self._max_step_tokens
        for sequence in (*few, *(sequence for sequence in sequences if sequence not in few)):
            while self._num_lacking(sequence) > 0:
                rows.append(self._take(sequence, min(self._num_lacking(sequence), budget)))
                budget -= rows[-1].num_tokens
                if budget == 0:
                    yield rows
                    rows, budget = [], self._max_step_tokens
        if rows:
            yield rows

    @staticmethod
    def _num_lacking(sequence: Sequence) -> int:
        return sequence.num_computed - 1 - sequence.num_draft_computed

    @staticmethod
    def _take(sequence: Sequence, count: int) -> ScheduledRow:
        """The next `count` tokens that the row lacks."""
        first = sequence.num_draft_computed
        sequence.num_draft_computed += count
        return ScheduledRow(sequence, first, count, is_sampled=False, num_logits=0)

    def note_end(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            sequence.num_draft_computed = sequence.num_computed - 1

    def note_launch(self) -> None:
        pass

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        last = rows.rows.token_ids[:, None]
        before = rows.history.gather(1, (rows.rows.positions[:, None] - 1).clamp(min=0)).long()
        x = self._compute(rows, torch.cat((before, last), 1), first=-1)[1::2].contiguous()
        drafts = [self._choose(rows, x, last, first=0)]
        for place in range(1, num_drafts):
            drafts.append(self._choose(rows, self._compute(rows, drafts[-1], place), drafts[-1], place))
        return torch.cat(drafts, 1)

    def _compute(self, rows: SpeculativeRows, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        return compute_rows(self._operators, spread(rows.rows, token_ids, first))

    def _choose(self, rows: SpeculativeRows, x: torch.Tensor, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """`[n, 1]`: what follows `token_ids`, at the rows' positions + `first`."""
        logits = self._operators.linear(x, self._operators.weights.head)
        return self._operators.choose(spread(rows.rows, token_ids, first), logits)[0][:, None]
