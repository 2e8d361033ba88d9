"""How decode attention deals a row and KV head out to CTAs, and what that takes of shared memory. Not what they then do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_GROUP, MAX_CLUSTER, TILE_KEYS = 16, 8, 16  # as in the sources
WARPS, STAGES = (4, 8), (2, 3, 4)  # of a CTA, and of a warp, that the kernel can be launched with
BLOCK_SHARED_BYTES = 227 << 10  # that a CTA may have on sm_90


@dataclass(frozen=True)
class SplitGrid:
    """How a row and KV head is dealt out: at most `num_clusters` clusters of `cluster` CTAs (1, 2, 4 or 8) of `num_warps` warps.

    `num_stages`: tiles of 16 keys that a warp has on their way. A row takes one cluster up to `alone_tiles` tiles a warp, and
    beyond that as many as leave each warp `shared_tiles`: clusters that share a row meet in global memory, which costs as much as
    several tiles. *Raises* `ValueError` for what the kernel cannot do.
    """

    cluster: int
    num_clusters: int
    num_warps: int = 4
    num_stages: int = 3
    alone_tiles: int = 4
    shared_tiles: int = 2

    def __post_init__(self):
        if self.cluster not in (1, 2, 4, 8) or self.num_clusters < 1 or min(self.alone_tiles, self.shared_tiles) < 1:
            raise ValueError(f"a row cannot be shared as {self}: clusters are of 1, 2, 4 or 8 CTAs, and counts at least 1")
        if self.num_warps not in WARPS or self.num_stages not in STAGES:
            raise ValueError(f"a row cannot be shared as {self}: a CTA has {WARPS} warps, and a warp {STAGES} stages")

    def warp_bytes(self, dtype: torch.dtype, head_dim: int) -> int:
        """Shared memory of a warp: keys and values on their way, later what it summed. fp32 has none on their way."""
        sums = MAX_GROUP * (head_dim + 4) * 4
        return sums if dtype == torch.float32 else max(sums, self.num_stages * 2 * TILE_KEYS * head_dim * dtype.itemsize)

    def shared_bytes(self, dtype: torch.dtype, head_dim: int) -> int:
        """Dynamic shared memory of a CTA: its warps' and what `Shared` of the source holds."""
        return self.num_warps * self.warp_bytes(dtype, head_dim) + (20 << 10 if dtype == torch.float32 else 16 << 10)


def split_grid(rows: int, local_kv_heads: int, num_sms: int, max_context: int) -> SplitGrid:
    """A grid that fills `num_sms` SMs once if rows are few, for rows of up to `max_context` tokens.

    Fixed by these numbers alone, so that a captured launch stays right whatever the lengths become.
    """
    pairs = rows * local_kv_heads
    if 4 * pairs <= num_sms:
        # A CTA an SM. A cluster lies within one GPC, and their SMs do not all divide by its size: one less fits at once for sure.
        most = max(1, (num_sms // 4 - 1) // pairs)
        useful = -(-max_context // (4 * 8 * TILE_KEYS))
        return SplitGrid(4, max(1, min(most, useful)), num_warps=8, num_stages=2)
    # Two CTAs an SM, so that one fetches while the other joins, and the next launch while this one ends.
    return SplitGrid(1 << (min(MAX_CLUSTER, max(1, 2 * num_sms // pairs)).bit_length() - 1), 1, num_warps=4, num_stages=3)
