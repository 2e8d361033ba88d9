"""Paged KV memory of one rank: plain tensors, addressed by slot.

A *slot* holds one token's keys and values of one layer; a *page* is `page_size` consecutive slots. Which row owns which page
is the page pool's business (`engine/pages.py`), not this file's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KvCache:
    """`keys` and `values`: `[num_layers, num_pages * page_size, local_kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    page_size: int

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        local_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KvCache:
        # Not zeroed: a slot is always written before it is read, and on a CPU memory that is never touched costs nothing.
        shape = (num_layers, num_pages * page_size, local_kv_heads, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device), page_size)

    @property
    def num_slots(self) -> int:
        return self.keys.shape[1]
