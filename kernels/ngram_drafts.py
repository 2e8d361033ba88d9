"""Prompt lookup on the device: what followed the last time the row said what it says now.

`ngram_drafts` is the torch twin of `ngram_drafts.cu`. Both find what `engine.drafts.ngram` finds on the host. *Source*: Saxena,
"Prompt Lookup Decoding" (2023).
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
LONGEST = 4  # tokens of context that are compared
THREADS = 512


def ngram_drafts(history: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """The twin, any device, capturable. Returns `drafts`.

    `history` int32 `[rows, max_positions]`: the tokens of a row by position. `positions` int64 `[rows]`: of its last token;
    negative for a row that is not there, whose drafts are 0. `drafts` int64 `[rows, num_drafts]`: what followed the latest of the
    longest (up to `LONGEST` tokens) earlier occurrences of the row's end. A copy that reaches the end of the row goes on in what
    it has copied; a row that says something new repeats its last token.
    """
    rows, num_drafts = drafts.shape
    last = positions.clamp(min=0)[:, None]
    end = torch.arange(1, history.shape[1], device=history.device).expand(rows, -1)
    is_equal, length = torch.ones_like(end, dtype=torch.bool), torch.zeros_like(end)
    for back in range(LONGEST):
        own = history.gather(1, (last - back).clamp(min=0))
        there = history.gather(1, (end - 1 - back).clamp(min=0))
        is_equal = is_equal & (end - 1 - back >= 0) & (last >= back) & (there == own)
        length += is_equal
    found = torch.where((length > 0) & (end <= last), length * history.shape[1] + end, 0).amax(1, keepdim=True)
    start = torch.where(found > 0, found % history.shape[1], last)
    place = start + torch.arange(num_drafts, device=history.device) % (last + 1 - start)
    return drafts.copy_(torch.where(positions[:, None] >= 0, history.gather(1, place).long(), 0))


class NgramParams(ctypes.Structure):
    """Of `ngram_drafts.cu`."""

    _fields_ = [
        ("history", ctypes.c_uint64), ("positions", ctypes.c_uint64), ("drafts", ctypes.c_uint64),
        ("num_drafts", ctypes.c_uint32), ("history_pitch", ctypes.c_uint32),
    ]  # fmt: skip


def load_ngram_drafts(build: Build) -> Kernel:
    """The kernel, compiled if the cache does not hold it, loaded on the current GPU."""
    return load(variant_of(SOURCE, {"ELEM": 0}).built_by(build).cubin, SOURCE.stem).function("ngram_drafts", (NgramParams,))


def launch_ngram_drafts(
    kernel: Kernel, history: torch.Tensor, positions: torch.Tensor, drafts: torch.Tensor
) -> torch.Tensor:
    """As `ngram_drafts`, in one launch on torch's current stream. *Cost*: reads each row's tokens once.

    *Raises* `TypeError` for tensors of another dtype or place, or that are not contiguous.
    """
    for name, tensor, dtype in (
        ("history", history, torch.int32), ("positions", positions, torch.int64), ("drafts", drafts, torch.int64)
    ):  # fmt: skip
        if tensor.dtype != dtype or not tensor.is_cuda or not tensor.is_contiguous():
            raise TypeError(f"{name} must be contiguous {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
    params = NgramParams(
        history.data_ptr(), positions.data_ptr(), drafts.data_ptr(), drafts.shape[1], history.shape[1]
    )  # fmt: skip
    kernel.launch(drafts.shape[0], THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=True)
    return drafts
