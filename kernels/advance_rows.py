"""The end of a decode step on the device: what was chosen becomes the next input, and the host finds it in its own memory.

`advance_rows` is the torch twin of `advance_rows.cu`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
ID_BITS = 24  # of a word: the id plus 1, or 0 for no token; the step's number plus 1 is above them
THREADS = 256


def advance_rows(
    ids: torch.Tensor,
    values: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    step: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """The twin, any device, capturable.

    `ids` int64 `[rows]`: chosen tokens, below 2**24 - 1. `values` fp32 `[rows]`: their logits, not finite where there was nothing
    to choose from. `token_ids`, `positions` int64 `[rows]`: of the next step, written; a negative position stays. `step` int64
    `[1]`: the number of this step, counted up. `ring` int64 `[slots, pitch]`, of which slot `step % slots` gets a word a row.
    """
    words = ((step + 1) << ID_BITS) + torch.where(values.isfinite(), ids + 1, 0)
    ring[:, : ids.numel()].index_copy_(0, step % ring.shape[0], words[None])
    token_ids.copy_(ids)
    positions.add_(positions >= 0)
    step.add_(1)


class AdvanceParams(ctypes.Structure):
    """Of `advance_rows.cu`."""

    _fields_ = [
        ("ids", ctypes.c_uint64), ("values", ctypes.c_uint64), ("token_ids", ctypes.c_uint64), ("positions", ctypes.c_uint64),
        ("step", ctypes.c_uint64), ("ring", ctypes.c_uint64), ("rows", ctypes.c_uint32), ("slots", ctypes.c_uint32),
        ("pitch", ctypes.c_uint32),
    ]  # fmt: skip


def load_advance_rows(build: Build) -> Kernel:
    """The kernel, compiled if the cache does not hold it, loaded on the current GPU."""
    return load(variant_of(SOURCE, {"ELEM": 0}).built_by(build).cubin, SOURCE.stem).function("advance_rows", (AdvanceParams,))


def launch_advance_rows(
    kernel: Kernel,
    ids: torch.Tensor,
    values: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    step: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """As `advance_rows`, in one launch on torch's current stream. All are tensors of the GPU, `ring` too, though its memory may
    be the host's.

    *Raises* `TypeError` for tensors of another dtype or place, or that are not contiguous.
    """
    for name, tensor, dtype in (
        ("ids", ids, torch.int64), ("values", values, torch.float32), ("token_ids", token_ids, torch.int64),
        ("positions", positions, torch.int64), ("step", step, torch.int64), ("ring", ring, torch.int64),
    ):  # fmt: skip
        if tensor.dtype != dtype or not tensor.is_cuda or not tensor.is_contiguous():
            raise TypeError(f"{name} must be contiguous {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
    params = AdvanceParams(
        ids.data_ptr(), values.data_ptr(), token_ids.data_ptr(), positions.data_ptr(), step.data_ptr(), ring.data_ptr(),
        ids.numel(), ring.shape[0], ring.shape[1],
    )  # fmt: skip
    kernel.launch(1, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=True)
