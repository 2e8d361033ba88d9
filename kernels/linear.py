"""Matrix product with a weight matrix, torch twin, and the packing that makes it fast for few rows on a CPU.

`F.linear` with 1 to 16 rows of fp32 runs at half the memory bandwidth or less on common CPUs; oneDNN with a
weight in its own blocked layout reaches it. Packing replaces the plain matrix, so it costs no memory; the
packed tensor is opaque (`is_mkldnn`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.quantize import Fp8Weight, unscaled

Matrix = torch.Tensor | Fp8Weight


def can_pack(weight: Matrix) -> bool:
    """Whether `pack_linear` changes anything: an fp32 matrix on a CPU, and a torch built with oneDNN."""
    if isinstance(weight, Fp8Weight):
        return False
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_mkldnn
    return is_plain and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linear(weight: Matrix) -> Matrix:
    """`weight` `[out, in]` in oneDNN's blocked layout where `can_pack`, else `weight` itself. `to_dense()` undoes."""
    if not can_pack(weight):
        return weight
    with torch.inference_mode():
        return torch.ops.mkldnn._reorder_linear_weight(weight)


def linear(x: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`.

    `x` `[num_tokens, in]`, contiguous; `weight` `[out, in]`, plain, from `pack_linear`, or FP8; `bias` `[out]`.
    Returns a new contiguous `[num_tokens, out]`. *Numbers*: the accumulation dtype and order of the library
    that runs it (fp32 or better). With an FP8 matrix the sums are taken of unscaled values, which are exact in bf16 and fp32, and
    rounded; then scaled and rounded; then the bias is added. *Cost*: an FP8 matrix is first written out wide (`unscaled`), which
    pays for many rows; for few it is the reference.
    """
    if isinstance(weight, Fp8Weight):
        y = F.linear(x, unscaled(weight, x.dtype)).mul_(weight.scale)
        return y if bias is None else y.add_(bias)
    if not weight.is_mkldnn:
        return F.linear(x, weight, bias)
    if x.shape[0] == 0:  # oneDNN has no empty products
        return x.new_empty(0, weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
