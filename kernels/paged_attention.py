"""Causal grouped-query attention over a paged KV cache, torch twin.

The plan of a row (where its keys lie, which it may see) is made once a step and used by every layer. A row
whose pages follow each other in memory is read through a view; only a scattered row is gathered. Rows never
share a product, so a row's result does not depend on its batch mates, up to rounding where rows are padded together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.upload import upload


@dataclass(frozen=True)
class RowPlan:
    """One row's part of a step, for one window size.

    `start`, `num_tokens`: its queries in the flat batch. `kv`: the cache slots it reads, in order of position,
    as a slice where they are adjacent and as int64 indices where not. `mask`: additive `[num_tokens, len(kv)]`,
    or None where `is_causal` or a single query make it unnecessary.
    """

    start: int
    num_tokens: int
    kv: slice | torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool


@dataclass(frozen=True)
class GroupPlan:
    """Several rows of one query each, padded to the longest and attended in one call.

    On a CPU a call a row costs more than the padding: eight rows of 150 keys took 79 us a row and layer one by one, and 45
    us together (two threads). `start`: [rows] flat query indices. `slots`: `[rows * longest]`, what is behind a row's end
    repeats its first slot. `mask`: additive `[rows, 1, 1, longest]`, None if all rows are equally long.
    """

    start: torch.Tensor
    slots: torch.Tensor
    mask: torch.Tensor | None


MIN_GROUP = 3  # rows; fewer are as fast one by one
MAX_PADDING = 2.0  # keys read in a group, over keys that count


def group_rows(rows: Sequence[RowPlan], dtype: torch.dtype, device: torch.device) -> tuple[RowPlan | GroupPlan, ...]:
    """`rows` with those of a single query put into one group, where that pays. For CPUs."""
    single = [row for row in rows if row.num_tokens == 1]
    lengths = [_length(row) for row in single]
    if len(single) < MIN_GROUP or max(lengths) * len(single) > MAX_PADDING * sum(lengths):
        return tuple(rows)
    longest = max(lengths)
    slots = torch.empty(len(single), longest, dtype=torch.int64)
    mask = torch.zeros(len(single), 1, 1, longest, dtype=dtype)
    for idx, (row, length) in enumerate(zip(single, lengths)):
        own = torch.arange(row.kv.start, row.kv.stop) if isinstance(row.kv, slice) else row.kv
        slots[idx, :length], slots[idx, length:] = own, own[0]
        mask[idx, ..., length:] = float("-inf")
    start = torch.tensor([row.start for row in single], device=device)
    group = GroupPlan(start, slots.flatten().to(device), None if min(lengths) == longest else mask.to(device))
    return (*(row for row in rows if row.num_tokens > 1), group)


def _length(row: RowPlan) -> int:
    return row.kv.stop - row.kv.start if isinstance(row.kv, slice) else row.kv.numel()


def plan_row(
    start: int,
    num_tokens: int,
    context_len: int,
    pages: Sequence[int],
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> RowPlan:
    """Plan a row whose first `context_len` tokens are cached and whose next `num_tokens` are this step's.

    `pages`: the row's page numbers in order. `window`: how many last tokens each query sees, itself included;
    None for all. `dtype`, `device`: of the queries, for the mask.
    """
    kv_len = context_len + num_tokens
    first = 0 if window is None else max(0, context_len + 1 - window)  # oldest position that any query of the row sees
    is_plain = first == 0 and (window is None or kv_len <= window)
    mask = None
    if num_tokens > 1 and not (is_plain and context_len == 0):
        mask = causal_mask(num_tokens, context_len, first, window, dtype, device)
    is_causal = num_tokens > 1 and mask is None
    return RowPlan(start, num_tokens, _slots(pages, page_size, first, kv_len, device), mask, is_causal)


def _slots(pages: Sequence[int], page_size: int, first: int, end: int, device: torch.device) -> slice | torch.Tensor:
    """Cache slots of positions [first, end)."""
    used = pages[first // page_size : -(-end // page_size)]
    offset = first - first // page_size * page_size
    if all(page == used[0] + i for i, page in enumerate(used)):
        begin = used[0] * page_size + offset
        return slice(begin, begin + end - first)
    slots = torch.tensor(used)[:, None] * page_size + torch.arange(page_size)
    return upload(slots.flatten()[offset : offset + end - first], device)


def causal_mask(
    num_tokens: int, context_len: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Additive `[num_tokens, context_len + num_tokens - first]`: queries behind `context_len` keys, the `first` ones left out."""
    query = torch.arange(context_len, context_len + num_tokens, device=device)[:, None]
    key = torch.arange(first, context_len + num_tokens, device=device)
    is_hidden = key > query
    if window is not None:
        is_hidden |= key <= query - window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, float("-inf"))


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[RowPlan | GroupPlan], out: torch.Tensor
) -> torch.Tensor:
    """Attend each row's queries to its cached keys and values, which already include this step's.

    `q`, `out` `[num_tokens, local_q_heads, head_dim]`; `keys`, `values` `[num_slots, local_kv_heads, head_dim]`
    of one layer. Query head j reads KV head j // (local_q_heads / local_kv_heads). Scores are scaled by
    head_dim ** -0.5. Returns `out`. *Numbers*: those of `scaled_dot_product_attention` (fp32 accumulation).
    """
    kv_heads, head_dim = keys.shape[1:]
    group = q.shape[1] // kv_heads
    for row in rows:
        if isinstance(row, GroupPlan):
            _attend_group(q, keys, values, row, out, group)
            continue
        k, v = keys[row.kv].transpose(0, 1), values[row.kv].transpose(0, 1)
        queries = q[row.start : row.start + row.num_tokens]
        target = out[row.start : row.start + row.num_tokens]
        if row.num_tokens == 1:
            # One query: the heads of a group stand in for query positions, so keys are never repeated.
            heads = queries.view(1, kv_heads, group, head_dim)
            target.copy_(F.scaled_dot_product_attention(heads, k[None], v[None]).reshape(1, -1, head_dim))
            continue
        if row.mask is not None and q.is_cuda:
            # Keys repeated in memory, since called as below (expanded keys, permuted queries) and with a mask, torch 2.11's
            # memory-efficient attention (fp32) gave a wrong result for the last of 64 * n + 1 queries.
            k, v = (part.repeat_interleave(group, 0)[None] for part in (k, v))
            result = F.scaled_dot_product_attention(queries.transpose(0, 1)[None], k, v, attn_mask=row.mask)
            target.copy_(result[0].transpose(0, 1))
            continue
        # KV heads as the batch dimension, and a zero-stride expansion over the group: no copy of the keys.
        heads = queries.view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        result = F.scaled_dot_product_attention(
            heads,
            k[:, None].expand(-1, group, -1, -1),
            v[:, None].expand(-1, group, -1, -1),
            attn_mask=row.mask,
            is_causal=row.is_causal,
        )
        target.view(-1, kv_heads, group, head_dim).copy_(result.permute(2, 0, 1, 3))
    return out


def _attend_group(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: GroupPlan, out: torch.Tensor, group: int
) -> None:
    kv_heads, head_dim = keys.shape[1:]
    num_rows = plan.start.numel()
    k, v = (part.index_select(0, plan.slots).view(num_rows, -1, kv_heads, head_dim).transpose(1, 2) for part in (keys, values))
    heads = q.index_select(0, plan.start).view(num_rows, kv_heads, group, head_dim)
    result = F.scaled_dot_product_attention(heads, k, v, attn_mask=plan.mask)
    out.index_copy_(0, plan.start, result.reshape(num_rows, -1, head_dim))
