"""NCCL as a communicator: the fallback of ranks that have a GPU each but cannot map each other's memory."""

from __future__ import annotations

import torch

from comm.controlled import ControlledCommunicator
from comm.gloo import GlooCommunicator
from comm.nccl_group import NcclGroup


class NcclCommunicator(ControlledCommunicator):
    """`Communicator` over `nccl`, enqueued on torch's current stream; tensors of the CPU and words go over `control`.

    *Numbers*: every rank holds the same bits, but they are not those of the sum in fp32 in rank order that the other
    communicators give: NCCL's order depends on size and topology, and it rounds to the tensor's dtype between additions.
    """

    name = "nccl"
    is_rank_order = False

    def __init__(self, nccl: NcclGroup, control: GlooCommunicator, reason: str):
        super().__init__(control, reason)
        self._nccl = nccl

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_reduce(x) if x.is_cuda else self._control.all_reduce(x)

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """*Cost*: NCCL gives the parts to every rank, so `size` times a gather's bytes."""
        if not x.is_cuda:
            return self._control.gather(x)
        parts = self._nccl.all_gather(x)
        return torch.cat(parts.unbind(), dim=-1) if self.rank == 0 else None
