"""Products of many rows with an FP8 matrix on the FP8 tensor cores: activations are quantised row by row as they come.

The other way (`kernels/linear.py`) writes the matrix out in bf16 and leaves the activations as they are: exact values at half the
rate, and a pass over the matrix beside. Which to take is a choice between rate and accuracy; `engine/bench/prefill_products.py`
measures both. `scaled_linear` is the torch twin.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.build import Build
from kernels.launch_kernel import Kernel
from kernels.quantize import FP8, Fp8Weight
from kernels.quantize_rows import launch_quantize_rows, load_quantize_rows, quantize_rows

WAYS = ("scaled", "widened")
MIN_ROWS = 17  # fewer have products of their own (`kernels/gemv.py`); where widening is faster is to be measured
ALIGNMENT = 16  # of both dimensions of the matrix, as cuBLAS and CUTLASS want it for FP8


def scaled_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias` with `x` as `quantize_rows` leaves it; any device.

    `x` `[rows, in]`; `bias` `[out]`. Returns a new `[rows, out]` of x's dtype. *Numbers*: fp32 sums, times both scales, plus the
    bias, rounded once.
    """
    data, scale = quantize_rows(x)
    y = F.linear(data.float(), weight.data.float()).mul_(scale[:, None]).mul_(weight.scale)
    return (y if bias is None else y.add_(bias)).to(x.dtype)


class ScaledLinear:
    """`scaled_linear` on the current GPU: a kernel that quantises, and torch's `_scaled_mm`. Asynchronous, capturable.

    `is_fast`: sums of FP8 products stay in the tensor cores, with fewer bits than fp32, instead of being added up outside of them
    every few products.
    """

    def __init__(self, kernel: Kernel, is_fast: bool = True):
        self._kernel, self._is_fast = kernel, is_fast

    def takes(self, x: torch.Tensor, weight: object) -> bool:
        """Whether a product is one for this way: bf16 rows, many of them, and an FP8 matrix that is aligned."""
        if not isinstance(weight, Fp8Weight) or x.dtype != torch.bfloat16 or x.shape[0] < MIN_ROWS:
            return False
        return not (weight.shape[0] % ALIGNMENT or weight.shape[1] % ALIGNMENT)

    def linear(
        self, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `scaled_linear`. `x` bf16, contiguous. `out`: where the result goes, None for a new tensor. *Numbers*: the twin's
        but for the order of the sums, and for `is_fast`."""
        data = torch.empty(x.shape, dtype=FP8, device=x.device)
        scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        launch_quantize_rows(self._kernel, x, data, scale)
        return torch._scaled_mm(
            data,
            weight.data.t(),
            scale_a=scale[:, None],
            scale_b=weight.scale[None],
            bias=bias,
            out_dtype=x.dtype,
            use_fast_accum=self._is_fast,
            **({} if out is None else {"out": out}),
        )


def open_scaled_linear(build: Build, is_fast: bool = True) -> ScaledLinear:
    """*Raises* `DoorbellError` when the kernel cannot be compiled."""
    return ScaledLinear(load_quantize_rows(build), is_fast)
