"""Rows of a vocabulary-parallel embedding. `embed` is the torch twin; `launch_embed` runs `embed.cu`."""

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


class EmbedParams(ctypes.Structure):
    """Of `embed.cu`."""

    _fields_ = [
        ("ids", ctypes.c_uint64), ("table", ctypes.c_uint64), ("out", ctypes.c_uint64), ("zeroed", ctypes.c_uint64),
        ("begin", ctypes.c_int64), ("end", ctypes.c_int64), ("vectors", ctypes.c_uint32), ("is_wide", ctypes.c_uint32),
    ]  # fmt: skip


def embed(ids: torch.Tensor, table: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """New `[rows, hidden]`: row `id - begin` of `table` for each of `ids` in [`begin`, `end`), zeros for all others.

    `ids` int64 or int32 `[rows]`; `table` `[end - begin or more, hidden]`. Does not ask the host, so it can be captured.
    """
    is_foreign = (ids < begin) | (ids >= end)
    x = F.embedding((ids - begin).masked_fill_(is_foreign, 0), table)
    return x.masked_fill_(is_foreign[:, None], 0.0)


def load_embed(build: Build, dtype: torch.dtype) -> Kernel:
    """The kernel for one dtype, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": ELEMS[dtype]}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("embed", (EmbedParams,))


def launch_embed(
    kernel: Kernel,
    ids: torch.Tensor,
    table: torch.Tensor,
    begin: int,
    end: int,
    out: torch.Tensor,
    zeroed: torch.Tensor | None = None,
    is_pdl: bool = True,
) -> torch.Tensor:
    """`embed` into `out` `[rows, hidden]`, and zeros into `zeroed`, of the same shape, if there is one. Returns `out`.

    `kernel`: of `load_embed` for the dtype of `table`. All contiguous, on the GPU, at 16-byte borders; a row is a multiple of 16
    bytes. *Stream*: torch's current one, asynchronous. *Raises* `TypeError`, `ValueError` for tensors that do not fit.
    """
    if ids.dtype not in (torch.int64, torch.int32) or ids.dim() != 1 or not ids.is_contiguous():
        raise TypeError(f"ids must be contiguous int64 or int32 [rows], not {ids.dtype} {tuple(ids.shape)}")
    shape = (ids.shape[0], table.shape[1])
    if table.shape[0] < end - begin or begin < 0:
        raise ValueError(f"a table of {table.shape[0]} rows does not hold the ids from {begin} to {end}")
    if not 1 <= shape[0] <= MAX_ROWS:
        raise ValueError(f"this lookup takes 1 to {MAX_ROWS} rows, not {shape[0]}")
    row_bytes = shape[1] * table.element_size()
    if row_bytes % VECTOR_BYTES:
        raise ValueError(f"a row of the embedding must be a multiple of {VECTOR_BYTES} bytes, not {row_bytes}")
    for name, tensor, wanted in (("table", table, tuple(table.shape)), ("out", out, shape), ("zeroed", zeroed, shape)):
        if tensor is not None:
            _check(name, tensor, wanted, table.dtype)
    vectors = row_bytes // VECTOR_BYTES
    params = EmbedParams(
        ids.data_ptr(), table.data_ptr(), out.data_ptr(), 0 if zeroed is None else zeroed.data_ptr(), begin, end, vectors,
        ids.dtype == torch.int64,
    )  # fmt: skip
    grid = (min(MAX_CTAS, -(-vectors // THREADS)), shape[0], 1)
    kernel.launch(grid, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
    return out


def _check(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not tensor.is_cuda or tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
        raise ValueError(f"{name} must be contiguous {shape} at a {VECTOR_BYTES}-byte border, not {tuple(tensor.shape)}")
