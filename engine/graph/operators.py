"""What steps are made of, as seen by `engine.graph.decode_step` and `prefill_step`, and the plain torch version of it.

Every operator but `attend` takes shapes that are fixed and values that are on the device, so that a step can be captured and
replayed: no branch, size or address may depend on a position or a token. `attend` may look at the shapes of its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from comm.communicator import Communicator
from comm.vocabulary import Best, best_of_ranks, local_best
from engine.config import ModelConfig
from engine.graph.chunk_tokens import ChunkTokens
from engine.graph.row_state import DeviceRows
from engine.kv_cache import KvCache
from engine.rope import inverse_frequencies
from engine.shard_plan import ShardPlan
from engine.weights import LayerWeights, ModelWeights
from kernels.accept_drafts import accept_drafts
from kernels.add_norm import add_norm
from kernels.advance_rows import advance_rows
from kernels.chunk_attention import chunk_attention
from kernels.embed import embed
from kernels.filter_logits import filter_logits
from kernels.kv_write import kv_write
from kernels.linear import linear
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotate
from kernels.rotary_write import rotary_write
from kernels.silu_mul import silu_mul


class Operators(Protocol):
    """The operators of one rank. A *product* is what `linear` returns: a tensor `[rows, out]`, or parts of it whose sum that is;
    only the operators themselves look inside. `description`: what they are, for the start summary. `most_single`: rows of
    one token that `attend` takes as such."""

    config: ModelConfig
    plan: ShardPlan
    weights: ModelWeights
    comm: Communicator
    kv: KvCache
    description: str
    most_single: int

    def prepare(self, rows: DeviceRows) -> Any:
        """What all layers of a step share. Tokens of one row (`rows.is_chained`) follow each other and see those before them."""

    def embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[rows, hidden]` of `token_ids` int64 `[rows]`: this rank's rows of the embedding, zeros for tokens of other ranks; and
        a residual of zeros."""

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> Any:
        """Product of `x` `[rows, in]` with `weight` `[out, in]`."""

    def gate_up(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        """`silu(gate) * up` of a layer's MLP: `[rows, local_mlp]`."""

    def attention(self, shared: Any, layer_idx: int, qkv: Any) -> torch.Tensor:
        """Attention of each row's token over its cache, which takes the token in: `[rows, local_q_heads * head_dim]`.

        `qkv`: product `[rows, (local_q_heads + 2 * local_kv_heads) * head_dim]`. A padding row writes nothing of its own.
        """

    def attend(self, tokens: ChunkTokens, layer_idx: int, qkv: Any) -> torch.Tensor:
        """Attention of a step of many tokens, which the cache takes in: `[tokens, local_q_heads * head_dim]`. `qkv`: as for
        `attention`, and may be overwritten. A padding token writes nothing."""

    def whole(self, product: Any) -> torch.Tensor:
        """A product as one tensor; fp32 where it comes in parts."""

    def reduce_norm(self, x: Any, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """`residual += sum of x over the ranks`, in place; returns `RMSNorm(residual) * weight`, good until the next call.
        *Collective*."""

    def summand(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> Any:
        """A `linear` of which `reduce_norm` is to take the sum, before any other of these is made."""

    def residual_rows(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """`rows` (int64 `[n]`) of `residual`, after `reduce_norm`, which may leave others out of date. *Collective*."""

    def choose(self, rows: DeviceRows, logits: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's next token, int64 `[rows]`, and its logit, fp32 `[rows]`, the same on all ranks. *Collective*.

        `logits`: product `[rows, local_vocab]` of the head. With `rows.filters`, the whole rows come together on every rank, are
        filtered there alike, and what is returned is the logit less the row's highest.
        """

    def advance(self, rows: DeviceRows, ids: torch.Tensor, values: torch.Tensor) -> None:
        """Make `ids` the rows' next tokens, one position on, and leave them in the ring."""

    def accept(
        self, rows: DeviceRows, history: torch.Tensor, drafts: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Advance each row over those of its `drafts` that hold and one token more, and leave all of them in the ring: as
        `kernels.accept_drafts`."""


@dataclass(frozen=True)
class TorchShared:
    """Rotary tables, the slot each row writes to, which rows are padding (`[rows]`), and the mask of each window size, True
    where a row sees a position, `[rows, max_context]`."""

    cos: torch.Tensor
    signed_sin: torch.Tensor
    slots: torch.Tensor
    is_padding: torch.Tensor
    page_table: torch.Tensor
    masks: dict[int | None, torch.Tensor]


class TorchOperators:
    """The twin, for any device. Reads the whole page table at every step, so its time grows with the longest context allowed.

    `num_ids`: ids from here on are never chosen.
    """

    description = "torch operators"
    most_single = 0

    def __init__(
        self, config: ModelConfig, plan: ShardPlan, weights: ModelWeights, comm: Communicator, kv: KvCache, num_ids: int
    ):
        self.config, self.plan, self.weights, self.comm, self.kv = config, plan, weights, comm, kv
        self.num_ids, self.first_id = num_ids, plan.vocab_range[0]
        self.num_valid = max(0, min(num_ids, plan.vocab_range[1]) - self.first_id)
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(kv.keys.device)

    def prepare(self, rows: DeviceRows) -> TorchShared:
        positions, size = rows.positions.clamp(min=0), self.kv.page_size
        dtype, scale = self.kv.keys.dtype, self.config.rope.attention_factor
        cos, signed_sin = rotary_table(positions, self._inv_freq, scale, dtype)
        pages = rows.page_table.gather(1, (positions // size)[:, None])[:, 0]
        is_padding = rows.positions < 0
        # A padding row repeats the first row's write, since two writers of one slot must agree.
        slots = pages * size + positions % size
        slots = torch.where(is_padding, slots[:1], slots)
        seen = torch.arange(rows.page_table.shape[1] * size, device=positions.device)
        masks = {window: _mask(positions[:, None], seen, window) for window in set(self.config.windows)}
        return TorchShared(cos, signed_sin, slots, is_padding, rows.page_table.long(), masks)

    def embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = embed(token_ids, self.weights.embedding, *self.plan.vocab_range)
        return x, torch.zeros_like(x)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, weight, bias)

    def gate_up(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        return silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))

    def attention(self, shared: TorchShared, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        num_q, num_kv, head_dim = self.plan.local_q_heads, self.plan.local_kv_heads, self.config.head_dim
        layer, eps = self.weights.layers[layer_idx], self.config.rms_norm_eps
        heads = qkv.view(-1, num_q + 2 * num_kv, head_dim)
        q, k, v = heads.split((num_q, num_kv, num_kv), dim=1)
        if layer.q_norm is not None:
            q, k = rms_norm(q, layer.q_norm, eps), rms_norm(k, layer.k_norm, eps)
        q, k = rotate(q, shared.cos, shared.signed_sin), rotate(k, shared.cos, shared.signed_sin)
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        k, v = (self._without_padding(new, cache, shared) for new, cache in ((k, keys), (v, values)))
        kv_write(keys, values, shared.slots, k, v)
        return self._attend_queries(q, keys, values, shared.page_table, shared.masks[self.config.windows[layer_idx]]).flatten(1)

    def _attend_queries(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, page_table: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Rows of one query each, `[rows, local_q_heads, head_dim]`, as is the result."""
        k, v = self._read(keys, page_table, mask), self._read(values, page_table, mask)
        # The heads of a group stand in for query positions, so keys are never repeated.
        grouped = q.reshape(q.shape[0], keys.shape[1], -1, q.shape[2])
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None]).reshape(q.shape)

    def _without_padding(self, new: torch.Tensor, cache: torch.Tensor, shared: TorchShared) -> torch.Tensor:
        """`new` with what padding rows write: as the first row does, or what is there already if that is padding too."""
        is_padding = shared.is_padding[:, None, None]
        first = torch.where(is_padding[:1], cache.index_select(0, shared.slots[:1]), new[:1])
        return torch.where(is_padding, first, new)

    def _read(self, cache: torch.Tensor, page_table: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`[rows, local_kv_heads, max_context, head_dim]`. Slots that are not seen may never have been written: zeros for them,
        because a weight of 0 does not silence a NaN."""
        paged = cache.view(-1, self.kv.page_size, *cache.shape[1:])[page_table]
        return paged.flatten(1, 2).masked_fill(~mask[..., None, None], 0.0).transpose(1, 2)

    def attend(self, tokens: ChunkTokens, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        heads = self._heads_of(qkv)
        self._norm_heads(heads, layer_idx)
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        rotary_write(heads, tokens.turns, tokens.slots, keys, values)
        window, num_single = self.config.windows[layer_idx], tokens.num_single
        out = chunk_attention(heads, keys, values, tokens.chunks[window], self.kv.page_size)
        if num_single:
            page_table = tokens.page_table.long()
            seen = torch.arange(page_table.shape[1] * self.kv.page_size, device=page_table.device)
            mask = _mask(tokens.positions[:num_single, None].clamp(min=0), seen, window)
            q = heads[:num_single, : self.plan.local_q_heads]
            out[:num_single] = self._attend_queries(q, keys, values, page_table, mask)
        return out.flatten(1)

    def _heads_of(self, qkv: torch.Tensor) -> torch.Tensor:
        """`[tokens, local_q_heads + 2 * local_kv_heads, head_dim]`"""
        return qkv.view(qkv.shape[0], self.plan.local_q_heads + 2 * self.plan.local_kv_heads, self.config.head_dim)

    def _norm_heads(self, heads: torch.Tensor, layer_idx: int) -> None:
        """The q and k norms of families that have them, in place."""
        layer, num_q, eps = self.weights.layers[layer_idx], self.plan.local_q_heads, self.config.rms_norm_eps
        if layer.q_norm is not None:
            keys = slice(num_q, num_q + self.plan.local_kv_heads)
            heads[:, :num_q] = rms_norm(heads[:, :num_q], layer.q_norm, eps)
            heads[:, keys] = rms_norm(heads[:, keys], layer.k_norm, eps)

    def whole(self, product: torch.Tensor) -> torch.Tensor:
        return product

    def reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return add_norm(self.comm.all_reduce(x), residual, weight, self.config.rms_norm_eps)

    def summand(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(x, weight, bias)

    def residual_rows(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return residual.index_select(0, rows)

    def choose(self, rows: DeviceRows, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.filters is not None:
            logits = self._filter(rows, logits)
        best = local_best(logits, self.first_id, self.num_valid, rows.draw)
        if self.comm.size > 1:
            best = best_of_ranks(_exchange(best, self.comm))
        return best.ids, best.values

    def _filter(self, rows: DeviceRows, logits: torch.Tensor) -> torch.Tensor:
        """This rank's part of the filtered rows. The sum in which each rank has columns of its own is a gather."""
        full = torch.zeros(len(rows), self.comm.size, logits.shape[1], device=logits.device)
        full[:, self.comm.rank] = logits
        if self.comm.size > 1:
            self.comm.all_reduce(full)
        filter_logits(full.flatten(1), self.num_ids, rows.token_ids, rows.positions, rows.draw.temperatures, rows.filters)
        return full[:, self.comm.rank]

    def advance(self, rows: DeviceRows, ids: torch.Tensor, values: torch.Tensor) -> None:
        advance_rows(ids, values, rows.token_ids, rows.positions, rows.step, rows.ring.device_words)

    def accept(
        self, rows: DeviceRows, history: torch.Tensor, drafts: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> None:
        accept_drafts(
            ids, values, drafts, rows.token_ids, rows.positions, history, rows.step, rows.ring.device_words
        )


def _mask(positions: torch.Tensor, seen: torch.Tensor, window: int | None) -> torch.Tensor:
    is_seen = seen <= positions
    return is_seen if window is None else is_seen & (seen > positions - window)


def _exchange(best: Best, comm: Communicator) -> list[Best]:
    """Every rank's candidates on every rank, by a sum in which each has a column of its own and zeros elsewhere.

    All communicators sum fp32, so an fp64 score travels in three parts that add up to it exactly. An id is exact up to 2**24.
    """
    high = best.scores.float()
    rest = torch.where(high.isfinite(), best.scores - high, 0.0)
    middle = rest.float()
    parts = torch.stack((high, middle, (rest - middle).float(), best.ids.float(), best.values), 1)
    columns = torch.zeros(comm.size, *parts.shape, device=parts.device)
    columns[comm.rank] = parts
    return [
        Best(part[:, 0].double() + part[:, 1] + part[:, 2], part[:, 3].long(), part[:, 4]) for part in comm.all_reduce(columns)
    ]
