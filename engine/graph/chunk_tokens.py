"""The tokens of a step that prefills, maybe beside rows that decode, as its operators read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.step_batch import StepBatch
from kernels.chunk_attention import Chunk, join_chunks, plan_chunk


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
    chunks: dict[int | None, tuple[Chunk, ...]]
    num_single: int = 0
    page_table: torch.Tensor | None = None


def chunk_tokens(
    batch: StepBatch, turns: torch.Tensor, page_size: int, windows: set[int | None], most_single: int
) -> ChunkTokens:
    """The tokens of `batch`. `turns` `[max positions, head_dim]`. `most_single`: how many of the rows of one token that come
    first may be taken as such. *Stream*: asynchronous, nothing is waited for."""
    num_single = 0
    for row in batch.rows[:most_single]:
        if row.num_tokens > 1:
            break
        num_single += 1
    chunks = {}
    for window in windows:
        plans = (
            plan_chunk(
                row.start, row.num_tokens, row.context_len, row.pages, batch.page_table[idx], page_size, window, turns.dtype
            )
            for idx, row in enumerate(batch.rows[num_single:], num_single)
        )
        chunks[window] = join_chunks(tuple(plans))
    page_table = batch.page_table[:num_single].int() if num_single else None
    own_turns = turns.index_select(0, batch.positions)
    return ChunkTokens(
        batch.token_ids, batch.positions, batch.slots, own_turns, batch.logit_idx, chunks, num_single, page_table
    )
