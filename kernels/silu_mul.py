"""SiLU(gate) * up. `silu_mul` is the torch twin; `launch_silu_mul` runs `silu_mul.cu`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.elements import ELEMS, VECTOR_BYTES
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
THREADS, MAX_CTAS = 256, 8  # of a CTA, and a row
MAX_ROWS = 65535  # second dimension of a grid


class SiluMulParams(ctypes.Structure):
    """Of `silu_mul.cu`."""

    _fields_ = [
        ("gate_up", ctypes.c_uint64), ("out", ctypes.c_uint64), ("width", ctypes.c_uint32), ("is_aligned", ctypes.c_uint32)
    ]  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of the fused projection.

    `gate_up` `[num_tokens, 2 * n]`, gate in the first half; returns `[num_tokens, n]`. `gate_up` is left unchanged.
    *Numbers*: in half types the SiLU is rounded before the product, as transformers does.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def load_silu_mul(build: Build, dtype: torch.dtype) -> Kernel:
    """The kernel for one dtype, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": ELEMS[dtype]}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("silu_mul", (SiluMulParams,))


def launch_silu_mul(kernel: Kernel, gate_up: torch.Tensor, out: torch.Tensor, is_pdl: bool = True) -> torch.Tensor:
    """`silu_mul` into `out` `[rows, n]`, which is returned.

    `kernel`: of `load_silu_mul` for the dtype. Both contiguous, on the GPU, at any alignment; fastest at 16-byte borders with
    `n` a multiple of 16 bytes. *Stream*: torch's current one, asynchronous. *Numbers*: the twin's, but that a SiLU may round to
    its neighbour. *Cost*: reads and writes each element once. *Raises* `TypeError`, `ValueError` for tensors that do not fit.
    """
    for name, tensor in (("gate_up", gate_up), ("out", out)):
        if not tensor.is_cuda or tensor.dtype != gate_up.dtype or tensor.dtype not in ELEMS:
            raise TypeError(f"{name} must be bf16, fp16 or fp32 like gate_up, on a GPU, not {tensor.dtype} on {tensor.device}")
        if tensor.dim() != 2 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and of two dimensions, not {tuple(tensor.shape)}")
    rows, width = out.shape
    if tuple(gate_up.shape) != (rows, 2 * width):
        raise ValueError(f"gate_up must be {(rows, 2 * width)} for a result of {(rows, width)}, not {tuple(gate_up.shape)}")
    if not 1 <= rows <= MAX_ROWS or not 1 <= width < 1 << 31:
        raise ValueError(f"silu_mul takes 1 to {MAX_ROWS} rows of at least one element, not {(rows, width)}")
    row_bytes = width * out.element_size()
    is_aligned = not (row_bytes % VECTOR_BYTES or gate_up.data_ptr() % VECTOR_BYTES or out.data_ptr() % VECTOR_BYTES)
    params = SiluMulParams(gate_up.data_ptr(), out.data_ptr(), width, is_aligned)
    per_cta = THREADS * (VECTOR_BYTES // out.element_size() if is_aligned else 1)
    grid = (min(MAX_CTAS, -(-width // per_cta)), rows, 1)
    kernel.launch(grid, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
    return out
