"""The residual stream's sum and its RMSNorm in one pass. `add_norm` is the torch twin; `launch_add_norm` runs `add_norm.cu`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.elements import ELEMS, VECTOR_BYTES
from kernels.launch_kernel import Kernel, load
from kernels.rms_norm import rms_norm

SOURCE = Path(__file__).with_suffix(".cu")
WARP, MAX_THREADS, THREAD_VECTORS = 32, 512, 4  # a warp; of a CTA, which takes a row; most vectors a thread
MAX_ROW_BYTES = MAX_THREADS * THREAD_VECTORS * VECTOR_BYTES


class AddNormParams(ctypes.Structure):
    """Of `add_norm.cu`."""

    _fields_ = [
        ("x", ctypes.c_uint64), ("residual", ctypes.c_uint64), ("weight", ctypes.c_uint64), ("out", ctypes.c_uint64),
        ("vectors", ctypes.c_uint32), ("eps", ctypes.c_float),
    ]  # fmt: skip


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x`, in place; returns a new `RMSNorm(residual) * weight`.

    `x`, `residual` `[rows, hidden]`, `weight` `[hidden]`, of one float dtype. *Numbers*: the sum is rounded before the norm.
    """
    residual += x
    return rms_norm(residual, weight, eps)


def takes_add_norm(row_bytes: int) -> bool:
    """Whether the kernel takes rows of so many bytes."""
    return 0 < row_bytes <= MAX_ROW_BYTES and row_bytes % VECTOR_BYTES == 0


def load_add_norm(build: Build, dtype: torch.dtype) -> Kernel:
    """The kernel for one dtype, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": ELEMS[dtype]}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("add_norm", (AddNormParams,))


def launch_add_norm(
    kernel: Kernel,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    is_pdl: bool = True,
) -> torch.Tensor:
    """`add_norm` into `out`, which is returned and may be `x`; `residual` is updated.

    `kernel`: of `load_add_norm` for the dtype. `x`, `residual`, `out` `[rows, hidden]`, `weight` `[hidden]`: contiguous, on the
    GPU, at 16-byte borders; a row is a multiple of 16 bytes, at most 32 KiB. *Stream*: torch's current one, asynchronous.
    *Numbers*: the twin's; the sum of squares is added in another order. *Cost*: reads x and residual once, writes residual and
    out once. *Raises* `TypeError`, `ValueError` for tensors that do not fit.
    """
    shape = tuple(residual.shape)
    if len(shape) != 2 or shape[0] < 1:
        raise ValueError(f"add_norm takes [rows, hidden] of at least one row, not {shape}")
    row_bytes = shape[1] * residual.element_size()
    if not takes_add_norm(row_bytes):
        raise ValueError(f"a row must be a multiple of {VECTOR_BYTES} bytes up to {MAX_ROW_BYTES}, not {row_bytes}")
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight), ("out", out)):
        wanted = shape[1:] if tensor is weight else shape
        if not tensor.is_cuda or tensor.dtype != residual.dtype or tensor.dtype not in ELEMS:
            raise TypeError(f"{name} must be bf16, fp16 or fp32 like residual, on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != wanted or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} must be contiguous {wanted} at a {VECTOR_BYTES}-byte border, not {tuple(tensor.shape)}")
    vectors = row_bytes // VECTOR_BYTES
    threads = min(MAX_THREADS, -(-vectors // (THREAD_VECTORS * WARP)) * WARP)
    params = AddNormParams(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), vectors, eps)
    kernel.launch(shape[0], threads, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
    return out
