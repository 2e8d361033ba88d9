"""The communicator of ranks on GPUs of one machine: our own collectives for tensors on the GPU, gloo for words between hosts.

Which all-reduce a message takes is the table of `comm.choice_table`, unless one of them is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from comm.choice_table import LAMPORT, NCCL, describe, describe_forced, pick
from comm.controlled import ControlledCommunicator
from comm.device_collectives import DeviceCollectives
from comm.device_kernels import load_signal
from comm.device_signal import DeviceSignalChannel
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.draft_channels import open_draft_channels
from comm.gloo import GlooCommunicator
from comm.heap import DeviceHeap
from comm.nccl_group import NcclGroup
from comm.stream_deadline import StreamDeadline
from kernels.build import Build
from kernels.elements import ELEMS
from launch.errors import ConnectError, DoorbellError, PeerLost

STREAM_GRACE_S = 10.0  # of a stream's deadline beyond that of kernels, which can say for whom they waited


class DeviceCommunicator(ControlledCommunicator):
    """`Communicator` over `collectives` and `vocabulary`, named after what `heap` is made of. Closes `heap` and `control`.

    Reductions are enqueued on torch's current stream and never wait for the host, but where ranks share a GPU and no graph is
    captured: there one waits until all ranks have computed what they sum. A kernel that gave up waiting for a peer is noticed at
    the next call.

    `open_nccl` connects NCCL, which takes the largest messages; None where ranks share GPUs. It is called at the first such
    message, on all ranks alike because they make the same calls, and never inside a graph capture, where NCCL is not used.
    `algorithm`: a method of `collectives` that takes all messages of `all_reduce`, instead of the table and of NCCL.
    `is_norm_fused`: whether a sum and the norm behind it may be one kernel, which adds as `all_reduce_lamport` does.
    *Numbers*: those of NCCL for the messages that it takes, rank order for all others.
    """

    is_capturable = True

    def __init__(
        self,
        heap: DeviceHeap,
        collectives: DeviceCollectives,
        vocabulary: DeviceVocabulary,
        device_watch: DeviceWatch,
        control: GlooCommunicator,
        reason: str,
        open_nccl: Callable[[], NcclGroup] | None = None,
        algorithm: str | None = None,
    ):
        super().__init__(control, reason)
        self.name = heap.kind
        self._heap, self._device_watch = heap, device_watch
        self.collectives, self.vocabulary = collectives, vocabulary
        self.is_one_rank_per_gpu = open_nccl is not None
        self._open_nccl, self._nccl = open_nccl, None
        self._algorithm, self.is_norm_fused = algorithm, algorithm in (None, LAMPORT)
        self.detail = describe(self.size, self.is_one_rank_per_gpu) if algorithm is None else describe_forced(algorithm)
        self._stream_deadlines: list[StreamDeadline] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._device_watch.check()
        if not x.is_cuda or x.dtype not in ELEMS:
            return self._control.all_reduce(x)
        self.meet(is_idle=True)
        num_bytes = x.numel() * x.element_size()
        algorithm = self._algorithm or pick(num_bytes, self.size, self.is_one_rank_per_gpu, is_capturing=False)
        if algorithm == NCCL:
            nccl = None if torch.cuda.is_current_stream_capturing() else self._connected_nccl()
            if nccl is not None:
                return nccl.all_reduce(x)
            algorithm = pick(num_bytes, self.size, self.is_one_rank_per_gpu, is_capturing=True)
        getattr(self.collectives, algorithm)(x)
        return x

    def summands(self, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor | None:
        """As `DeviceCollectives.summands`; None as well where one algorithm is asked for."""
        return None if self._algorithm is not None else self.collectives.summands(rows, hidden, dtype)

    def meet(self, is_idle: bool = False) -> None:
        if self.is_one_rank_per_gpu or torch.cuda.is_current_stream_capturing():
            return
        if is_idle:
            torch.cuda.current_stream().synchronize()
        self.barrier()

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Never waits for the host where `x` is on the GPU and of a type of `ELEMS`; gloo carries what is not."""
        self._device_watch.check()
        if not x.is_cuda or x.dtype not in ELEMS:
            return self._control.gather(x)
        self.meet(is_idle=True)
        return self.vocabulary.gather(x.contiguous(), root=0)

    def broadcast_ints(self, values: Sequence[int] | None) -> list[int]:
        self._device_watch.check()
        return super().broadcast_ints(values)

    def check(self) -> None:
        self._device_watch.check()
        super().check()

    def close(self) -> None:
        """Unmap in order if all ranks end in order; otherwise leave it to the end of the processes."""
        while self._stream_deadlines:
            self._stream_deadlines.pop().close()
        if self.watch is not None and self.watch.is_orderly:
            self._heap.close()
        else:
            self._heap.abandon()
        super().close()

    def draft_channels(self, build: Build, wait: str = "kernel") -> list[DeviceSignalChannel]:
        """As `open_draft_channels`. A stream's waits end after the limit of kernels and `STREAM_GRACE_S`, counted for each launch
        that `note_launch` is told of. *Raises* `DoorbellError` when the kernels cannot be compiled."""
        kernels, deadline = load_signal(build), None
        if wait == "stream" and self.rank > 0:  # rank 0 hands on and takes nothing
            deadline = StreamDeadline(self._device_watch, self._device_watch.limit_s + STREAM_GRACE_S)
            self._stream_deadlines.append(deadline)
        return open_draft_channels(self._heap, self._device_watch, kernels, self.is_one_rank_per_gpu, wait, deadline)

    def _connected_nccl(self) -> NcclGroup | None:
        """*Collective* the first time. None for good when NCCL does not connect, which rank 0 says once."""
        if self._nccl is None and self._open_nccl is not None:
            open_nccl, self._open_nccl = self._open_nccl, None
            try:
                self._nccl = open_nccl()
            except (PeerLost, ConnectError):  # then there is nobody to go on with
                raise
            except DoorbellError as error:
                if self.rank == 0:
                    print(f"doorbell: large messages stay with our own all-reduce: {error}", file=sys.stderr, flush=True)
        return self._nccl
