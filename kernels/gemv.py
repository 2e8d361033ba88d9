"""x @ weight.T for a few rows of x, at the rate the weights can be read: by `gemv_rows.cu`, `gemv_groups.cu` or `gemv.cu`, as a
measured table says; and the torch twin."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.build import HEADERS, Build
from kernels.gemv_choice import LIBRARY, WAYS, Pace, Product, likely_ways, measured_pace, measured_way
from kernels.gemv_groups import BOX, GemvGroupsParams, GroupsPlan, load_gemv_groups, plan_groups
from kernels.gemv_rows import GemvRowsParams, RowsPlan, load_gemv_rows, plan_rows
from kernels.launch_kernel import Kernel, load
from kernels.silu_mul import silu_mul
from launch.errors import KernelLaunchError

SOURCE = Path(__file__).parent / "gemv.cu"
MAX_ROWS = 16
WARPS, TILE, BLOCK, MAX_BLOCKS = 16, 8, 64, 31  # as in gemv.cu: multiplying warps, weight rows a tile, bytes of a block, blocks
STAGE_BYTES = TILE * MAX_BLOCKS * BLOCK
# Eight stages hold 3.6 us of an H200's memory rate, about what a border between kernels takes; more would crowd out attention.
MIN_STAGES, MAX_STAGES = 3, 8
MAP_ELEM_BYTES = 8  # of the tensor map's elements: a box may be 256 of them wide
MAX_SHARED_BYTES = 192 << 10  # dynamic, of a CTA on an H100 or H200, beside up to 34 KiB static
MAX_X_BYTES = 64 << 10  # of x in shared memory, where a split can make it less
SPLIT_COST = 0.02  # of a sum by one more split, as a share of the whole: what its reader pays


class GemvParams(ctypes.Structure):
    _fields_ = [
        ("map", ctypes.c_uint8 * 128), ("x", ctypes.c_uint64), ("scale", ctypes.c_uint64), ("bias", ctypes.c_uint64),
        ("sums", ctypes.c_uint64), ("product", ctypes.c_uint64), ("rows", ctypes.c_uint32), ("in_", ctypes.c_uint32),
        ("out", ctypes.c_uint32), ("num_splits", ctypes.c_uint32), ("stages", ctypes.c_uint32), ("pieces", ctypes.c_uint32),
        ("piece", ctypes.c_uint32), ("x_pitch", ctypes.c_uint32),
    ]  # fmt: skip


@dataclass(frozen=True)
class GemvPlan:
    """How a product is dealt out. `ctas`: a multiple of `num_splits`. A split takes `pieces` of `piece` bytes of a weight row."""

    ctas: int
    num_splits: int
    pieces: int
    piece: int
    x_pitch: int  # bytes between rows of x in shared memory

    def stages(self, rows: int) -> int:
        return min(MAX_STAGES, (MAX_SHARED_BYTES - rows * self.x_pitch) // STAGE_BYTES)

    def shared_bytes(self, rows: int) -> int:
        return self.stages(rows) * STAGE_BYTES + rows * self.x_pitch


@cache
def plan_gemv(
    rows: int, inner: int, out: int, elem_bytes: int, num_sms: int, is_gate_up: bool = False, num_splits: int | None = None
) -> GemvPlan | None:
    """The best dealing for `rows` rows of x and a weight `[out, inner]` (`out` of each half if `is_gate_up`), or None.

    The time of a product is that of the fullest CTA. More splits deal finer, but their sums must be added by the reader; a gate
    and up product cannot be split. `num_splits` fixes it instead.
    """
    if not 0 < rows <= MAX_ROWS or inner * elem_bytes % 16 or inner * 2 % 16:
        return None
    row_bytes, tiles = inner * elem_bytes, -(-out // TILE)
    best, least = None, float("inf")
    for splits in (1,) if is_gate_up else (num_splits,) if num_splits else (1, 2, 3, 4, 6, 8, 11, 12, 16):
        share = -(-row_bytes // splits)
        pieces = -(-share // (MAX_BLOCKS * BLOCK))
        blocks = -(-share // (pieces * BLOCK)) // 2 * 2 + 1  # odd, and no less than needed
        piece = blocks * BLOCK
        if splits > num_sms or blocks > MAX_BLOCKS or (splits - 1) * pieces * piece >= row_bytes:
            continue
        # A whole number of blocks, and again an odd one, for the same reason as a piece's.
        x_pitch = (pieces * piece // elem_bytes * 2 // BLOCK // 2 * 2 + 1) * BLOCK
        sets = min(tiles, num_sms // splits)
        plan = GemvPlan(sets * splits, splits, pieces, piece, x_pitch)
        if plan.stages(rows) < MIN_STAGES:
            continue
        cost = -(-tiles // sets) * min(pieces * piece, row_bytes) / (tiles * row_bytes / num_sms) + SPLIT_COST * splits
        cost += 0.2 * (rows * x_pitch > MAX_X_BYTES)  # then no other kernel's stages find room beside it
        if cost < least:
            best, least = plan, cost
    return best


def encode_map(data: torch.Tensor, box_bytes: int, box_rows: int, is_swizzled: bool) -> Any:
    """The tensor map of a matrix on the GPU, with boxes of `box_bytes` of `box_rows` rows. `is_swizzled`: as `group_product.cuh`
    says, for boxes of 128 bytes; places are counted in bytes then, else in `MAP_ELEM_BYTES`."""
    from cuda.bindings import driver

    rows, row_bytes = data.shape[0], data.shape[1] * data.element_size()
    integer, kinds, swizzles = driver.cuuint64_t, driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    elem_bytes = 1 if is_swizzled else MAP_ELEM_BYTES
    result, encoded = driver.cuTensorMapEncodeTiled(
        kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8 if is_swizzled else kinds.CU_TENSOR_MAP_DATA_TYPE_INT64, 2, data.data_ptr(),
        [integer(row_bytes // elem_bytes), integer(rows)], [integer(row_bytes)],
        [driver.cuuint32_t(box_bytes // elem_bytes), driver.cuuint32_t(box_rows)], [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if is_swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    if result != driver.CUresult.CUDA_SUCCESS:
        raise KernelLaunchError(f"gemv: no tensor map of {list(data.shape)} {data.dtype}: {result.name}", result.name)
    return (ctypes.c_uint8 * 128).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))


Plan = GemvPlan | RowsPlan | GroupsPlan


class Gemv:
    """Products on the current GPU. `kernels` from `load_gemv`. Launches on torch's current stream; capturable.

    `is_pdl`: a launch may start while the kernel before it runs. Not where ranks share a GPU: a product that waits early holds
    shared memory that a peer's product may need first. `ways`: of these names of `WAYS`, the first that can is taken, instead of
    what was measured to be the fastest; `pace` likewise.
    """

    def __init__(
        self, kernels: dict[Any, Kernel], num_sms: int, is_pdl: bool = True, ways: tuple[str, ...] | None = None,
        pace: Pace | None = None,
    ):  # fmt: skip
        self._kernels, self._num_sms, self._is_pdl, self._ways = kernels, num_sms, is_pdl, ways
        self._pace = pace
        self._plans: dict[tuple[Product, int | None], Plan | None] = {}
        self._names: dict[tuple[Product, int | None], str] = {}
        self._maps: dict[tuple[int, torch.Size, int, int, int], Any] = {}

    def takes(self, x: torch.Tensor, weight: Any, is_gate_up: bool = False) -> bool:
        """Whether there is a plan for `x` `[rows, in]` with `weight`; what is not taken is a product for a library."""
        data, _ = parts_of(weight)
        if x.dtype != torch.bfloat16 or not x.is_contiguous() or not data.is_contiguous() or data.data_ptr() % 16:
            return False
        return self._best(x, data, is_gate_up, None) is not None

    def linear(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None,
        num_splits: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """`x @ weight.T + bias` as sums to be added over the first dimension: fp32 `[num_splits, rows, out]`.

        `x` bf16 `[rows, in]`, contiguous, 1 to 16 rows; `weight` bf16 `[out, in]`, or an `Fp8Weight`; `bias` bf16 `[out]`, in the
        first split's sum. *Raises* `ValueError` for what has no plan.
        """
        data, scale = parts_of(weight)
        plan = self._plan(x, data, False, num_splits)
        shape = (plan.num_splits, x.shape[0], data.shape[0])
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=x.device)
        elif out.shape != shape:
            raise ValueError(f"the sums are {list(shape)}, not {list(out.shape)}")
        self._launch(plan, x, data, scale, bias, out, None, data.shape[0], False)
        return out

    def gate_up(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`silu(gate) * up` of `x @ weight.T + bias`, gate in the first half: bf16 `[rows, local_ff]`."""
        data, scale = parts_of(weight)
        half = data.shape[0] // 2
        plan = self._plan(x, data, True, None)
        out = torch.empty(x.shape[0], half, dtype=x.dtype, device=x.device) if out is None else out
        self._launch(plan, x, data, scale, bias, None, out, half, True)
        return out

    def _plan(self, x: torch.Tensor, data: torch.Tensor, is_gate_up: bool, num_splits: int | None) -> Plan:
        if x.dtype != torch.bfloat16 or not x.is_contiguous() or not data.is_contiguous() or x.shape[1] != data.shape[1]:
            raise TypeError("a product takes contiguous bf16 rows as wide as the contiguous weight")
        plan = self._best(x, data, is_gate_up, num_splits)
        if plan is None:
            raise ValueError(f"no product of {list(x.shape)} with {list(data.shape)} of {data.dtype}")
        return plan

    def _best(self, x: torch.Tensor, data: torch.Tensor, is_gate_up: bool, num_splits: int | None) -> Plan | None:
        out = data.shape[0] // 2 if is_gate_up else data.shape[0]
        key = Product(x.shape[0], out, x.shape[1], data.element_size(), is_gate_up), num_splits
        if key not in self._plans:
            self._plans[key] = self._choose(*key)
        return self._plans[key]

    def _choose(self, product: Product, num_splits: int | None) -> Plan | None:
        ways = self._ways
        if ways is None:
            measured = measured_way(product) if num_splits is None else None
            if measured == LIBRARY:
                return None
            ways = likely_ways(product) if measured is None else (measured, *likely_ways(product))
        for name in ways:
            plan = self._plan_of(name, product, num_splits)
            if plan is not None:
                self._names[product, num_splits] = name
                return plan
        return None

    @property
    def products(self) -> list[Product]:
        """Those that were asked for, whether they are made here or left to a library."""
        return [product for product, num_splits in self._plans if num_splits is None]

    def way_of(self, product: Product) -> str:
        """Of `WAYS`, or `LIBRARY`: how one of `products` is made."""
        return self._names.get((product, None), LIBRARY)

    def plan_of(self, product: Product) -> Plan | None:
        """How one of `products` is dealt out; None for a library."""
        return self._plans[product, None]

    def choose(self, product: Product, way: str, pace: Pace | None = None) -> bool:
        """For benches: make `product` by `way` from the next launch on, at the measured pace or at `pace`. False, and nothing
        changes, if it cannot be."""
        plan = None if way == LIBRARY else self._plan_of(way, product, None, pace)
        if plan is None and way != LIBRARY:
            return False
        self._plans[product, None], self._names[product, None] = plan, way
        return True

    def _plan_of(self, name: str, product: Product, num_splits: int | None, pace: Pace | None = None) -> Plan | None:
        way = WAYS[name]
        case = (product.rows, product.inner, product.out, product.elem_bytes)
        rest = (product.is_gate_up, num_splits)
        if way.kernel == "tiles":
            return plan_gemv(*case, self._num_sms, *rest)
        rest = (self._num_sms * way.ctas_per_sm, *rest, way.shared_bytes)
        plan = plan_groups(*case, *rest, way.groups) if way.kernel == "groups" else plan_rows(*case, *rest)
        pace = pace or self._pace or measured_pace(product)
        return None if plan is None else plan.paced(*((kib << 10) // way.ctas_per_sm for kib in (pace.first, pace.later)))

    def _launch(
        self, plan: Plan, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor | None,
        bias: torch.Tensor | None, sums: torch.Tensor | None, product: torch.Tensor | None, out: int, is_gate_up: bool,
    ) -> None:  # fmt: skip
        rows, inner = x.shape
        operands = [0 if tensor is None else tensor.data_ptr() for tensor in (x, scale, bias, sums, product)]
        if isinstance(plan, GroupsPlan):
            boxes = self._map(data, BOX, plan.box_rows, True)
            params = GemvGroupsParams(
                boxes, *operands, rows, inner, out, plan.tiles, plan.boxes, plan.box_rows, plan.half_rows, plan.slots,
                plan.slot_bytes, plan.in_flight_first, plan.in_flight,
            )  # fmt: skip
            kernel = self._kernels["groups", scale is not None, is_gate_up, plan.groups]
            threads, shared_bytes = plan.threads, plan.shared_bytes
        elif isinstance(plan, RowsPlan):
            params = GemvRowsParams(
                data.data_ptr(), *operands, inner, out, plan.num_splits, plan.part_bytes, plan.segment, plan.chunk_rows,
                plan.slots, plan.in_flight_first, plan.in_flight, plan.slot_bytes,
            )  # fmt: skip
            kernel = self._kernels[scale is not None, is_gate_up, rows]
            threads, shared_bytes = plan.threads, plan.shared_bytes
        else:
            pieces = self._map(data, plan.piece, TILE, False)
            params = GemvParams(
                pieces, *operands, rows, inner, out, plan.num_splits, plan.stages(rows), plan.pieces, plan.piece, plan.x_pitch
            )  # fmt: skip
            kernel = self._kernels[scale is not None, is_gate_up, 8 if rows <= 8 else 16]
            threads, shared_bytes = (WARPS + 1) * 32, plan.shared_bytes(rows)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch(plan.ctas, threads, (params,), stream, shared_bytes=shared_bytes, is_pdl=self._is_pdl)

    def _map(self, data: torch.Tensor, box_bytes: int, box_rows: int, is_swizzled: bool) -> Any:
        key = data.data_ptr(), data.shape, data.element_size(), box_bytes, box_rows  # all that is in a map
        if key not in self._maps:
            self._maps[key] = encode_map(data, box_bytes, box_rows, is_swizzled)
        return self._maps[key]


def load_gemv(build: Build) -> dict[Any, Kernel]:
    """Kernels by (is e4m3, is gate and up, most rows), on the current GPU: 1 and 2 of `gemv_rows.cu`, 8 and 16 of `gemv.cu`; and
    those of `load_gemv_groups`."""
    kernels = {**load_gemv_rows(build), **load_gemv_groups(build)}
    for is_fp8 in (False, True):
        for is_gate_up in (False, True):
            for rows in (8, 16):
                variant = {"ELEM": 0, "FP8": int(is_fp8), "GATE_UP": int(is_gate_up), "ROWS": rows}
                module = load(build.cubin(SOURCE, [HEADERS], variant), "gemv")
                kernels[is_fp8, is_gate_up, rows] = module.function("gemv", (GemvParams,))
    return kernels


def parts_of(weight: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(matrix, scales or None) of a weight."""
    return (weight, None) if isinstance(weight, torch.Tensor) else (weight.data, weight.scale)


def gemv_twin(x: torch.Tensor, weight: Any, bias: torch.Tensor | None, is_gate_up: bool) -> torch.Tensor:
    """What `Gemv.linear` gives when its sums are added, and `Gemv.gate_up`: fp32 products, rounded as documented there."""
    data, scale = parts_of(weight)
    full = data.float() if scale is None else data.float() * scale[:, None]
    product = F.linear(x.float(), full, None if bias is None else bias.float())
    return silu_mul(product.to(x.dtype)) if is_gate_up else product
