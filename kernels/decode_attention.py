"""Attention of one new token a row over the paged KV cache: the decode step between the qkv product and the o product.

`decode_attention` is the torch twin, slow and plain. `DecodeAttention` launches `decode_attention.cu`, which does the same in one
kernel without asking the host anything, so it can be captured in a graph. Neither knows of ranks: heads are those of one shard.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.build import Build
from kernels.build_variants import variant_of
from kernels.elements import ELEMS
from kernels.kv_write import kv_write
from kernels.launch_kernel import Kernel, load
from kernels.rms_norm import rms_norm
from kernels.rotary import rotate
from kernels.split_grid import BLOCK_SHARED_BYTES, MAX_CLUSTER, MAX_GROUP, SplitGrid, split_grid

SOURCE = Path(__file__).with_suffix(".cu")
HEAD_DIMS = (64, 128)
MAX_GRID_ROWS = 65535  # third dimension of a grid


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each head before its rotation (Qwen3). `q_weight`, `k_weight` `[head_dim]`, of the cache's dtype."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def decode_attention(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    page_table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    turns: torch.Tensor,
    page_size: int,
    bias: torch.Tensor | None = None,
    norms: HeadNorms | None = None,
    window: int | None = None,
    is_rotated: bool = False,
) -> torch.Tensor:
    """The twin: arguments as of `DecodeAttention.launch`, any device. Asks the host, so it cannot be captured. Returns `out`.

    *Numbers*: scores, weights and sums in fp32; q, k and v rounded where the kernel does.
    """
    num_kv, head_dim = keys.shape[1:]
    num_q = out.shape[1]
    is_row = positions >= 0
    position = positions[is_row].long()
    qkv = _summed(qkv, bias, keys.dtype)[is_row]
    q, k, v = qkv.split((num_q, num_kv, num_kv), 1)
    if norms is not None:
        q, k = rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)
    cos, sin = turns[position][:, None].chunk(2, -1)
    cos, signed_sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    if not is_rotated:
        q, k = rotate(q, cos, signed_sin), rotate(k, cos, signed_sin)
    pages = page_table[is_row].long()
    slots = pages.gather(1, position[:, None] // page_size)[:, 0] * page_size + position % page_size
    kv_write(keys, values, slots, k, v)
    result = torch.zeros_like(out)
    rows = is_row.nonzero()[:, 0].tolist()
    for i, (row, last) in enumerate(zip(rows, position.tolist())):
        seen = torch.arange(max(0, last + 1 - window) if window else 0, last + 1, device=keys.device)
        slot = pages[i, seen // page_size] * page_size + seen % page_size
        query = q[i].view(num_kv, -1, head_dim).float() * head_dim**-0.5
        weights = (query @ keys[slot].float().permute(1, 2, 0)).softmax(-1)
        result[row] = (weights @ values[slot].float().transpose(0, 1)).reshape(num_q, head_dim).to(out.dtype)
    return out.copy_(result)


def _summed(qkv: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Heads `[rows, heads, head_dim]` in `dtype` from their parts."""
    parts: Sequence[torch.Tensor] = list(qkv) if qkv.dim() == 4 else [qkv.float()]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return (total if bias is None else total + bias.float()).to(dtype)


class AttentionParams(ctypes.Structure):
    """Of `decode_attention.cu`."""

    _fields_ = [
        ("qkv", ctypes.c_uint64), ("bias", ctypes.c_uint64), ("q_norm", ctypes.c_uint64), ("k_norm", ctypes.c_uint64),
        ("turns", ctypes.c_uint64), ("positions", ctypes.c_uint64), ("pages", ctypes.c_uint64), ("keys", ctypes.c_uint64),
        ("values", ctypes.c_uint64), ("out", ctypes.c_uint64), ("sums", ctypes.c_uint64), ("scores", ctypes.c_uint64),
        ("arrived", ctypes.c_uint64), ("eps", ctypes.c_float), ("scale", ctypes.c_float), ("num_q", ctypes.c_uint32),
        ("num_kv", ctypes.c_uint32), ("group", ctypes.c_uint32), ("num_parts", ctypes.c_uint32), ("max_pages", ctypes.c_uint32),
        ("page_shift", ctypes.c_uint32), ("window", ctypes.c_uint32), ("num_clusters", ctypes.c_uint32),
        ("alone_tiles", ctypes.c_uint32), ("shared_tiles", ctypes.c_uint32), ("num_stages", ctypes.c_uint32),
        ("warp_bytes", ctypes.c_uint32), ("is_wide", ctypes.c_uint32), ("is_early", ctypes.c_uint32),
    ]  # fmt: skip


def load_decode_attention(build: Build, dtype: torch.dtype, head_dim: int) -> Kernel:
    """The kernel for one dtype and head size, compiled if the cache does not hold it, loaded on the current GPU."""
    if dtype not in ELEMS or head_dim not in HEAD_DIMS:
        raise ValueError(f"decode attention takes bf16, fp16 or fp32 heads of {HEAD_DIMS} elements, not {dtype} of {head_dim}")
    variant = variant_of(SOURCE, {"ELEM": ELEMS[dtype], "HEAD_DIM": head_dim})
    return load(variant.built_by(build).cubin, SOURCE.stem).function("decode_attention", (AttentionParams,))


class DecodeAttention:
    """Launches the kernel for one shape of heads; one serves all layers of a model, one launch after the other on one stream.

    `kernel`: of `load_decode_attention`. `turns` `[max_positions, head_dim]`: of `kernels.rotary.rotary_turns`, in the cache's
    dtype, on the GPU; its dtype and device are those of everything else. A launch has at most `max_rows` rows, and no row more
    than `max_context` tokens, the new one included: nothing checks positions on the device. `num_sms`: of the GPU. `grid`: for
    trials, instead of the grid that `split_grid` chooses. Memory: `workspace_bytes`, allocated here.
    """

    def __init__(
        self,
        kernel: Kernel,
        local_q_heads: int,
        local_kv_heads: int,
        page_size: int,
        turns: torch.Tensor,
        max_rows: int,
        max_context: int,
        num_sms: int,
        grid: SplitGrid | None = None,
        is_pdl: bool = True,
    ):
        self._kernel, self.turns, self._is_pdl = kernel, turns, is_pdl
        self.num_q, self.num_kv, self.page_size = local_q_heads, local_kv_heads, page_size
        self.head_dim, self.dtype = turns.shape[1], turns.dtype
        self.max_rows, self.max_context = max_rows, max_context
        self._check_shape()
        self._grids = [grid or split_grid(rows, local_kv_heads, num_sms, max_context) for rows in range(1, max_rows + 1)]
        if (needed := max(each.shared_bytes(self.dtype, self.head_dim) for each in self._grids)) > BLOCK_SHARED_BYTES:
            raise ValueError(f"{grid} takes {needed} bytes of shared memory a CTA, more than {BLOCK_SHARED_BYTES}")
        self._allocate(turns.device)

    def _check_shape(self) -> None:
        if self.num_q % self.num_kv or not 1 <= self.num_q // self.num_kv <= MAX_GROUP:
            raise ValueError(f"decode attention takes 1 to {MAX_GROUP} query heads a KV head, not {self.num_q} for {self.num_kv}")
        if self.page_size < 1 or self.page_size & self.page_size - 1:
            raise ValueError(f"decode attention takes pages of a power of two of tokens, not {self.page_size}")
        if not 1 <= self.max_rows <= MAX_GRID_ROWS:
            raise ValueError(f"decode attention takes 1 to {MAX_GRID_ROWS} rows, not {self.max_rows}")
        if self.max_context > self.turns.shape[0]:
            raise ValueError(f"the rotary table ends at {self.turns.shape[0]} positions, and a row may have {self.max_context}")

    def _allocate(self, device: torch.device) -> None:
        """Room for what clusters that share a row leave for each other. One cluster a row needs none."""
        shares = [(rows + 1) * grid.num_clusters for rows, grid in enumerate(self._grids) if grid.num_clusters > 1]
        num = max(shares, default=0) * self.num_kv
        group = self.num_q // self.num_kv
        self._sums = torch.empty(num * group * self.head_dim, dtype=torch.float32, device=device)
        self._scores = torch.empty(num * MAX_CLUSTER * MAX_GROUP * 2, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(self.max_rows * self.num_kv * MAX_CLUSTER, dtype=torch.int32, device=device)

    @property
    def workspace_bytes(self) -> int:
        return sum(4 * part.numel() for part in (self._sums, self._scores, self._arrived))

    def launch(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None = None,
        norms: HeadNorms | None = None,
        window: int | None = None,
        is_early: bool = True,
        is_rotated: bool = False,
    ) -> torch.Tensor:
        """Attend the new token of each row, and write its key and value to the cache. Returns `out`.

        `qkv`: fp32 `[num_parts, rows, heads, head_dim]`, whose sum in order is meant, or `[rows, heads, head_dim]` of the cache's
        dtype; heads are all q, then k, then v. `bias` `[heads, head_dim]` or flat, added to the sum. `positions` int32 or int64
        `[rows]`: of the new token, so how many are cached; negative: no token, the row's output is 0 and nothing is written.
        `page_table` int32 `[rows, max_pages]`: a row's pages in order; entries behind its last page are not read. `keys`,
        `values` `[num_slots, local_kv_heads, head_dim]` of one layer. `out` `[rows, local_q_heads, head_dim]`. `window`: how many
        last tokens a query sees, itself included. `is_rotated`: queries and keys are, so that several tokens of one row may be
        among the rows, if the cache holds the keys and values of all of them already. All contiguous; all but
        positions and page table aligned to 16 bytes.

        *Stream*: torch's current one, asynchronous. *Order*: with `is_early`, positions, page table and older keys are read
        before the kernel before this one in the stream is complete. They must come from before the graph in which this launch is
        captured, or from before an earlier launch of this kernel on the stream; else pass False. *Numbers*: q, k and v are
        rounded to the cache's dtype where separate steps would store them; scores and sums in fp32, weights in the cache's
        dtype; the same bits every time for the same grid. *Cost*: reads each key and value that a row sees once. *Raises*
        `TypeError` and `ValueError` for tensors that do not fit, before anything is enqueued.
        """
        num_rows = self._check_launch(qkv, positions, page_table, keys, values, out, bias, norms)
        grid = self._grids[num_rows - 1]
        params = AttentionParams(
            qkv.data_ptr(), _address(bias), _address(norms and norms.q_weight), _address(norms and norms.k_weight),
            0 if is_rotated else self.turns.data_ptr(), positions.data_ptr(), page_table.data_ptr(), keys.data_ptr(),
            values.data_ptr(), out.data_ptr(), self._sums.data_ptr(), self._scores.data_ptr(), self._arrived.data_ptr(),
            norms.eps if norms else 0.0,
            self.head_dim**-0.5 * math.log2(math.e), self.num_q, self.num_kv, self.num_q // self.num_kv,
            qkv.shape[0] if qkv.dim() == 4 else 0, page_table.shape[1], self.page_size.bit_length() - 1, window or 0,
            grid.num_clusters, grid.alone_tiles, grid.shared_tiles, grid.num_stages,
            grid.warp_bytes(self.dtype, self.head_dim), positions.dtype == torch.int64, is_early,
        )  # fmt: skip
        shape = (grid.num_clusters * grid.cluster, self.num_kv, num_rows)
        stream = torch.cuda.current_stream().cuda_stream
        shared_bytes = grid.shared_bytes(self.dtype, self.head_dim)
        self._kernel.launch(shape, 32 * grid.num_warps, (params,), stream, shared_bytes, grid.cluster, self._is_pdl)
        return out

    def _check_launch(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        bias: torch.Tensor | None,
        norms: HeadNorms | None,
    ) -> int:
        """The number of rows."""
        rows, heads, dim = out.shape[0], self.num_q + 2 * self.num_kv, self.head_dim
        if not 1 <= rows <= self.max_rows:
            raise ValueError(f"this decode attention takes 1 to {self.max_rows} rows, not {rows}")
        part = torch.float32 if qkv.dim() == 4 else self.dtype
        self._check("qkv", qkv, (*qkv.shape[: qkv.dim() - 3], rows, heads, dim), part)
        self._check("positions", positions, (rows,), torch.int64 if positions.dtype == torch.int64 else torch.int32)
        self._check("page_table", page_table, (rows, page_table.shape[-1]), torch.int32)
        self._check("keys", keys, (keys.shape[0], self.num_kv, dim), self.dtype)
        self._check("values", values, tuple(keys.shape), self.dtype)
        self._check("out", out, (rows, self.num_q, dim), self.dtype)
        if bias is not None:
            self._check("bias", bias.view(-1), (heads * dim,), self.dtype)
        if norms is not None:
            self._check("q_weight", norms.q_weight, (dim,), self.dtype)
            self._check("k_weight", norms.k_weight, (dim,), self.dtype)
        return rows

    def _check(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or tensor.device != self.turns.device:
            raise TypeError(f"{name} must be {dtype} on {self.turns.device}, not {tensor.dtype} on {tensor.device}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous {list(shape)}, not {list(tensor.shape)} with strides {tensor.stride()}")
        if name not in ("positions", "page_table") and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must be aligned to 16 bytes")


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
