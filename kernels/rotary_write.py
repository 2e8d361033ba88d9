"""Rotary embedding of new tokens and the write of their keys and values to the paged cache, in one kernel.

`rotary_write` is the torch twin; `launch_rotary_write` runs `rotary_write.cu`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.elements import ELEMS, VECTOR_BYTES
from kernels.kv_write import kv_write
from kernels.launch_kernel import Kernel, load
from kernels.rotary import rotate

SOURCE = Path(__file__).with_suffix(".cu")
WARP, MAX_THREADS = 32, 256  # a warp; of a CTA, which takes a token
NO_SLOT = -1  # of a token that is padding


class RotaryWriteParams(ctypes.Structure):
    """Of `rotary_write.cu`."""

    _fields_ = [
        ("qkv", ctypes.c_uint64), ("turns", ctypes.c_uint64), ("slots", ctypes.c_uint64), ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64), ("num_q", ctypes.c_uint32), ("num_kv", ctypes.c_uint32), ("half", ctypes.c_uint32),
    ]  # fmt: skip


def rotary_write(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotate the queries and keys in `qkv` in place, and write keys and values to the cache.

    `qkv` `[tokens, local_q_heads + 2 * local_kv_heads, head_dim]`, q, then k, then v. `turns` `[tokens, head_dim]`: rows of
    `kernels.rotary.rotary_turns`, those of the tokens' positions. `slots` int64 `[tokens]`: one below 0 writes nothing; the
    others are all different, and the first token is not padding. `keys`, `values` `[num_slots, local_kv_heads, head_dim]` of one
    layer. Capturable.
    """
    num_kv = keys.shape[1]
    num_turned = qkv.shape[1] - num_kv
    cos, sin = turns[:, None].chunk(2, dim=-1)
    qkv[:, :num_turned] = rotate(qkv[:, :num_turned], torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    k, v = qkv[:, num_turned - num_kv : num_turned], qkv[:, num_turned:]
    # A padding token repeats the first one's write, since two writers of one slot must agree.
    is_padding = slots < 0
    k, v = (torch.where(is_padding[:, None, None], part[:1], part) for part in (k, v))
    kv_write(keys, values, torch.where(is_padding, slots[:1], slots), k, v)


def takes_rotary_write(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel takes heads of `head_dim`: half a head is whole vectors."""
    return head_dim // 2 * dtype.itemsize % VECTOR_BYTES == 0


def load_rotary_write(build: Build, dtype: torch.dtype) -> Kernel:
    """The kernel for one dtype, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": ELEMS[dtype]}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("rotary_write", (RotaryWriteParams,))


def launch_rotary_write(
    kernel: Kernel,
    qkv: torch.Tensor,
    turns: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    is_pdl: bool = True,
) -> None:
    """As `rotary_write`, in one launch; any token may be padding.

    `kernel`: of `load_rotary_write` for the dtype. All contiguous, on the GPU, at 16-byte borders but for slots. *Stream*:
    torch's current one, asynchronous. *Numbers*: the twin's, but that a last sum may be rounded once less. *Raises* `TypeError`,
    `ValueError` for tensors that do not fit.
    """
    tokens, num_heads, head_dim = qkv.shape
    num_slots, num_kv = keys.shape[:2]
    if tokens < 1 or not takes_rotary_write(head_dim, qkv.dtype):
        raise ValueError(f"rotary_write takes at least one token and heads of whole vectors, not {tuple(qkv.shape)}")
    if num_heads <= 2 * num_kv:
        raise ValueError(f"{num_heads} heads do not hold queries beside {num_kv} keys and values")
    cache = (num_slots, num_kv, head_dim)
    for name, tensor, shape in (
        ("qkv", qkv, tuple(qkv.shape)), ("turns", turns, (tokens, head_dim)), ("keys", keys, cache), ("values", values, cache)
    ):  # fmt: skip
        if not tensor.is_cuda or tensor.dtype != qkv.dtype or tensor.dtype not in ELEMS:
            raise TypeError(f"{name} must be bf16, fp16 or fp32 like qkv, on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} must be contiguous {shape} at a {VECTOR_BYTES}-byte border, not {tuple(tensor.shape)}")
    if not slots.is_cuda or slots.dtype != torch.int64 or tuple(slots.shape) != (tokens,) or not slots.is_contiguous():
        raise TypeError(f"slots must be contiguous int64 [{tokens}] on a GPU, not {slots.dtype} {tuple(slots.shape)}")
    half = head_dim // 2 * qkv.element_size() // VECTOR_BYTES
    params = RotaryWriteParams(
        qkv.data_ptr(), turns.data_ptr(), slots.data_ptr(), keys.data_ptr(), values.data_ptr(),
        num_heads - 2 * num_kv, num_kv, half,
    )  # fmt: skip
    threads = min(MAX_THREADS, -(-(num_heads - num_kv) * half // WARP) * WARP)
    kernel.launch(tokens, threads, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
