"""One decode step: a token a row, from its id to the next one's. The same on every device; the operators differ."""

from __future__ import annotations

from engine.graph.operators import Operators
from engine.graph.row_state import DeviceRows


def decode_step(operators: Operators, rows: DeviceRows) -> None:
    """Compute the tokens of `rows`, choose the next ones, and advance `rows` to them. *Collective*, asynchronous, capturable."""
    weights = operators.weights
    norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.final_norm]
    shared = operators.prepare(rows)
    embedded, residual = operators.embed(rows.token_ids)
    x = operators.reduce_norm(embedded, residual, weights.layers[0].input_norm)
    for layer_idx, layer in enumerate(weights.layers):
        heads = operators.attention(shared, layer_idx, operators.linear(x, layer.qkv, layer.qkv_bias))
        x = operators.reduce_norm(operators.linear(heads, layer.o, layer.o_bias), residual, layer.mlp_norm)
        hidden = operators.gate_up(x, layer)
        x = operators.reduce_norm(operators.linear(hidden, layer.down, layer.down_bias), residual, norms[layer_idx])
    ids, values = operators.choose(rows, operators.linear(x, weights.head))
    operators.advance(rows, ids, values)
