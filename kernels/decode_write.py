"""What an attention kernel that only attends needs before it in a decode step: the new tokens rotated, and in the paged cache.

`decode_write` is the torch twin; `launch_decode_write` runs `decode_write.cu`, one kernel. A library's attention needs it. Our
own does this itself, but not where several new tokens of one row are to see each other.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.decode_attention import HeadNorms
from kernels.elements import ELEMS, VECTOR_BYTES
from kernels.kv_write import kv_write
from kernels.launch_kernel import Kernel, load
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate
from kernels.rotary_write import takes_rotary_write

SOURCE = Path(__file__).with_suffix(".cu")
THREADS = 128  # of a CTA
NORM_LANES = (1, 2, 4, 8, 16)  # threads of a head that can be normalised: they are in one warp


class DecodeWriteParams(ctypes.Structure):
    """Of `decode_write.cu`."""

    _fields_ = [
        ("qkv", ctypes.c_uint64), ("turns", ctypes.c_uint64), ("q_norm", ctypes.c_uint64), ("k_norm", ctypes.c_uint64),
        ("positions", ctypes.c_uint64), ("pages", ctypes.c_uint64), ("heads", ctypes.c_uint64), ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64), ("lengths", ctypes.c_uint64), ("eps", ctypes.c_float), ("rows", ctypes.c_uint32),
        ("num_q", ctypes.c_uint32), ("num_kv", ctypes.c_uint32), ("out_heads", ctypes.c_uint32), ("half", ctypes.c_uint32),
        ("num_parts", ctypes.c_uint32), ("max_pages", ctypes.c_uint32), ("page_shift", ctypes.c_uint32),
        ("is_wide", ctypes.c_uint32), ("is_early", ctypes.c_uint32), ("row_ctas", ctypes.c_uint32),
    ]  # fmt: skip


def decode_write(
    qkv: torch.Tensor,
    turns: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    page_size: int,
    norms: HeadNorms | None = None,
) -> None:
    """Write what the attention of a decode step reads. Any device; asks the host, so it cannot be captured.

    `qkv`, `positions`, `page_table`, `keys`, `values`, `norms`: as of `DecodeAttention.launch`, but several rows may be tokens
    of one. `turns` `[max_positions, head_dim]`: of `kernels.rotary.rotary_turns`. `heads` `[rows, n, head_dim]`: the first n of
    the heads, queries and keys rotated; n is `local_q_heads`, or all heads, which `DecodeAttention.launch` takes with
    `is_rotated`. A padding row's stay as they are. `lengths` int32 `[rows]`: how many tokens a row has with its new one, 0 for
    a padding row; None where nobody asks. *Numbers*: parts are summed in order in fp32; the sum is rounded to the cache's dtype,
    and so is all that separate steps would store.
    """
    num_kv = keys.shape[1]
    num_q = qkv.shape[-2] - 2 * num_kv
    if lengths is not None:
        lengths.copy_((positions + 1).clamp(min=0))
    is_row = positions >= 0
    total = qkv
    if qkv.dim() == 4:
        total = qkv[0]
        for part in qkv[1:]:
            total = total + part
    q, k, v = total.to(keys.dtype)[is_row].split((num_q, num_kv, num_kv), 1)
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    position = positions[is_row].long()
    cos, sin = turns[position][:, None].chunk(2, -1)
    cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    q, k = rotate(q, cos, signed_sin), rotate(k, cos, signed_sin)
    heads[is_row] = torch.cat((q, k, v), 1)[:, : heads.shape[1]]
    pages = page_table[is_row].long().gather(1, position[:, None] // page_size)[:, 0]
    kv_write(keys, values, pages * page_size + position % page_size, k, v)


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
    heads: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor | None,
    page_size: int,
    norms: HeadNorms | None = None,
    is_early: bool = False,
    is_pdl: bool = True,
) -> None:
    """As `decode_write`, in one launch, capturable: positions and pages are read on the device.

    `kernel`: of `load_decode_write` for the dtype of the cache, which is that of `turns`, `heads` and `norms` too. All are
    contiguous, on one GPU, at 16-byte borders but for positions, page table and lengths. `page_size`: a power of two. *Stream*:
    torch's current one, asynchronous. *Order*: with `is_early`, positions and page table are read before the kernel before this
    one in the stream is complete. They must come from before the graph in which this launch is captured, or from before an
    earlier launch of this kernel or of `decode_attention.cu` on the stream. Turns and weights of norms are read then, too;
    nothing is written. *Numbers*: sums are the twin's to the bit, rotations those of `rotary_write.cu`; a norm, and a rotation
    in fp32, may differ from the twin's by a rounding. *Raises* `TypeError` and `ValueError` for tensors that do not fit.
    """
    (rows, out_heads, dim), num_kv = heads.shape, keys.shape[1]
    dtype, num_heads, num_q = keys.dtype, qkv.shape[-2], qkv.shape[-2] - 2 * num_kv
    if not takes_rotary_write(dim, dtype) or dtype not in ELEMS or rows < 1 or page_size & page_size - 1:
        raise ValueError(
            f"decode_write takes rows of bf16, fp16 or fp32 heads of whole vectors and pages of a power of two of tokens, "
            f"not {list(heads.shape)} {dtype} and {page_size}"
        )
    if num_q < 1 or out_heads not in (num_q, num_heads):
        raise ValueError(f"decode_write leaves queries or all of the {num_heads} heads, not {out_heads}, beside {num_kv} keys")
    half = dim // 2 * dtype.itemsize // VECTOR_BYTES
    if norms is not None and half not in NORM_LANES:
        raise ValueError(f"decode_write normalises heads of {NORM_LANES} pairs of vectors, not of {half}: {dim} of {dtype}")
    operands = {
        "qkv": (qkv, (*qkv.shape[: qkv.dim() - 3], rows, num_heads, dim), torch.float32 if qkv.dim() == 4 else dtype),
        "turns": (turns, (turns.shape[0], dim), dtype),
        "positions": (positions, (rows,), torch.int64 if positions.dtype == torch.int64 else torch.int32),
        "page_table": (page_table, (rows, page_table.shape[-1]), torch.int32),
        "heads": (heads, (rows, out_heads, dim), dtype),
        "keys": (keys, (keys.shape[0], num_kv, dim), dtype),
        "values": (values, tuple(keys.shape), dtype),
    }
    if lengths is not None:
        operands["lengths"] = (lengths, (rows,), torch.int32)
    if norms is not None:
        operands |= {"q_weight": (norms.q_weight, (dim,), dtype), "k_weight": (norms.k_weight, (dim,), dtype)}
    _check(operands)
    row_ctas = -(-num_heads * half // THREADS)
    q_norm, k_norm = (norms.q_weight.data_ptr(), norms.k_weight.data_ptr()) if norms is not None else (0, 0)
    params = DecodeWriteParams(
        qkv.data_ptr(), turns.data_ptr(), q_norm, k_norm, positions.data_ptr(), page_table.data_ptr(), heads.data_ptr(),
        keys.data_ptr(), values.data_ptr(), 0 if lengths is None else lengths.data_ptr(), norms.eps if norms is not None else 0.0,
        rows, num_q, num_kv, out_heads, half, qkv.shape[0] if qkv.dim() == 4 else 0, page_table.shape[1],
        page_size.bit_length() - 1, positions.dtype == torch.int64, is_early, row_ctas,
    )  # fmt: skip
    kernel.launch(rows * row_ctas, THREADS, (params,), torch.cuda.current_stream().cuda_stream, is_pdl=is_pdl)


def _check(operands: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype]]) -> None:
    """Each with the shape and the dtype that it must have."""
    for name, (tensor, shape, wanted) in operands.items():
        if tensor.dtype != wanted or not tensor.is_cuda:
            raise TypeError(f"{name} must be {wanted} on a GPU, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)}, not {list(tensor.shape)} with strides {tensor.stride()}")
        if name not in ("positions", "page_table", "lengths") and tensor.data_ptr() % VECTOR_BYTES:
            raise ValueError(f"{name} must be aligned to {VECTOR_BYTES} bytes")
