"""Causal grouped-query attention of many new tokens, for GPUs: what a step that prefills attends with.

A *chunk* is a run of new tokens of one row, behind what the row has in the cache, or of several rows that are equally long and
have nothing there. Each chunk is one call of torch's FlashAttention, which reads grouped heads as they are.
Chunks with nothing cached read the new keys and values where they lie in the fused projection; others read the cache, which
holds the new ones already. `kernels/paged_attention.py` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.paged_attention import causal_mask

FLASH_DTYPES, FLASH_ELEMS = (torch.bfloat16, torch.float16), 8  # what FlashAttention takes; a head is a multiple of so many


@dataclass(frozen=True)
class Chunk:
    """`num_rows` rows of `num_tokens` new tokens each, from the flat index `start` on.

    `cached`: where keys and values lie, new ones included, None for nowhere but in the projection: a slice of slots, or int64
    pages on the device, of whose slots `first` are skipped. `kv_len`: how many keys count. `mask`: additive
    `[num_tokens, kv_len]` where a sliding window needs one, else None.
    """

    start: int
    num_rows: int
    num_tokens: int
    kv_len: int
    cached: slice | torch.Tensor | None = None
    first: int = 0
    mask: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_rows * self.num_tokens


def plan_chunk(
    start: int,
    num_tokens: int,
    context_len: int,
    pages: Sequence[int],
    page_ids: torch.Tensor,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> Chunk:
    """The chunk of one row whose first `context_len` tokens are cached, for layers with this `window` (None: all is seen).

    `pages`: the row's pages in order, `page_ids` the same as int64 on the device. `dtype`: of a mask. Waits for nothing.
    """
    kv_len = context_len + num_tokens
    first = 0 if window is None else max(0, context_len + 1 - window)  # oldest position that any query sees
    mask = None
    if window is not None and kv_len > window and num_tokens > 1:
        mask = causal_mask(num_tokens, context_len, first, window, dtype, page_ids.device)
    if context_len == 0:
        return Chunk(start, 1, num_tokens, kv_len, mask=mask)
    first_page, end_page = first // page_size, -(-kv_len // page_size)
    used, skipped = pages[first_page:end_page], first - first_page * page_size
    if used[-1] - used[0] == len(used) - 1 and all(a + 1 == b for a, b in zip(used, used[1:])):
        begin = used[0] * page_size + skipped
        return Chunk(start, 1, num_tokens, kv_len - first, slice(begin, begin + kv_len - first), mask=mask)
    return Chunk(start, 1, num_tokens, kv_len - first, page_ids[first_page:end_page], skipped, mask)


def join_chunks(chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """`chunks`, with those put together that follow each other, have nothing cached, are equally long and need no mask."""
    joined: list[Chunk] = []
    for chunk in chunks:
        last = joined[-1] if joined else None
        is_plain = chunk.cached is None and chunk.mask is None
        if is_plain and last is not None and last.cached is None and last.mask is None and last.num_tokens == chunk.num_tokens:
            joined[-1] = Chunk(last.start, last.num_rows + chunk.num_rows, last.num_tokens, last.kv_len)
        else:
            joined.append(chunk)
    return tuple(joined)


def chunk_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunks: Sequence[Chunk],
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the new tokens of `chunks`. Returns `out`, or what takes its place where there is none: a new tensor.

    `qkv` `[tokens, local_q_heads + 2 * local_kv_heads, head_dim]`: rotated; the new keys and values are in the cache as well.
    `keys`, `values` `[num_slots, local_kv_heads, head_dim]` of one layer. `out` `[tokens, local_q_heads, head_dim]`: only the
    tokens of `chunks` are written. Scores are scaled by head_dim ** -0.5. *Numbers*: fp32
    accumulation. *Cost*: one call a chunk, and a copy of the keys and values of a row whose pages are scattered.
    """
    num_kv = keys.shape[1]
    q, k, v = qkv.split((qkv.shape[1] - 2 * num_kv, num_kv, num_kv), dim=1)
    is_whole = out is None and len(chunks) == 1 and chunks[0].end - chunks[0].start == qkv.shape[0]
    if out is None and not is_whole:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in chunks:
        queries = _by_row(q, chunk)
        if chunk.cached is None:
            own_keys, own_values = _by_row(k, chunk), _by_row(v, chunk)
        else:
            own_keys, own_values = _cached(keys, chunk, page_size), _cached(values, chunk, page_size)
        result = _attend(queries, own_keys, own_values, chunk.mask)
        if is_whole:  # FlashAttention lays its result out token by token already: no copy
            return result.transpose(1, 2).reshape(q.shape)
        _by_row(out, chunk).copy_(result)
    return out


def _by_row(heads: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """A view `[rows, heads, num_tokens, head_dim]` of the chunk's tokens."""
    return heads[chunk.start : chunk.end].unflatten(0, (chunk.num_rows, chunk.num_tokens)).transpose(1, 2)


def _cached(cache: torch.Tensor, chunk: Chunk, page_size: int) -> torch.Tensor:
    """`[1, heads, kv_len, head_dim]`"""
    if isinstance(chunk.cached, slice):
        return cache[chunk.cached].transpose(0, 1)[None]
    paged = cache.view(-1, page_size, *cache.shape[1:]).index_select(0, chunk.cached)
    return paged.flatten(0, 1)[chunk.first : chunk.first + chunk.kv_len].transpose(0, 1)[None]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The last query sees all keys, each one before it one key less; unless there is a `mask`."""
    num_tokens, kv_len = q.shape[2], k.shape[2]
    if q.is_cuda and q.dtype in FLASH_DTYPES and q.shape[3] % FLASH_ELEMS == 0 and mask is None:
        # By name: scaled_dot_product_attention may choose cuDNN's, which plans anew at each new length, for milliseconds. Causal
        # means here that the last query meets the last key, as in `torch.nn.attention.bias`.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, num_tokens > 1)[0]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if mask is None and 1 < num_tokens < kv_len:
        mask = causal_mask(num_tokens, kv_len - num_tokens, 0, None, q.dtype, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=num_tokens > 1 and mask is None)
