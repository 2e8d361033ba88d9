"""One decode step of attention with everything made up: what the kernel and its twin are both given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.decode_attention import HeadNorms
from kernels.rotary import rotary_turns
from kernels.split_grid import SplitGrid

UNUSED_PAGE = 1 << 28  # behind a row's last page: reading the cache there would fault
NAN = float("nan")


@dataclass(frozen=True)
class AttentionCase:
    """`positions`: of the rows' new tokens. `parts`: of the sum that qkv comes as, 0 for elements. `grid`: None for the usual."""

    positions: tuple[int, ...]
    num_q: int = 8
    num_kv: int = 2
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 16
    parts: int = 1
    has_bias: bool = True
    has_norms: bool = False
    window: int | None = None
    is_wide: bool = False
    grid: SplitGrid | None = None


class Step:
    """Tensors of a case on a device. Slots of the cache that no row has written yet, and the output, are NaN."""

    def __init__(self, case: AttentionCase, device: str, seed: int = 0):
        self.case, self.device = case, device
        self._generator = torch.Generator().manual_seed(seed)
        rows, heads, dim = len(case.positions), case.num_q + 2 * case.num_kv, case.head_dim
        self.max_context = max(*case.positions, 0) + 1
        shape = (case.parts, rows, heads, dim) if case.parts else (rows, heads, dim)
        # Scores of standard deviation 3: few keys count, also among many, so that each that is missing or twice shows.
        self.qkv = self._random(*shape, dtype=torch.float32 if case.parts else case.dtype, scale=3 / max(1, case.parts) ** 0.5)
        self.bias = self._random(heads, dim, scale=0.5) if case.has_bias else None
        weights = [(1 + self._random(dim, scale=0.2)).contiguous() for _ in range(2)]
        self.norms = HeadNorms(*weights, 1e-6) if case.has_norms else None
        inv_freq = 10000.0 ** -(torch.arange(0, dim, 2, device=device) / dim)
        self.turns = rotary_turns(self.max_context, inv_freq, 1.0, case.dtype)
        self.positions = torch.tensor(case.positions, device=device, dtype=torch.int64 if case.is_wide else torch.int32)
        self._lay_out_pages(rows)
        self.out = torch.full((rows, case.num_q, dim), NAN, dtype=case.dtype, device=device)

    def _random(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale).to(self.device, dtype or self.case.dtype)

    def _lay_out_pages(self, rows: int) -> None:
        """Pages of all rows shuffled, a few left over, and keys and values at the positions before the new one."""
        size, lengths = self.case.page_size, [position + 1 for position in self.case.positions]
        counts = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=self._generator, dtype=torch.int32)
        self.page_table = torch.full((rows, max(counts) + 2), UNUSED_PAGE, dtype=torch.int32)
        shape = (order.numel() * size, self.case.num_kv, self.case.head_dim)
        keys, values = (torch.full(shape, NAN) for _ in range(2))
        begin = 0
        for row, (count, length) in enumerate(zip(counts, lengths)):
            self.page_table[row, :count] = order[begin : begin + count]
            slots = (order[begin : begin + count, None].long() * size + torch.arange(size)).flatten()[: max(0, length - 1)]
            for cache in (keys, values):
                cache[slots] = torch.randn(slots.numel(), *shape[1:], generator=self._generator)
            begin += count
        self.page_table = self.page_table.to(self.device)
        self.keys, self.values = (cache.to(self.device, self.case.dtype) for cache in (keys, values))

    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.qkv, self.positions, self.page_table, self.keys, self.values, self.out

    def options(self) -> dict[str, object]:
        return {"bias": self.bias, "norms": self.norms, "window": self.case.window}
