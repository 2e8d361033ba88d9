"""Rank 0 of a world whose other ranks are not there: collectives are local copies.

A measuring device: one process computes what rank 0 of a tensor-parallel world of `size` computes, at the same shapes, with
nothing to wait for. What comes out means nothing, for the other ranks' parts of every sum are missing; but it is finite.
"""

from __future__ import annotations

import torch

from comm.single import SingleCommunicator


class LoopbackCommunicator(SingleCommunicator):
    """`Communicator` of rank 0 alone in a world of `size`. Words between hosts are its own; it waits for nobody."""

    name = "loopback"
    reason = "the other ranks of the shard are not there"
    is_rank_order = False

    def __init__(self, size: int):
        self.size = size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, with nothing added: the other ranks count as zeros."""
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's part is this one's: `[..., size * n]`."""
        return torch.cat([x] * self.size, dim=-1)
