"""NCCL between ranks that have a GPU each: the two operations that are used of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from comm.operand import check_operand
from comm.process_group import ProcessGroup
from launch.errors import DoorbellError


class NcclGroup:
    """NCCL over the ranks of `group`, which closes it. *Collective*: constructed by all ranks, each on its own GPU.

    Calls are enqueued on torch's current stream and do not wait for the host.
    *Raises* `DoorbellError`, alike on all ranks, when NCCL does not connect.
    """

    def __init__(self, group: ProcessGroup):
        self.size = group.size
        self._handle = group.open_nccl()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` (GPU, contiguous, fp32, bf16 or fp16) in place and return it. *Collective*.

        *Numbers*: equal bits on all ranks, for NCCL reduces each element once and copies it; but in an order of its own, and
        rounded to `x.dtype` on the way, so not the bits of a sum in rank order.
        """
        check_operand(x)
        if x.numel():
            with _explained("all_reduce"):
                dist.all_reduce(x.detach(), group=self._handle)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """`[size, *x.shape]`: every rank's `x` (GPU), in rank order. *Collective*."""
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            with _explained("gather"):
                # The flat form is the one that every version takes.
                dist.all_gather_into_tensor(parts.view(-1), x.detach().contiguous().view(-1), group=self._handle)
        return parts


@contextmanager
def _explained(operation: str) -> Iterator[None]:
    try:
        yield
    except dist.DistBackendError as error:
        raise DoorbellError(f"NCCL failed in {operation}: {str(error).strip().splitlines()[0]}") from error
