"""The end of a speculative step on the device: drafts that hold become the row's tokens, with one more, and the host finds them.

`accept_drafts` is the torch twin of `accept_drafts.cu`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.advance_rows import ID_BITS
from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.launch_kernel import Kernel, load

SOURCE = Path(__file__).with_suffix(".cu")
NOT_TAKEN = (1 << ID_BITS) - 1  # in place of an id plus 1: the model chose another token before this one
THREADS = 256


def accept_drafts(
    ids: torch.Tensor,
    values: torch.Tensor,
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    step: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """The twin, any device, capturable.

    `ids` int64 `[rows * (num_drafts + 1)]`: what the model chose behind the row's last token and behind each draft. `values`
    fp32, as many: their logits, not finite where there was nothing to choose from. `drafts` int64 `[rows, num_drafts]`. A row
    takes its first id, and the next as long as the ids so far are the drafts and finite.

    `token_ids`, `positions` int64 `[rows]`: the last token taken and its position, written; a negative position stays. `history`
    int32 `[rows, positions]`: the row's tokens by position, which grow. `step` int64 `[1]`: the number of this step, counted up.
    `ring` int64 `[slots, pitch]`, of which slot `step % slots` gets a word an id (`kernels/advance_rows.py`), `NOT_TAKEN` for ids
    that are not taken.
    """
    rows, num_drafts = drafts.shape
    ids, is_finite = ids.view(rows, -1), values.view(rows, -1).isfinite()
    holds = (is_finite[:, :-1] & (ids[:, :-1] == drafts)).long().cumprod(1)
    last = holds.sum(1)
    place = torch.arange(num_drafts + 1, device=ids.device)
    is_taken = place <= last[:, None]
    words = torch.where(is_taken, torch.where(is_finite, ids + 1, 0), NOT_TAKEN) + ((step + 1) << ID_BITS)
    ring[:, : ids.numel()].index_copy_(0, step % ring.shape[0], words.view(1, -1))
    at = positions[:, None] + 1 + place
    is_kept = is_taken & (positions[:, None] >= 0) & (at < history.shape[1])
    at = at.clamp(0, history.shape[1] - 1)
    # A token that is not kept writes position 0 as it is, where none is kept.
    order = torch.where(is_kept, at, 0)
    kept = torch.where(is_kept, ids, history[:rows, :1].long())
    history[:rows].scatter_(1, order, kept.to(history.dtype))
    token_ids.copy_(ids.gather(1, last[:, None])[:, 0])
    positions.add_(torch.where(positions >= 0, last + 1, 0))
    step.add_(1)


class AcceptParams(ctypes.Structure):
    """Of `accept_drafts.cu`."""

    _fields_ = [
        ("ids", ctypes.c_uint64), ("values", ctypes.c_uint64), ("drafts", ctypes.c_uint64), ("token_ids", ctypes.c_uint64),
        ("positions", ctypes.c_uint64), ("history", ctypes.c_uint64), ("step", ctypes.c_uint64), ("ring", ctypes.c_uint64),
        ("rows", ctypes.c_uint32), ("num_drafts", ctypes.c_uint32), ("slots", ctypes.c_uint32), ("pitch", ctypes.c_uint32),
        ("history_pitch", ctypes.c_uint32),
    ]  # fmt: skip


def load_accept_drafts(build: Build) -> Kernel:
    """The kernel, compiled if the cache does not hold it, loaded on the current GPU."""
    return load(variant_of(SOURCE, {"ELEM": 0}).built_by(build).cubin, SOURCE.stem).function("accept_drafts", (AcceptParams,))


def launch_accept_drafts(
    kernel: Kernel,
    ids: torch.Tensor,
    values: torch.Tensor,
    drafts: torch.Tensor,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    history: torch.Tensor,
    step: torch.Tensor,
    ring: torch.Tensor,
) -> None:
    """As `accept_drafts`, in one launch on torch's current stream. All are tensors of the GPU, `ring` too, though its memory may
    be the host's.

    *Raises* `TypeError` for tensors of another dtype or place, or that are not contiguous; `ValueError` for a ring too narrow.
    """
    for name, tensor, dtype in (
        ("ids", ids, torch.int64), ("values", values, torch.float32), ("drafts", drafts, torch.int64),
        ("token_ids", token_ids, torch.int64), ("positions", positions, torch.int64), ("history", history, torch.int32),
        ("step", step, torch.int64), ("ring", ring, torch.int64),
    ):  # fmt: skip
        if tensor.dtype != dtype or not tensor.is_cuda or not tensor.is_contiguous():
            raise TypeError(f"{name} must be contiguous {dtype} on a GPU, not {tensor.dtype} on {tensor.device}")
    rows, num_drafts = drafts.shape
    if ids.numel() != rows * (num_drafts + 1) or ids.numel() > ring.shape[1]:
        raise ValueError(f"{ids.numel()} ids for {rows} rows of {num_drafts} drafts do not fit a ring {ring.shape[1]} words wide")
    params = AcceptParams(
        ids.data_ptr(), values.data_ptr(), drafts.data_ptr(), token_ids.data_ptr(), positions.data_ptr(), history.data_ptr(),
        step.data_ptr(), ring.data_ptr(), rows, num_drafts, ring.shape[0], ring.shape[1], history.shape[1],
    )  # fmt: skip
    kernel.launch(1, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=True)
