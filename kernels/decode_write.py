"""What an attention kernel of a library needs before it in a decode step: the new tokens rotated, and in the paged cache.

`decode_write` is the torch twin; `launch_decode_write` runs `decode_write.cu`, one kernel. Our own attention does this itself.
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
from kernels.rotary_write import takes_rotary_write

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 128  # of a CTA


class DecodeWriteParams(ctypes.Structure):
    """Of `decode_write.cu`."""

    _fields_ = [
        ("qkv", ctypes.c_uint64), ("turns", ctypes.c_uint64), ("positions", ctypes.c_uint64), ("pages", ctypes.c_uint64),
        ("queries", ctypes.c_uint64), ("keys", ctypes.c_uint64), ("values", ctypes.c_uint64), ("lengths", ctypes.c_uint64),
        ("rows", ctypes.c_uint32), ("num_q", ctypes.c_uint32), ("num_kv", ctypes.c_uint32), ("half", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32), ("max_pages", ctypes.c_uint32), ("page_shift", ctypes.c_uint32),
        ("is_wide", ctypes.c_uint32), ("row_ctas", ctypes.c_uint32),
    ]  # fmt: skip


def decode_write(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
) -> None:
    """Write what the attention of a decode step reads. Any device; asks the host, so it cannot be captured.

    `qkv`, `positions`, `page_table`, `keys`, `values`: as of `DecodeAttention.launch`. `turns` `[max_positions, head_dim]`: of
    `kernels.rotary.rotary_turns`. `queries` `[rows, local_q_heads, head_dim]`: the rotated queries; a padding row's stay as they
    are. `lengths` int32 `[rows]`: how many tokens a row has with its new one, 0 for a padding row.
    """
    num_q, num_kv = queries.shape[1], keys.shape[1]
    lengths.copy_((positions + 1).clamp(min=0))
    is_row = positions >= 0
    heads = qkv
    if qkv.dim() == 4:
        heads = qkv[0]
        for part in qkv[1:]:
            heads = heads + part
    q, k, v = heads.to(keys.dtype)[is_row].split((num_q, num_kv, num_kv), 1)
    position = positions[is_row].long()
    cos, sin = turns[position][:, None].chunk(2, -1)
    cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    queries[is_row] = rotate(q, cos, signed_sin)
    pages = page_table[is_row].long().gather(1, position[:, None] // page_size)[:, 0]
    kv_write(keys, values, pages * page_size + position % page_size, rotate(k, cos, signed_sin), v)


def load_decode_write(build: Build, dtype: torch.dtype) -> Kernel:
    """The kernel for one dtype, compiled if the cache does not hold it, loaded on the current GPU. *Raises* `DoorbellError`."""
    cubin = variant_of(SOURCE, {"ELEM": ELEMS[dtype]}).built_by(build).cubin
    return load(cubin, SOURCE.stem).function("decode_write", (DecodeWriteParams,))


def launch_decode_write(
    kernel: Kernel,
    qkv: torch.Tensor,
    turns: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    page_size: int,
    is_pdl: bool = True,
) -> None:
    """As `decode_write`, in one launch, capturable: positions and pages are read on the device.

    `kernel`: of `load_decode_write` for the dtype of the cache, which is that of `turns` and `queries` too. All contiguous, on
    one GPU, at 16-byte borders but for positions, page table and lengths. `page_size`: a power of two. *Stream*: torch's current
    one, asynchronous. *Order*: reads nothing before the kernel before it is complete. *Raises* `TypeError` and `ValueError` for
    tensors that do not fit.
    """
    (rows, num_q, dim), num_kv = queries.shape, keys.shape[1]
    dtype, heads = keys.dtype, num_q + 2 * num_kv
    if not takes_rotary_write(dim, dtype) or dtype not in ELEMS or rows < 1 or page_size & page_size - 1:
        raise ValueError(
            f"decode_write takes rows of bf16, fp16 or fp32 heads of whole vectors and pages of a power of two of tokens, "
            f"not {list(queries.shape)} {dtype} and {page_size}"
        )
    part = torch.float32 if qkv.dim() == 4 else dtype
    for name, tensor, shape, wanted in (
        ("qkv", qkv, (*qkv.shape[: qkv.dim() - 3], rows, heads, dim), part),
        ("turns", turns, (turns.shape[0], dim), dtype),
        ("positions", positions, (rows,), torch.int64 if positions.dtype == torch.int64 else torch.int32),
        ("page_table", page_table, (rows, page_table.shape[-1]), torch.int32),
        ("queries", queries, (rows, num_q, dim), dtype),
        ("keys", keys, (keys.shape[0], num_kv, dim), dtype),
        ("values", values, tuple(keys.shape), dtype),
        ("lengths", lengths, (rows,), torch.int32),
    ):
        if tensor.dtype != wanted or not tensor.is_cuda:
            raise TypeError(f"{name} must be {wanted} on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)}, not {list(tensor.shape)} with strides {tensor.stride()}")
        if name not in ("positions", "page_table", "lengths") and tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} must be aligned to {VECTOR_BYTES} bytes")
    half = dim // 2 * dtype.itemsize // VECTOR_BYTES
    row_ctas = -(-((num_q + num_kv) * half + num_kv * 2 * half) // THREADS)
    params = DecodeWriteParams(
        qkv.data_ptr(), turns.data_ptr(), positions.data_ptr(), page_table.data_ptr(), queries.data_ptr(), keys.data_ptr(),
        values.data_ptr(), lengths.data_ptr(), rows, num_q, num_kv, half, qkv.shape[0] if qkv.dim() == 4 else 0,
        page_table.shape[1], page_size.bit_length() - 1, positions.dtype == torch.int64, row_ctas,
    )  # fmt: skip
    kernel.launch(rows * row_ctas, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)
