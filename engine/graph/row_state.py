"""What the device knows of the rows of a burst: everything that varies from step to step, at addresses that never change.

A captured step reads it and advances it; the host writes it when a burst begins, and adds pages and noise when it is continued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
import torch

from comm.vocabulary import DrawOptions
from engine.graph.row_rules import RowRules
from engine.graph.staging import Staging
from engine.graph.token_ring import TokenRing
from engine.sampler import stream_start
from engine.sequence import Sequence
from kernels.filter_logits import FilterOptions
from kernels.upload import upload

PADDING = -1  # position of a row that is not there
MAX_STEPS_AHEAD = 32  # steps launched and not yet read; the ring holds as many, and noise for a token of each
NOISE_AHEAD = 4  # times as much noise where steps have drafts


@dataclass(frozen=True)
class DeviceRows:
    """The first `n` rows of a `RowState`, on the device.

    `token_ids`: int64 `[n]`, the tokens to compute; `positions`: int64 `[n]`, where, `PADDING` for a row that is not there;
    `page_table`: int32 `[n, max_pages]`; `draw`: how to choose, noise by position; `step`: int64 `[1]`, the number of the step;
    `ring`: where it leaves its tokens; `filters`: what else bears on the choice, None for nothing. `is_chained`: some are tokens
    of the same row, one behind the other. `is_fresh`: positions and page table are made in the same graph as the step.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    draw: DrawOptions
    step: torch.Tensor
    ring: TokenRing
    filters: FilterOptions | None = None
    is_chained: bool = False
    is_fresh: bool = False

    def __len__(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True)
class SpeculativeRows:
    """`rows`, and their tokens by position: `history` int32 `[n, max_positions]`, up to the last token of each."""

    rows: DeviceRows
    history: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Speculable:
    """What steps with drafts may be: up to `max_rows` rows, and `num_padding` that are not there; `max_drafts` drafts each; rows
    of up to `max_tokens` tokens."""

    max_rows: int
    max_drafts: int
    max_tokens: int
    num_padding: int = 0

    @property
    def padded_rows(self) -> int:
        return self.max_rows + self.num_padding

    @property
    def width(self) -> int:
        return self.max_drafts + 1


@dataclass(frozen=True)
class LastTokens:
    """What was chosen last for the rows that are on the device: for a sequence `ids[rows[sequence]]`. `ids`: int64 `[max_rows]`;
    *Stream*: as of the steps launched so far, on the current one."""

    ids: torch.Tensor
    rows: Mapping[Sequence, int]


class RowState:
    """Of up to `max_rows` rows with up to `max_pages` pages each. `full_vocab`: ids that a row may hold; `check`: as
    `TokenRing.read` takes it. What only filtered steps need is made when the first of them is. `speculable`: None for no
    drafts."""

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        full_vocab: int,
        device: torch.device,
        check: Callable[[], None],
        speculable: Speculable | None = None,
    ):
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.max_rows, self.max_pages, self.check = max_rows, max_pages, check
        self.speculable = speculable
        most_words = 0 if speculable is None else speculable.padded_rows * speculable.width
        self.ring = TokenRing(MAX_STEPS_AHEAD, max(max_rows, most_words), device)
        self._window = MAX_STEPS_AHEAD * (1 if speculable is None else NOISE_AHEAD)
        self.num_launched = 0  # the number of the next step
        self._token_ids, self._positions = zeros(max_rows), zeros(max_rows).fill_(PADDING)
        self._page_table = zeros(max_rows, max_pages, dtype=torch.int32)
        self._temperatures = zeros(max_rows, dtype=torch.float64)
        self._starts = zeros(max_rows, self._window)
        self._step = zeros(1)
        self._num_pages: list[int] = []
        self._rows: dict[Sequence, int] = {}
        self._full_vocab, self._device = full_vocab, device
        self._rules: RowRules | None = None
        self._is_filtered = False
        self._history = None if speculable is None else zeros(speculable.padded_rows, speculable.max_tokens, dtype=torch.int32)
        self._staging = Staging(max_rows * (max_pages + 5 + 2 * self._window), self.ring, device)

    @property
    def last_tokens(self) -> LastTokens:
        return LastTokens(self._token_ids, self._rows)

    def rows(self, count: int, is_filtered: bool = False) -> DeviceRows:
        filters = self._row_rules().options(count) if is_filtered else None
        draw = DrawOptions(self._temperatures[:count], self._starts[:count], self._positions[:count])
        return DeviceRows(
            self._token_ids[:count], self._positions[:count], self._page_table[:count], draw, self._step, self.ring, filters
        )

    def speculative_rows(self, count: int, is_filtered: bool = False) -> SpeculativeRows:
        return SpeculativeRows(self.rows(count, is_filtered), self._history[:count])

    def scratch(self, count: int) -> RowState:
        """Another state, of `count` rows that are not there, to try things on."""
        return RowState(count, 1, self._full_vocab, self._device, self.check, self.speculable)

    def restart(self) -> None:
        """No rows, and the next step is number 0. Only while the device is idle."""
        self._rows = {}
        self._positions.fill_(PADDING)
        self._step.zero_()
        self.ring.restart()
        self.num_launched = 0

    def begin(self, sequences: list[Sequence], is_filtered: bool = False, is_speculative: bool = False) -> None:
        """Put the rows of `sequences` in the place of those before. Each has one token to compute, its last; or that has just
        been computed, and what is to come is the choice of the one after it. A last token that is not known yet is that of the
        row which the sequence had before. `is_filtered`: the steps to come heed the rows' rules. `is_speculative`: they have
        drafts."""
        self._is_filtered = is_filtered
        if is_filtered:
            self._row_rules().begin(sequences)
        self._num_pages = [len(sequence.pages) for sequence in sequences]
        pages = numpy.zeros((len(sequences), max(self._num_pages)), numpy.int64)
        for row, sequence in enumerate(sequences):
            pages[row, : len(sequence.pages)] = sequence.pages
        ahead = [(row, self._rows[sequence]) for row, sequence in enumerate(sequences) if sequence.num_ahead]
        token_ids, positions, ahead_rows, temperatures, pages = self._upload(
            numpy.array([sequence.token_ids[-1] for sequence in sequences], numpy.int64),
            numpy.array([sequence.num_tokens - 1 for sequence in sequences], numpy.int64),
            numpy.array(ahead, numpy.int64).reshape(-1, 2).T.copy(),
            numpy.array([sequence.temperature for sequence in sequences], numpy.float64).view(numpy.int64),
            pages,
        )
        count = len(sequences)
        if ahead:
            token_ids.index_copy_(0, ahead_rows[0], self._token_ids.index_select(0, ahead_rows[1]))
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}
        self._token_ids[:count].copy_(token_ids)
        self._positions[:count].copy_(positions)
        self._positions[count:].fill_(PADDING)
        self._temperatures[:count].copy_(temperatures.view(torch.float64))
        self._temperatures[count:].zero_()
        self._page_table[:count, : pages.shape[1]].copy_(pages)
        if is_speculative:
            longest = max(len(sequence.token_ids) for sequence in sequences)
            history = numpy.zeros((count, longest), numpy.int32)
            for row, sequence in enumerate(sequences):
                history[row, : len(sequence.token_ids)] = sequence.token_ids
            self._history[:count, :longest].copy_(upload(torch.from_numpy(history), self._device))

    def extend(self, sequences: list[Sequence], positions: list[int], num_tokens: int) -> None:
        """Give the rows what their next `num_tokens` tokens need, from `positions` on: the pages they took since, and noise."""
        if self._is_filtered:
            self._row_rules().advance(num_tokens)
        at_page: list[int] = []
        pages: list[int] = []
        at_start: list[int] = []
        starts: list[int] = []
        for row, (sequence, first) in enumerate(zip(sequences, positions)):
            for idx in range(self._num_pages[row], len(sequence.pages)):
                at_page.append(row * self.max_pages + idx)
                pages.append(sequence.pages[idx])
            self._num_pages[row] = len(sequence.pages)
            if sequence.temperature > 0.0:
                for position in range(first, first + num_tokens):
                    at_start.append(row * self._window + position % self._window)
                    starts.append(stream_start(sequence.stream_key, position + 1 - sequence.num_prompt))
        if not pages and not starts:
            return
        parts = self._upload(*(numpy.array(part, numpy.int64) for part in (at_page, pages, at_start, starts)))
        if pages:
            self._page_table.view(-1).index_copy_(0, parts[0], parts[1].to(torch.int32))
        if starts:
            self._starts.view(-1).index_copy_(0, parts[2], parts[3])

    def _row_rules(self) -> RowRules:
        if self._rules is None:
            self._rules = RowRules(self.max_rows, self._full_vocab, self._device)
        return self._rules

    def _upload(self, *parts: numpy.ndarray) -> list[torch.Tensor]:
        return self._staging.upload(list(parts), self.num_launched, self.check)
