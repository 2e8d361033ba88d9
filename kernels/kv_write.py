"""Store new keys and values in the paged cache, torch twin."""

from __future__ import annotations

import torch


def kv_write(keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Write this step's keys and values of one layer, in place.

    `keys`, `values` `[num_slots, local_kv_heads, head_dim]`; `k`, `v` `[num_tokens, local_kv_heads, head_dim]`;
    `slots` int64 `[num_tokens]`, all different.
    """
    keys.index_copy_(0, slots, k)
    values.index_copy_(0, slots, v)
