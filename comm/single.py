"""A world of one: every collective is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comm.communicator import Communicator


class SingleCommunicator(Communicator):
    """`Communicator` of a process that runs alone."""

    rank = 0
    size = 1
    name = "none"
    reason = "one rank"
    is_capturable = True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        return list(values or ())

    def broadcast_object(self, value: Any = None) -> Any:
        return value

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass
