"""SiLU(gate) * up, torch twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the fused projection.

    `gate_up` `[num_tokens, 2 * n]`, gate in the first half; returns `[num_tokens, n]`. `gate_up` is left unchanged.
    *Numbers*: in half types the SiLU is rounded before the product, as transformers does.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
