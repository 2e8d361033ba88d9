"""A world of GPU ranks for tests: as many ranks as asked for, dealt to the GPUs there are (several on one need MPS)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_kernels import load_collectives
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.heap_ipc import IpcHeap
from comm.heap_nvshmem import NvshmemHeap
from comm.process_group import ProcessGroup
from kernels.build import Build, default_cache_folder
from launch.world import World

HEAPS = {heap.kind: heap for heap in (IpcHeap, NvshmemHeap)}


@dataclass
class DeviceWorld:
    rank: int
    size: int
    group: ProcessGroup
    collectives: DeviceCollectives
    vocabulary: DeviceVocabulary
    watch: DeviceWatch

    def agree(self, value: object) -> list:
        return self.group.exchange(value)


@contextmanager
def device_world(
    rank: int, size: int, deadline_s: float = 10.0, is_pdl: bool = True, heap_kind: str = "ipc"
) -> Iterator[DeviceWorld]:
    device = rank % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.zeros(1, device="cuda")
    world = World(rank, size, rank, size, "test", True, torch.device("cuda", device))
    group = ProcessGroup(world, 120.0)
    capacity = Capacity(two_shot_bytes=64 << 20 if size == 2 else 8 << 20)
    heap = HEAPS[heap_kind](rank, size, device, layout_for(size, capacity), group.exchange)
    per_gpu = -(-size // torch.cuda.device_count())
    watch = DeviceWatch(deadline_s, per_gpu)
    kernels = load_collectives(Build(default_cache_folder()))
    collectives = DeviceCollectives(heap, watch, kernels, capacity, is_pdl, per_gpu)
    vocabulary = DeviceVocabulary(heap, watch, kernels, is_pdl, per_gpu)
    group.exchange(None)
    try:
        yield DeviceWorld(rank, size, group, collectives, vocabulary, watch)
    except AssertionError:
        watch.check()  # a kernel that gave up explains a wrong result
        raise
    torch.cuda.synchronize()
    watch.check()
    heap.close()
    group.close()
