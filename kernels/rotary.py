"""Rotary position embedding, torch twin. Halves layout: dimension i is paired with i + head_dim / 2."""

from __future__ import annotations

import torch


def rotary_table(
    positions: torch.Tensor, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of a step's positions, once for all layers.

    `positions` int64 `[num_tokens]`, `inv_freq` fp32 `[head_dim / 2]`, `scale` multiplies both. Returns two
    `[num_tokens, 1, head_dim]` in `dtype`; the first half of the sines is negated, so that a rotation is one
    swap of halves and two products. *Numbers*: angles in fp32, as transformers computes them.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq
    cos, sin = angles.cos() * scale, angles.sin() * scale
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads `x` `[num_tokens, heads, head_dim]` by a `rotary_table` of its dtype. Returns a new tensor."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def rotary_turns(num_positions: int, inv_freq: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The cosines and sines of positions 0 to `num_positions` - 1, for kernels that look them up.

    Returns `[num_positions, head_dim]` in `dtype`: a row is head_dim / 2 cosines, then as many sines, none negated.
    *Numbers*: those of `rotary_table`, to the bit on one device.
    """
    cos, signed_sin = rotary_table(torch.arange(num_positions, device=inv_freq.device), inv_freq, scale, dtype)
    half = inv_freq.numel()
    return torch.cat((cos[:, 0, :half], signed_sin[:, 0, half:]), -1)
