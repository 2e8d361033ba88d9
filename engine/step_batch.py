"""The tokens of one step, of all rows that take part in it, in the form the step backends read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowSpan:
    """One row's part of a step.

    `start`, `num_tokens`: its tokens in the flat batch. `context_len`: tokens of the row already in the KV cache before this
    step. `pages`: the row's page numbers in order, enough for `context_len + num_tokens` tokens. `num_logits`: of how many of its
    last tokens the logits are wanted.
    """

    start: int
    num_tokens: int
    context_len: int
    pages: tuple[int, ...]
    num_logits: int = 1

    @property
    def kv_len(self) -> int:
        return self.context_len + self.num_tokens


@dataclass(frozen=True)
class StepBatch:
    """One step's work. Rows lie one after the other, without padding.

    `token_ids`, `positions`, `slots`: int64 `[num_tokens]`; a token's keys and values go to KV slot `slots[i]`.
    `logit_idx`: int64 `[num_logits]`, the flat token indices whose logits are wanted. `page_table`: int64 `[num_rows, most
    pages]`, the rows' pages where the device can read them, zeros behind a row's last; None for backends that do without.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_idx: torch.Tensor
    rows: tuple[RowSpan, ...]
    page_table: torch.Tensor | None = None
