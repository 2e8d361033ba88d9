"""The eager step: the model as plain torch operations, on any device.

The reference that the other step backends are held to, and the user's first debugging aid. One rank's half of a
tensor-parallel forward pass: two all-reduces a layer and one after the embedding, and no other communication.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from comm.communicator import Communicator
from engine.config import ModelConfig
from engine.kv_cache import KvCache
from engine.profile.marks import NO_MARKS, Marks
from engine.rope import inverse_frequencies
from engine.shard_plan import ShardPlan
from engine.step_batch import StepBatch
from engine.weights import LayerWeights, ModelWeights
from kernels.embed import embed
from kernels.kv_write import kv_write
from kernels.linear import linear
from kernels.paged_attention import GroupPlan, RowPlan, group_rows, paged_attention, plan_row
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotate
from kernels.silu_mul import silu_mul


@dataclass(frozen=True)
class StepPlan:
    """What all layers of a step share: rotary tables, KV slots, and the row plans of each window size."""

    cos: torch.Tensor
    signed_sin: torch.Tensor
    slots: torch.Tensor
    rows: dict[int | None, tuple[RowPlan | GroupPlan, ...]]


class EagerStep:
    """Runs steps of one model on one rank. Holds no state between steps but the KV cache it is given.

    Takes the weights over: on a CPU it packs their matrices in place.
    """

    description = "plain torch operations"

    def __init__(self, config: ModelConfig, plan: ShardPlan, weights: ModelWeights, comm: Communicator, kv: KvCache):
        self.config, self.plan, self.weights, self.comm, self.kv = config, plan, weights, comm, kv
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        weights.pack()
        self._inv_freq = inverse_frequencies(config.rope, config.head_dim).to(self.device)

    @torch.inference_mode()
    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        """Logits of the tokens in `batch.logit_idx`: fp32 `[num_logits, local_vocab]`, padded vocabulary rows at -inf.

        *Collective*: every rank calls it with the same batch. Keys and values of all tokens are in the cache
        afterwards. Rank order makes the gathered logits whole: rank r's column i is vocabulary id `r *
        local_vocab + i`. `marks`: is told of the end of each stage.
        """
        eps = self.config.rms_norm_eps
        step = self._plan_step(batch)
        marks.end("rest")
        x = self._embed(batch.token_ids, marks)
        for layer_idx, layer in enumerate(self.weights.layers):
            normed = rms_norm(x, layer.input_norm, eps)
            marks.end("rest", layer_idx)
            x += self._attention(layer_idx, layer, step, normed, marks)
            normed = rms_norm(x, layer.mlp_norm, eps)
            marks.end("rest", layer_idx)
            x += self._mlp(layer_idx, layer, normed, marks)
        return self._logits(x[batch.logit_idx], marks)

    def _plan_step(self, batch: StepBatch) -> StepPlan:
        cos, signed_sin = rotary_table(batch.positions, self._inv_freq, self.config.rope.attention_factor, self.dtype)
        rows = {window: self._plan_rows(batch, window) for window in set(self.config.windows)}
        return StepPlan(cos, signed_sin, batch.slots, rows)

    def _plan_rows(self, batch: StepBatch, window: int | None) -> tuple[RowPlan | GroupPlan, ...]:
        size, dtype, device = self.kv.page_size, self.dtype, self.device
        rows = tuple(
            plan_row(row.start, row.num_tokens, row.context_len, row.pages, size, window, dtype, device)
            for row in batch.rows
        )
        return group_rows(rows, dtype, device) if device.type == "cpu" else rows

    def _embed(self, token_ids: torch.Tensor, marks: Marks) -> torch.Tensor:
        """Rows of the vocabulary-parallel embedding: each rank looks up what it holds and zeros the rest."""
        if self.comm.size == 1:
            x = F.embedding(token_ids, self.weights.embedding)
            marks.end("rest")
            return x
        x = embed(token_ids, self.weights.embedding, *self.plan.vocab_range)
        marks.end("rest")
        return self._all_reduce(x, None, marks)

    def _attention(self, layer_idx: int, layer: LayerWeights, step: StepPlan, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        num_q, num_kv, head_dim = self.plan.local_q_heads, self.plan.local_kv_heads, self.config.head_dim
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(-1, num_q + 2 * num_kv, head_dim)
        marks.end("qkv", layer_idx)
        qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
        if layer.q_norm is not None:
            eps = self.config.rms_norm_eps
            qk = torch.cat((rms_norm(qk[:, :num_q], layer.q_norm, eps), rms_norm(qk[:, num_q:], layer.k_norm, eps)), 1)
        qk = rotate(qk, step.cos, step.signed_sin)
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        kv_write(keys, values, step.slots, qk[:, num_q:], v)
        heads = torch.empty(x.shape[0], num_q, head_dim, dtype=self.dtype, device=self.device)
        paged_attention(qk[:, :num_q], keys, values, step.rows[self.config.windows[layer_idx]], heads)
        marks.end("attention", layer_idx)
        projected = linear(heads.flatten(1), layer.o, layer.o_bias)
        marks.end("o_proj", layer_idx)
        return self._all_reduce(projected, layer_idx, marks)

    def _mlp(self, layer_idx: int, layer: LayerWeights, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        hidden = silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
        down = linear(hidden, layer.down, layer.down_bias)
        marks.end("mlp", layer_idx)
        return self._all_reduce(down, layer_idx, marks)

    def _all_reduce(self, x: torch.Tensor, layer_idx: int | None, marks: Marks) -> torch.Tensor:
        x = self.comm.all_reduce(x)
        marks.end("all_reduce", layer_idx)
        return x

    def _logits(self, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        x = rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
        marks.end("rest")
        logits = linear(x, self.weights.head).float()
        logits[:, self.plan.num_vocab_rows :] = float("-inf")
        marks.end("head")
        return logits
