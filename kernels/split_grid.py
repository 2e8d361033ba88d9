"""How decode attention deals a row and KV head out to CTAs, and what that takes of shared memory. Not what they then do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_GROUP, MAX_CLUSTER, TILE_KEYS = 16, 8, 16  # as in the sources
SHORT_CONTEXT = 1024  # tokens that one cluster reads faster than several that meet in global memory
MAX_CLUSTERS = 16  # of a row and KV head: who arrives last joins them all
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
    """The fastest grid of those that `python -m engine.bench.attention --trials` timed, for rows of up to `max_context` tokens.

    Fixed by these numbers alone, so that a captured launch stays right whatever the lengths become.
    """
    pairs = rows * local_kv_heads
    if pairs > num_sms:  # two CTAs an SM, so that one fetches while the other joins
        return SplitGrid(1, 1, num_warps=4, num_stages=3)
    # A CTA an SM: eight warps that ask far ahead read memory as fast as it goes.
    room = num_sms // pairs
    if max_context <= SHORT_CONTEXT:
        return SplitGrid(8 if room >= 32 else 4 if room >= 16 else min(2, room), 1, num_warps=8, num_stages=3)
    cluster = MAX_CLUSTER if room >= 64 else min(2, room)
    useful = -(-max_context // (cluster * 8 * TILE_KEYS))
    num_clusters = max(1, min(room // cluster, useful, MAX_CLUSTERS))
    return SplitGrid(cluster, num_clusters, num_warps=8, num_stages=3, alone_tiles=2 if num_clusters > 1 else 4)
