"""One speculative step: guess the next tokens of every row, compute them all at once, take those that hold and one more.

Why no token changes by it: `engine.drafts.speculation`. Here the whole step stays on the device: the model chooses a token behind
each of a row's drafts, by the logits, temperature, filters and noise that a step of one token would have there, and a draft holds
if it is the token chosen before it. What the cache holds of the others is written over by the next step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from comm.vocabulary import DrawOptions
from engine.graph.decode_step import compute_rows
from engine.graph.operators import Operators
from engine.graph.row_state import PADDING, DeviceRows, SpeculativeRows
from engine.profile.marks import DRAFT, NO_MARKS, Marks
from engine.sequence import Sequence


class Judge(Protocol):
    """For benches: says which drafts hold. int64 `[n, num_drafts]` to be taken for the `drafts` of `rows`, by `ids` int64
    `[n * (num_drafts + 1)]`, what the model chose. Asynchronous, capturable; the same on all ranks."""

    def __call__(self, rows: DeviceRows, drafts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor: ...


class DeviceDrafter(Protocol):
    """Where guesses come from. *Collective*: all ranks make the same calls. `description`: for the start summary."""

    description: str

    def catch_up(self, sequences: list[Sequence]) -> None:
        """Take in what the rows have said since, before steps of theirs are launched. Waits for the device
        where a graph has to be captured first."""

    def note_end(self, sequences: list[Sequence]) -> None:
        """Steps of these rows are over; all their tokens are known."""

    def note_launch(self) -> None:
        """Steps that propose have been launched on torch's current stream; the host will not wait for that stream."""

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        """int64 `[n, num_drafts]`: what may follow each row's last token. Asynchronous, capturable."""


def speculative_step(
    operators: Operators, drafter: DeviceDrafter, rows: SpeculativeRows, num_drafts: int, marks: Marks = NO_MARKS,
    judge: Judge | None = None,
) -> None:  # fmt: skip
    """Advance `rows` by 1 to `num_drafts` + 1 tokens each. *Collective*, asynchronous, capturable.

    `marks`: as of `decode_step`; the drafts are stage `draft`. `judge`: None for the model alone.
    """
    drafts = drafter.propose(rows, num_drafts)
    marks.end(DRAFT)
    chain = spread(rows.rows, torch.cat((rows.rows.token_ids[:, None], drafts), 1))
    logits = operators.linear(compute_rows(operators, chain, marks), operators.weights.head)
    marks.end("head")
    ids, values = operators.choose(chain, logits)
    marks.end("sampling")
    if judge is not None:
        drafts = judge(rows.rows, drafts, ids)
    operators.accept(rows.rows, rows.history, drafts, ids, values)
    marks.end("rest")


def spread(rows: DeviceRows, token_ids: torch.Tensor, first: int = 0) -> DeviceRows:
    """Rows of one token each for `token_ids` int64 `[n, width]`: those of row i from its position + `first` on."""
    width = token_ids.shape[1]
    places = torch.arange(first, first + width, device=token_ids.device)
    there = rows.positions[:, None]
    positions = torch.where(there < 0, PADDING, there + places).flatten()

    def repeat(values: torch.Tensor) -> torch.Tensor:
        return values.repeat_interleave(width, 0) if width > 1 else values

    draw = DrawOptions(repeat(rows.draw.temperatures), repeat(rows.draw.starts), positions)
    filters = rows.filters
    if filters is not None:
        lists = (filters.rules, filters.bias_ids, filters.biases, filters.forbidden_ids)
        filters = replace(filters, **dict(zip(("rules", "bias_ids", "biases", "forbidden_ids"), map(repeat, lists))))
    return DeviceRows(
        token_ids.flatten(), positions, repeat(rows.page_table), draw, rows.step, rows.ring, filters,
        is_chained=width > 1, is_fresh=True,
    )  # fmt: skip
