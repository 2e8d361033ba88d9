"""Device collectives of a world of one: the fused kernels that come with them serve a single GPU as well."""

from __future__ import annotations

import torch

from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_kernels import load_collectives
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.heap_ipc import IpcHeap
from kernels.build import Build

_DEADLINE_S = 30.0  # there is no peer to wait for, only other CTAs
_CAPACITY = Capacity(one_shot_bytes=1 << 20, two_shot_bytes=1 << 20, rows_bytes=1 << 10)


class DeviceSingle:
    """`collectives` and `vocabulary` of one rank on GPU `device`, which is current and stays so. `ranks_per_gpu`: as of
    `DeviceCollectives`, where others compute there as well.

    *Raises* `DoorbellError` when the kernels cannot be compiled, `ImportError` without cupy.
    """

    is_norm_fused = True

    def __init__(self, build: Build, device: int, ranks_per_gpu: int = 1):
        self.is_one_rank_per_gpu = ranks_per_gpu == 1
        kernels = load_collectives(build)
        self._watch = DeviceWatch(_DEADLINE_S, ranks_per_gpu)
        self._heap = IpcHeap(0, 1, device, layout_for(1, _CAPACITY), lambda value: [value])
        self.collectives = DeviceCollectives(self._heap, self._watch, kernels, _CAPACITY, ranks_per_gpu=ranks_per_gpu)
        self.vocabulary = DeviceVocabulary(self._heap, self._watch, kernels, ranks_per_gpu=ranks_per_gpu)

    def summands(self, rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor | None:
        """None: there is nothing to sum."""
        return None

    def check(self) -> None:
        """*Raises* `PeerTimeout` if a kernel gave up."""
        self._watch.check()
