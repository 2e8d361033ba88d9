"""The communicator of ranks on GPUs of one machine: our own collectives for tensors on the GPU, gloo for words between hosts.

Which all-reduce a message takes is a table, from measurements on two H200 over NVLink (`results/all_reduce.jsonl`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comm.communicator import Communicator
from comm.device_collectives import ELEMS, DeviceCollectives
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.gloo import GlooCommunicator
from comm.heap import DeviceHeap

# Largest message in bytes, and the kernel that was fastest up to there. Above the last: two-shot.
CHOICE = ((64 << 10, "all_reduce_lamport"), (2 << 20, "all_reduce_sentinel"))
LARGE = "all_reduce_two_shot"


class DeviceCommunicator(Communicator):
    """`Communicator` over `collectives` and `vocabulary`; `control` carries what is not on the GPU. Closes `heap` and `control`.

    Reductions are enqueued on torch's current stream and never wait for the host. A kernel that gave up waiting for a peer is
    noticed at the next call.
    """

    name = "ipc"

    def __init__(
        self,
        heap: DeviceHeap,
        collectives: DeviceCollectives,
        vocabulary: DeviceVocabulary,
        device_watch: DeviceWatch,
        control: GlooCommunicator,
        reason: str,
    ):
        self.rank, self.size, self.reason = heap.rank, heap.size, reason
        self._heap, self._collectives, self._device_watch, self._control = heap, collectives, device_watch, control
        self.vocabulary = vocabulary

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._device_watch.check()
        if not x.is_cuda or x.dtype not in ELEMS:
            return self._control.all_reduce(x)
        num_bytes = x.numel() * x.element_size()
        name = next((name for limit, name in CHOICE if num_bytes <= limit), LARGE)
        getattr(self._collectives, name)(x)
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Never waits for the host where `x` is on the GPU and of a type of `ELEMS`; gloo carries what is not."""
        self._device_watch.check()
        if not x.is_cuda or x.dtype not in ELEMS:
            return self._control.gather(x)
        return self.vocabulary.gather(x.contiguous(), root=0)

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        self._device_watch.check()
        return self._control.broadcast_ints(values)

    def broadcast_object(self, value: Any = None) -> Any:
        return self._control.broadcast_object(value)

    def barrier(self) -> None:
        self._control.barrier()

    def close(self) -> None:
        """Unmap in order if all ranks end in order; otherwise leave it to the end of the processes."""
        if self.watch is not None and self.watch.is_orderly:
            self._heap.close()
        else:
            self._heap.abandon()
        if self.watch is not None:
            self.watch.close()
        self._control.close()
