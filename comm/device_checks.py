"""What the collectives on GPUs refuse, in one sentence, before anything is enqueued."""

from __future__ import annotations

import torch

from kernels.elements import ELEMS

UNIT_BYTES = 8
WARP, MAX_THREADS = 32, 512


def check_tensors(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_cuda:
            raise TypeError(f"a collective needs tensors on a GPU, not on {tensor.device}")
        if tensor.dtype not in ELEMS:
            raise TypeError(f"a collective sums bf16, fp16 or fp32, not {tensor.dtype}")
        if tensor.dtype != tensors[0].dtype:
            raise TypeError(f"the tensors of a collective have one dtype, not {tensors[0].dtype} and {tensor.dtype}")
        if not tensor.is_contiguous():
            raise TypeError(f"a collective needs contiguous tensors, not strides {tensor.stride()} of {tuple(tensor.shape)}")


def check_sum(x: torch.Tensor, out: torch.Tensor) -> None:
    check_tensors(x, out)
    if x.numel() != out.numel():
        raise ValueError(f"the sum of {x.numel()} elements does not fit an output of {out.numel()}")


def check_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, normed: torch.Tensor) -> None:
    if x.dim() == 3 and x.dtype == torch.float32:
        check_tensors(x)
        if x.shape[0] == 0 or x.shape[1:] != residual.shape or not is_aligned(16, x):
            raise ValueError(f"the parts of x are [num_parts, *{list(residual.shape)}], aligned to 16 bytes, not {list(x.shape)}")
        x = residual
    check_tensors(x, residual, normed, weight)
    if x.dim() != 2 or not residual.shape == normed.shape == x.shape or weight.shape != x.shape[1:]:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (x, residual, normed, weight))
        raise ValueError(f"the fused norm takes x, residual and normed [rows, hidden] and weight [hidden], not {shapes}")
    if x.shape[1] * x.element_size() % UNIT_BYTES:
        raise ValueError(f"the fused norm needs rows of a multiple of {UNIT_BYTES} bytes, not {x.shape[1]} elements of {x.dtype}")
    if not is_aligned(UNIT_BYTES, x, residual, weight, normed):
        raise ValueError(f"the fused norm needs tensors aligned to {UNIT_BYTES} bytes")


def check_threads(threads: int) -> None:
    """A power of two, so that whole rounds of threads fill a CTA's buffer."""
    if not WARP <= threads <= MAX_THREADS or threads & threads - 1:
        raise ValueError(f"a CTA has {WARP} to {MAX_THREADS} threads, a power of two, not {threads}")


def is_aligned(num_bytes: int, *tensors: torch.Tensor) -> bool:
    return all(tensor.data_ptr() % num_bytes == 0 for tensor in tensors)
