"""A step of many tokens, from their ids to the logits that are asked for. The same on every device; the operators differ."""

from __future__ import annotations

from typing import Any

import torch

from engine.graph.chunk_tokens import ChunkTokens
from engine.graph.operators import Operators
from engine.profile.marks import NO_MARKS, Marks


def prefill_step(operators: Operators, tokens: ChunkTokens, marks: Marks = NO_MARKS) -> torch.Tensor:
    """Logits of the tokens in `tokens.logit_idx`: fp32 `[num_logits, local_vocab]`. *Collective*, asynchronous, capturable.

    The keys and values of all tokens are in the cache afterwards. What comes behind the last layer's attention is computed for
    the tokens whose logits are asked for, and for no others. `marks`: told of the stages.
    """
    weights = operators.weights
    norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]

    def product_norm(stage: str, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, norm: torch.Tensor) -> torch.Tensor:
        product = operators.summand(x, weight, bias)
        marks.end(stage, layer_idx)
        normed = operators.reduce_norm(product, residual, norm)
        marks.end("all_reduce", layer_idx)
        return normed

    embedded, residual = operators.embed(tokens.token_ids)
    marks.end("rest")
    x = operators.reduce_norm(embedded, residual, weights.layers[0].input_norm)
    marks.end("all_reduce")
    for layer_idx, layer in enumerate(weights.layers):
        qkv = operators.linear(x, layer.qkv, layer.qkv_bias)
        marks.end("qkv", layer_idx)
        heads = operators.attend(tokens, layer_idx, qkv)
        marks.end("attention", layer_idx)
        if layer is weights.layers[-1]:
            if tokens.logit_idx.numel() == 0:
                return torch.empty(0, operators.plan.local_vocab, dtype=torch.float32, device=x.device)
            heads, residual = heads.index_select(0, tokens.logit_idx), operators.residual_rows(residual, tokens.logit_idx)
        x = product_norm("o_proj", heads, layer.o, layer.o_bias, layer.mlp_norm)
        x = product_norm("mlp", operators.gate_up(x, layer), layer.down, layer.down_bias, norms[layer_idx])
    logits = operators.whole(operators.linear(x, weights.head)).float()
    marks.end("head")
    return logits
