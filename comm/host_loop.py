"""The naive communicator, kept as the measured "before": the host waits for the GPU around every call.

What an engine does that reduces from Python without thinking about the host: finish all work, reduce, finish again. Each call
costs two drains of the GPU's queue, and nothing can be captured in a graph. Never chosen unless it is asked for.
"""

from __future__ import annotations

import torch

from comm.controlled import ControlledCommunicator
from comm.gloo import GlooCommunicator
from comm.nccl_group import NcclGroup


class HostLoopCommunicator(ControlledCommunicator):
    """`Communicator` with a host synchronisation before and after each call on GPU tensors.

    `nccl` reduces where every rank has a GPU of its own. Without it (ranks share GPUs) tensors go through host memory and
    gloo; so do those of the CPU, where there is nothing to synchronise.
    *Numbers*: NCCL's with `nccl`, else fp32 in rank order.
    """

    name = "host_loop"

    def __init__(self, control: GlooCommunicator, reason: str, nccl: NcclGroup | None = None):
        super().__init__(control, reason)
        self._nccl = nccl
        self.is_rank_order = nccl is None
        self.detail = f"{'NCCL' if nccl else 'gloo through host memory'}, with a host synchronisation before and after each call"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        _synchronize(x)
        if self._nccl is not None and x.is_cuda:
            self._nccl.all_reduce(x)
        else:
            self._control.all_reduce(x)
        _synchronize(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        _synchronize(x)
        if self._nccl is not None and x.is_cuda:
            parts = self._nccl.all_gather(x)
            whole = torch.cat(parts.unbind(), dim=-1) if self.rank == 0 else None
        else:
            whole = self._control.gather(x)
        _synchronize(x)
        return whole


def _synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
