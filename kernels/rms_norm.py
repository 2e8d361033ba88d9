"""RMSNorm, torch twin."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x**2) + eps) * weight` over the last dimension.

    `x` `[..., n]`, `weight` `[n]`, both of one float dtype; returns a new tensor like `x`. *Numbers*: fp32
    inside; half types are rounded once before the product with `weight` and once after, as transformers does.
    *Source*: RMSNorm, arXiv 1910.07467.
    """
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)
