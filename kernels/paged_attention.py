"""Causal grouped-query attention over a paged KV cache, torch twin.

The plan of a row (where its keys lie, which it may see) is made once a step and used by every layer. A row
whose pages follow each other in memory is read through a view; only a scattered row is gathered. Rows never
share a product, so a row's result does not depend on its batch mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


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
        mask = _mask(num_tokens, context_len, first, window, dtype, device)
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
    return slots.flatten()[offset : offset + end - first].to(device)


def _mask(
    num_tokens: int, context_len: int, first: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    query = torch.arange(context_len, context_len + num_tokens, device=device)[:, None]
    key = torch.arange(first, context_len + num_tokens, device=device)
    is_hidden = key > query
    if window is not None:
        is_hidden |= key <= query - window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=device).masked_fill_(is_hidden, float("-inf"))


def paged_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Sequence[RowPlan], out: torch.Tensor
) -> torch.Tensor:
    """Attend each row's queries to its cached keys and values, which already include this step's.

    `q`, `out` `[num_tokens, local_q_heads, head_dim]`; `keys`, `values` `[num_slots, local_kv_heads, head_dim]`
    of one layer. Query head j reads KV head j // (local_q_heads / local_kv_heads). Scores are scaled by
    head_dim ** -0.5. Returns `out`. *Numbers*: those of `scaled_dot_product_attention` (fp32 accumulation).
    """
    kv_heads, head_dim = keys.shape[1:]
    group = q.shape[1] // kv_heads
    for row in rows:
        k, v = keys[row.kv].transpose(0, 1), values[row.kv].transpose(0, 1)
        queries = q[row.start : row.start + row.num_tokens]
        target = out[row.start : row.start + row.num_tokens]
        if row.num_tokens == 1:
            # One query: the heads of a group stand in for query positions, so keys are never repeated.
            heads = queries.view(1, kv_heads, group, head_dim)
            target.copy_(F.scaled_dot_product_attention(heads, k[None], v[None]).reshape(1, -1, head_dim))
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
