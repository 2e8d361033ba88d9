"""One decode step: a token a row, from its id to the next one's. The same on every device; the operators differ."""

from __future__ import annotations

import torch

from engine.graph.operators import Operators
from engine.graph.row_state import DeviceRows
from engine.profile.marks import NO_MARKS, Marks


def decode_step(operators: Operators, rows: DeviceRows, marks: Marks = NO_MARKS) -> None:
    """Compute the tokens of `rows`, choose the next ones, and advance `rows` to them. *Collective*, asynchronous, capturable.

    `marks`: is told of the end of each stage.
    """
    logits = operators.linear(compute_rows(operators, rows, marks), operators.weights.head)
    marks.end("head")
    ids, values = operators.choose(rows, logits)
    marks.end("sampling")
    operators.advance(rows, ids, values)
    marks.end("rest")


def compute_rows(operators: Operators, rows: DeviceRows, marks: Marks = NO_MARKS) -> torch.Tensor:
    """What the head multiplies, `[rows, hidden]`: all layers of the tokens of `rows`, whose keys and values the cache takes in.
    *Collective*, asynchronous, capturable."""
    weights = operators.weights
    norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
    shared = operators.prepare(rows)
    embedded, residual = operators.embed(rows.token_ids)
    marks.end("rest")
    x = operators.reduce_norm(embedded, residual, weights.layers[0].input_norm)
    marks.end("all_reduce")
    for layer_idx, layer in enumerate(weights.layers):
        qkv = operators.linear(x, layer.qkv, layer.qkv_bias)
        marks.end("qkv", layer_idx)
        heads = operators.attention(shared, layer_idx, qkv)
        marks.end("attention", layer_idx)
        projected = operators.summand(heads, layer.o, layer.o_bias)
        marks.end("o_proj", layer_idx)
        x = operators.reduce_norm(projected, residual, layer.mlp_norm)
        marks.end("all_reduce", layer_idx)
        down = operators.summand(operators.gate_up(x, layer), layer.down, layer.down_bias)
        marks.end("mlp", layer_idx)
        x = operators.reduce_norm(down, residual, norms[layer_idx])
        marks.end("all_reduce", layer_idx)
    return x
