"""The tokens of a step that prefills, maybe beside rows that decode, as its operators read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.graph.long_prompts import LongPrompts
from engine.step_batch import RowSpan, StepBatch
from kernels.chunk_attention import Chunk, PackedRows, plan_chunk
from kernels.upload import upload


@dataclass(frozen=True)
class ChunkTokens:
    """`token_ids`, `positions`, `slots` int64 `[tokens]`, a slot below 0 for padding; `turns` `[tokens, head_dim]`: cosines and
    sines of the positions (`kernels.rotary.rotary_turns`); `logit_idx` int64 `[num_logits]`.

    The first `num_single` tokens are rows of their own, with the pages in `page_table` int32 `[num_single, max_pages]` (None for
    no rows); the others are the `chunks`, by the window of a layer.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    turns: torch.Tensor
    logit_idx: torch.Tensor
    chunks: dict[int | None, tuple[Chunk | PackedRows, ...]]
    num_single: int = 0
    page_table: torch.Tensor | None = None


def count_single(rows: tuple[RowSpan, ...], most: int) -> int:
    """How many rows of one token come first, at most `most`."""
    return next((idx for idx, row in enumerate(rows[:most]) if row.num_tokens > 1), min(len(rows), most))


def chunk_tokens(
    batch: StepBatch, turns: torch.Tensor, page_size: int, windows: set[int | None], most_single: int, long_prompts: LongPrompts
) -> ChunkTokens:
    """The tokens of `batch`. `turns` `[max positions, head_dim]`. `most_single`: how many of the rows of one token that come
    first may be taken as such. `long_prompts`: is asked, once, which prompts by themselves cuDNN attends. *Stream*:
    asynchronous, nothing is waited for."""
    num_single = count_single(batch.rows, most_single)
    runs = [(first, end, _starts(batch, first, end)) for first, end in _runs_without_context(batch.rows, num_single)]
    packed = {idx for first, end, _ in runs for idx in range(first, end)}
    alone = [row for idx, row in enumerate(batch.rows) if idx >= num_single and idx not in packed and row.context_len == 0]
    long = long_prompts.choose(row.num_tokens for row in alone)
    chunks = {window: _chunks(batch, num_single, runs, page_size, window, turns.dtype, long) for window in windows}
    page_table = batch.page_table[:num_single].int() if num_single else None
    own_turns = turns.index_select(0, batch.positions)
    return ChunkTokens(
        batch.token_ids, batch.positions, batch.slots, own_turns, batch.logit_idx, chunks, num_single, page_table
    )


def _runs_without_context(rows: tuple[RowSpan, ...], first: int) -> list[tuple[int, int]]:
    """Where two rows or more follow each other, from `first` on, of which nothing is cached: (first row, row behind the last)."""
    borders = [idx for idx in range(first, len(rows)) if rows[idx].context_len > 0] + [len(rows)]
    starts = [first, *(border + 1 for border in borders)]
    return [(start, border) for start, border in zip(starts, borders) if border - start > 1]


def _starts(batch: StepBatch, first: int, end: int) -> torch.Tensor:
    start = batch.rows[first].start
    ends = [row.start + row.num_tokens - start for row in batch.rows[first:end]]
    return upload(torch.tensor([0, *ends], dtype=torch.int32), batch.token_ids.device)


def _chunks(
    batch: StepBatch, num_single: int, runs: list[tuple[int, int, torch.Tensor]], page_size: int, window: int | None,
    dtype: torch.dtype, long: frozenset[int],
) -> tuple[Chunk | PackedRows, ...]:  # fmt: skip
    """`long`: the lengths of prompts by themselves that cuDNN attends."""
    chunks: list[Chunk | PackedRows] = []
    rows, idx = batch.rows, num_single
    ends = {first: (end, starts) for first, end, starts in runs}
    while idx < len(rows):
        row = rows[idx]
        if idx in ends:
            end, starts = ends[idx]
            lengths = tuple(each.num_tokens for each in rows[idx:end])
            chunks.append(PackedRows(row.start, row.start + sum(lengths), starts, max(lengths), lengths, window))
            idx = end
        else:
            pages = batch.page_table[idx]
            place, is_long = (row.start, row.num_tokens, row.context_len), row.num_tokens in long
            chunks.append(plan_chunk(*place, row.pages, pages, page_size, window, dtype, is_long))
            idx += 1
    return tuple(chunks)
