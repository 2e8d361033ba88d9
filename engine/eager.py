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
    def run(self, batch: StepBatch) -> torch.Tensor:
        """Logits of the tokens in `batch.logit_idx`: fp32 `[num_logits, local_vocab]`, padded vocabulary rows at -inf.

        *Collective*: every rank calls it with the same batch. Keys and values of all tokens are in the cache
        afterwards. Rank order makes the gathered logits whole: rank r's column i is vocabulary id `r *
        local_vocab + i`.
        """
        step = self._plan_step(batch)
        x = self._embed(batch.token_ids)
        for layer_idx, layer in enumerate(self.weights.layers):
            x += self._attention(layer_idx, layer, step, rms_norm(x, layer.input_norm, self.config.rms_norm_eps))
            x += self._mlp(layer, rms_norm(x, layer.mlp_norm, self.config.rms_norm_eps))
        return self._logits(x[batch.logit_idx])

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

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the vocabulary-parallel embedding: each rank looks up what it holds and zeros the rest."""
        if self.comm.size == 1:
            return F.embedding(token_ids, self.weights.embedding)
        return self.comm.all_reduce(embed(token_ids, self.weights.embedding, *self.plan.vocab_range))

    def _attention(self, layer_idx: int, layer: LayerWeights, step: StepPlan, x: torch.Tensor) -> torch.Tensor:
        num_q, num_kv, head_dim = self.plan.local_q_heads, self.plan.local_kv_heads, self.config.head_dim
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(-1, num_q + 2 * num_kv, head_dim)
        qk, v = qkv[:, : num_q + num_kv], qkv[:, num_q + num_kv :]
        if layer.q_norm is not None:
            eps = self.config.rms_norm_eps
            qk = torch.cat((rms_norm(qk[:, :num_q], layer.q_norm, eps), rms_norm(qk[:, num_q:], layer.k_norm, eps)), 1)
        qk = rotate(qk, step.cos, step.signed_sin)
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        kv_write(keys, values, step.slots, qk[:, num_q:], v)
        heads = torch.empty(x.shape[0], num_q, head_dim, dtype=self.dtype, device=self.device)
        paged_attention(qk[:, :num_q], keys, values, step.rows[self.config.windows[layer_idx]], heads)
        return self.comm.all_reduce(linear(heads.flatten(1), layer.o, layer.o_bias))

    def _mlp(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        hidden = silu_mul(linear(x, layer.gate_up, layer.gate_up_bias))
        return self.comm.all_reduce(linear(hidden, layer.down, layer.down_bias))

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        x = rms_norm(x, self.weights.final_norm, self.config.rms_norm_eps)
        logits = linear(x, self.weights.head).float()
        logits[:, self.plan.num_vocab_rows :] = float("-inf")
        return logits
