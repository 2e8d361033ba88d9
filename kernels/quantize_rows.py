"""Activations as e4m3 with one scale a row. `quantize_rows` is the torch twin; `launch_quantize_rows` runs `quantize_rows.cu`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.elements import VECTOR_BYTES
from kernels.launch_kernel import Kernel, load
from kernels.quantize import FP8, FP8_MAX

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 256  # of a CTA, which takes a row
_TINY = torch.finfo(torch.float32).tiny  # keeps the scale of a row of zeros from being 0


class QuantizeRowsParams(ctypes.Structure):
    """Of `quantize_rows.cu`."""

    _fields_ = [("x", ctypes.c_uint64), ("data", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("vectors", ctypes.c_uint32)]


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 `[rows, width]` and fp32 scales `[rows]` whose product is about `x` `[rows, width]`, of a float dtype.

    *Numbers*: a row's scale is its largest magnitude / 448; values are multiplied by its reciprocal in fp32 and rounded to the
    nearest even e4m3. What is not finite comes out as NaN.
    """
    scale = (x.abs().amax(dim=1).float() * (1 / FP8_MAX)).clamp_min_(_TINY)
    return (x.float() * scale.reciprocal()[:, None]).to(FP8), scale


def load_quantize_rows(build: Build) -> Kernel:
    """The kernel for bf16, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": 0}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("quantize_rows", (QuantizeRowsParams,))


def launch_quantize_rows(
    kernel: Kernel, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, is_pdl: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_rows` into `data` e4m3 `[rows, width]` and `scale` fp32 `[rows]`, which are returned.

    `x` bf16 `[rows, width]`, at a 16-byte border, a row a multiple of 16 bytes; all contiguous, on the GPU. *Stream*: torch's
    current one, asynchronous. *Cost*: reads x once from memory and writes half as much. *Raises* `TypeError`, `ValueError` for
    tensors that do not fit.
    """
    rows, width = x.shape
    for name, tensor, dtype, shape in (
        ("x", x, torch.bfloat16, (rows, width)), ("data", data, FP8, (rows, width)), ("scale", scale, torch.float32, (rows,))
    ):  # fmt: skip
        if not tensor.is_cuda or tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} must be contiguous {shape} at a {VECTOR_BYTES}-byte border, not {tuple(tensor.shape)}")
    row_bytes = width * x.element_size()
    if rows < 1 or row_bytes < 1 or row_bytes % VECTOR_BYTES:
        raise ValueError(f"quantize_rows takes rows of a multiple of {VECTOR_BYTES} bytes, at least one, not {(rows, width)}")
    params = QuantizeRowsParams(x.data_ptr(), data.data_ptr(), scale.data_ptr(), row_bytes // VECTOR_BYTES)
    kernel.launch(rows, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
    return data, scale
