"""What the engine may ask of its peers. One instance a rank, passed down as an argument, never fetched from a global.

Every method below is *collective*: all ranks of the world call it, in the same order, with tensors of the same shape
and dtype. That is the whole contract; the engine keeps it by running the same schedule on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from comm.watch import PeerWatch


class Communicator(ABC):
    """Collectives of one world.

    Attributes: `rank` in [0, size); `size`; `name` of the all-reduce in use (`none`, `threads`, or as in `launch.comm_policy`);
    `reason`, one clause that says why that one was chosen; `detail`, one line on how it goes about it, may be empty;
    `is_rank_order`, whether `all_reduce` gives the bits that its *Numbers* promise; `is_capturable`, whether `all_reduce` of
    tensors on a GPU can be captured in a graph and replayed; `watch` over the peer processes, where there are any.
    """

    rank: int
    size: int
    name: str
    reason: str
    detail: str = ""
    is_rank_order: bool = True
    is_capturable: bool = False
    watch: PeerWatch | None = None

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (any shape, float dtype, contiguous) over the ranks, in place, and return it.

        *Numbers*: summed in fp32 in rank order and rounded once to `x.dtype`, so every rank holds the same bits.
        """

    @abstractmethod
    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Concatenate `x` `[..., n]` of all ranks along the last dimension, in rank order, on rank 0.

        Returns `[..., size * n]` on rank 0 and None elsewhere.
        """

    @abstractmethod
    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        """Give rank 0's `values` (int64, any length up to a few thousand) to every rank; other ranks pass None."""

    @abstractmethod
    def broadcast_object(self, value: Any = None) -> Any:
        """Give rank 0's JSON-serialisable `value` to every rank. For rare, host-side data; not for the step."""

    def meet(self, is_idle: bool = False) -> None:  # noqa: B027
        """Where ranks share a GPU, wait on the host until all have come so far; else do nothing.

        To be called between what a rank prepares for a step and the launch of kernels that wait for peers: to take memory, or to
        load a kernel, is to wait for the peers' kernels on that GPU, which must not wait for this rank in turn. `is_idle`: wait
        for the rank's current stream first, since what a peer has to compute may find no room beside kernels that wait for it.
        Does nothing inside a graph capture.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def check(self) -> None:
        """*Raises* `PeerLost` if it is known that a peer is gone or late. Not collective, waits for nobody."""
        if self.watch is not None and self.watch.lost is not None:
            raise self.watch.lost

    @abstractmethod
    def close(self) -> None:
        """Release shared resources. Idempotent; must not wait for a peer that is gone."""
