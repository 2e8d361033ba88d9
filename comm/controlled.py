"""What the communicators for GPUs share: tensors go their own way, words between hosts go over gloo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comm.communicator import Communicator
from comm.gloo import GlooCommunicator
from comm.watch import PeerWatch


class ControlledCommunicator(Communicator):
    """Base of a `Communicator` whose `control` carries what is not on the GPU. Closes `control`."""

    def __init__(self, control: GlooCommunicator, reason: str):
        self.rank, self.size, self.reason = control.rank, control.size, reason
        self._control = control

    @property
    def watch(self) -> PeerWatch | None:
        """The control's own, so that it can say which rank a broken connection belonged to."""
        return self._control.watch

    @watch.setter
    def watch(self, watch: PeerWatch | None) -> None:
        self._control.watch = watch

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        return self._control.broadcast_ints(values)

    def broadcast_object(self, value: Any = None) -> Any:
        return self._control.broadcast_object(value)

    def barrier(self) -> None:
        self._control.barrier()

    def close(self) -> None:
        self._control.close()
