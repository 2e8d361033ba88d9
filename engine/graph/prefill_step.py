"""A step of many tokens, from their ids to the logits that are asked for. The same on every device; the operators differ."""

from __future__ import annotations

import torch

from engine.graph.chunk_tokens import ChunkTokens
from engine.graph.operators import Operators


def prefill_step(operators: Operators, tokens: ChunkTokens) -> torch.Tensor:
    """Logits of the tokens in `tokens.logit_idx`: fp32 `[num_logits, local_vocab]`. *Collective*, asynchronous, capturable.

    The keys and values of all tokens are in the cache afterwards. What comes behind the last layer's attention is computed for
    the tokens whose logits are asked for, and for no others.
    """
    weights = operators.weights
    norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
    embedded, residual = operators.embed(tokens.token_ids)
    x = operators.reduce_norm(embedded, residual, weights.layers[0].input_norm)
    for layer_idx, layer in enumerate(weights.layers):
        heads = operators.attend(tokens, layer_idx, operators.linear(x, layer.qkv, layer.qkv_bias))
        if layer is weights.layers[-1]:
            if tokens.logit_idx.numel() == 0:
                return torch.empty(0, operators.plan.local_vocab, dtype=torch.float32, device=x.device)
            heads, residual = heads.index_select(0, tokens.logit_idx), residual.index_select(0, tokens.logit_idx)
        x = operators.product_norm(heads, layer.o, layer.o_bias, residual, layer.mlp_norm)
        hidden = operators.gate_up(x, layer)
        x = operators.product_norm(hidden, layer.down, layer.down_bias, residual, norms[layer_idx])
    return operators.whole(operators.linear(x, weights.head)).float()
