"""Causal grouped-query attention of many new tokens, for GPUs: what a step that prefills attends with.

A *chunk* is a run of new tokens of one row, behind what the row has in the cache. Rows that have nothing there are *packed* one
behind the other, of whatever lengths. A chunk is one call of torch's FlashAttention, which reads grouped heads as they are;
so are packed rows together. A long prompt by itself may be one of cuDNN's instead (`kernels/long_attention.py`), as its chunk
says. What has nothing cached reads the new keys and values where they lie in the fused projection; others read the cache, which
holds the new ones already. `kernels/paged_attention.py` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.long_attention import attend_long
from kernels.paged_attention import causal_mask

FLASH_DTYPES, FLASH_ELEMS = (torch.bfloat16, torch.float16), 8  # what FlashAttention takes; a head is a multiple of so many


@dataclass(frozen=True)
class Chunk:
    """`num_tokens` new tokens of a row, from the flat index `start` on.

    `cached`: where keys and values lie, new ones included, None for nowhere but in the projection: a slice of slots, or int64
    pages on the device, of whose slots `first` are skipped. `kv_len`: how many keys count. `mask`: additive
    `[num_tokens, kv_len]` where a sliding window needs one, else None. `is_long`: cuDNN attends it; nothing is cached then, there
    is no mask, and its heads are some for which `takes_long`.
    """

    start: int
    num_tokens: int
    kv_len: int
    cached: slice | torch.Tensor | None = None
    first: int = 0
    mask: torch.Tensor | None = None
    is_long: bool = False

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class PackedRows:
    """Rows of which nothing is cached, in the flat tokens `start` to `end`: row i has those from `start + starts[i]` to
    `start + starts[i + 1]`.

    `starts`: int32 `[num_rows + 1]` on the device, from 0 to `end - start`. `longest`: no row has more tokens. `lengths`: of the
    rows; None where only the device knows them, as in a captured step. `window`: how many last tokens a query sees, itself
    included; None for all.
    """

    start: int
    end: int
    starts: torch.Tensor
    longest: int
    lengths: tuple[int, ...] | None = None
    window: int | None = None


def plan_chunk(
    start: int,
    num_tokens: int,
    context_len: int,
    pages: Sequence[int],
    page_ids: torch.Tensor,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    is_long: bool = False,
) -> Chunk:
    """The chunk of one row whose first `context_len` tokens are cached, for layers with this `window` (None: all is seen).

    `pages`: the row's pages in order, `page_ids` the same as int64 on the device. `dtype`: of a mask. `is_long`: cuDNN is to
    attend it, if nothing is cached and no mask is needed. Waits for nothing.
    """
    kv_len = context_len + num_tokens
    first = 0 if window is None else max(0, context_len + 1 - window)  # oldest position that any query sees
    mask = None
    if window is not None and kv_len > window and num_tokens > 1:
        mask = causal_mask(num_tokens, context_len, first, window, dtype, page_ids.device)
    if context_len == 0:
        return Chunk(start, num_tokens, kv_len, mask=mask, is_long=is_long and mask is None)
    first_page, end_page = first // page_size, -(-kv_len // page_size)
    used, skipped = pages[first_page:end_page], first - first_page * page_size
    if used[-1] - used[0] == len(used) - 1 and all(a + 1 == b for a, b in zip(used, used[1:])):
        begin = used[0] * page_size + skipped
        return Chunk(start, num_tokens, kv_len - first, slice(begin, begin + kv_len - first), mask=mask)
    return Chunk(start, num_tokens, kv_len - first, page_ids[first_page:end_page], skipped, mask)


def chunk_attention(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    chunks: Sequence[Chunk | PackedRows],
    page_size: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend the new tokens of `chunks`. Returns `out`, or what takes its place where there is none: a new tensor.

    `qkv` `[tokens, local_q_heads + 2 * local_kv_heads, head_dim]`: rotated; the new keys and values are in the cache as well.
    `keys`, `values` `[num_slots, local_kv_heads, head_dim]` of one layer. `out` `[tokens, local_q_heads, head_dim]`: only the
    tokens of `chunks` are written. Scores are scaled by head_dim ** -0.5. *Numbers*: fp32 accumulation. *Order*: of a chunk that
    is long, that of `attend_long`. *Cost*: one call a chunk, and a copy of the keys and values of a row whose pages are
    scattered; fp32, and heads that FlashAttention does not take, one call a packed row, or a square of all packed tokens where
    only the device knows them.
    """
    num_kv = keys.shape[1]
    q, k, v = qkv.split((qkv.shape[1] - 2 * num_kv, num_kv, num_kv), dim=1)
    is_whole = out is None and len(chunks) == 1 and chunks[0].end - chunks[0].start == qkv.shape[0]
    if out is None and not is_whole:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for chunk in chunks:
        own = slice(chunk.start, chunk.end)
        if isinstance(chunk, PackedRows):
            result = _attend_packed(q[own], k[own], v[own], chunk)
        elif chunk.is_long:
            result = attend_long(qkv[own], num_kv)
        elif chunk.cached is None:
            result = _attend(q[own], k[own], v[own], chunk.mask)
        else:
            result = _attend(q[own], _cached(keys, chunk, page_size), _cached(values, chunk, page_size), chunk.mask)
        if is_whole:
            return result
        out[own].copy_(result)
    return out


def _cached(cache: torch.Tensor, chunk: Chunk, page_size: int) -> torch.Tensor:
    """`[kv_len, heads, head_dim]`"""
    if isinstance(chunk.cached, slice):
        return cache[chunk.cached]
    paged = cache.view(-1, page_size, *cache.shape[1:]).index_select(0, chunk.cached)
    return paged.flatten(0, 1)[chunk.first : chunk.first + chunk.kv_len]


def takes_flash(x: torch.Tensor) -> bool:
    """Whether FlashAttention takes heads like those of `x` `[..., head_dim]`."""
    return x.is_cuda and x.dtype in FLASH_DTYPES and x.shape[-1] % FLASH_ELEMS == 0


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """`q`, `k`, `v` and the result: `[tokens, heads, head_dim]`. The last query sees all keys, each one before it one key less,
    unless there is a `mask`."""
    num_tokens, kv_len = q.shape[0], k.shape[0]
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    if takes_flash(q) and mask is None:
        # By name: scaled_dot_product_attention may choose cuDNN's, which plans anew at each new length, for milliseconds. Causal
        # means here that the last query meets the last key, as in `torch.nn.attention.bias`; by cuDNN that the first meets the
        # first, so that a chunk behind cached tokens is never for it. The result lies token by token.
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, num_tokens > 1)[0][0].transpose(0, 1)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if mask is None and 1 < num_tokens < kv_len:
        mask = causal_mask(num_tokens, kv_len - num_tokens, 0, None, q.dtype, q.device)
    is_causal = num_tokens > 1 and mask is None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)[0].transpose(0, 1)


def _attend_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: PackedRows) -> torch.Tensor:
    """As `_attend`, each row for itself."""
    if takes_flash(q):
        left = None if rows.window is None else rows.window - 1
        # At least 2: of rows of one query each it makes another layout, for which all must be there.
        longest = max(2, rows.longest)
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, rows.starts, rows.starts, longest, longest, 0.0, True, False, window_size_left=left)[0]
    if rows.lengths is None:
        return _attend(q, k, v, packed_mask(rows, q.dtype))
    results, at = [], 0
    for length in rows.lengths:
        mask = None
        if rows.window is not None and rows.window < length:
            mask = causal_mask(length, 0, 0, rows.window, q.dtype, q.device)
        results.append(_attend(*(part[at : at + length] for part in (q, k, v)), mask))
        at += length
    return torch.cat(results)


def packed_mask(rows: PackedRows, dtype: torch.dtype) -> torch.Tensor:
    """Additive `[tokens, tokens]`: what each token of `rows` sees. Asks the host nothing."""
    at = torch.arange(rows.end - rows.start, dtype=torch.int32, device=rows.starts.device)
    row = torch.searchsorted(rows.starts[1:].contiguous(), at, right=True)
    is_hidden = (at > at[:, None]) | (row != row[:, None])
    if rows.window is not None:
        is_hidden |= at <= at[:, None] - rows.window
    return torch.zeros(is_hidden.shape, dtype=dtype, device=at.device).masked_fill_(is_hidden, float("-inf"))
