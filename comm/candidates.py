"""How each communicator of `launch.comm_policy` is opened and tested.

An opener takes a `Site` and the reason to record, and is *collective*. It returns the communicator or raises `DoorbellError`,
alike on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from comm.agreement import agree
from comm.communicator import Communicator
from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_communicator import DeviceCommunicator
from comm.device_kernels import load_collectives
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.gloo import GlooCommunicator
from comm.heap import DeviceHeap, Layout
from comm.heap_ipc import IpcHeap
from comm.heap_posix import PosixHeap
from comm.host_loop import HostLoopCommunicator
from comm.nccl import NcclCommunicator
from comm.nccl_group import NcclGroup
from comm.one_shot import OneShotCommunicator
from comm.self_test import self_test
from comm.site import Site
from comm.words import Patience
from kernels.build import Build, default_cache_folder
from launch.errors import DoorbellError

DEVICE_DEADLINE_S = 30.0  # of a wait in a kernel: a peer may be late by a long step, not by this
DEVICE_TWO_SHOT_BYTES = 16 << 20
DEVICE_TEST_BYTES = 3 << 20  # reaches every kernel of the table, and stays below NCCL's part of it
_DEVICE_TEST_SIZES = (1, 7, 1025, 100_003)
_TEST_DEADLINE_S = 60.0  # ranks of a loaded machine may reach the self-test seconds apart


def _open_one_shot(site: Site, reason: str) -> Communicator:
    world, group = site.world, site.group
    layout = OneShotCommunicator.layout_for(world.size, site.max_bytes)
    heap = PosixHeap(world.rank, world.size, world.run_id, layout, group.exchange)
    patience = Patience.for_ranks(world.local_size, _TEST_DEADLINE_S, site.watch.gone)
    verdict = self_test(OneShotCommunicator(heap, patience, ""), GlooCommunicator(group, ""), site.max_bytes)
    _agree(site, verdict, "its self-test", undo=heap.close)
    patience = Patience.for_ranks(world.local_size, site.deadline_s, site.watch.gone)
    return OneShotCommunicator(heap, patience, reason, group)


def _open_ipc(site: Site, reason: str) -> Communicator:
    world = site.world
    return _open_device(
        site, reason, lambda layout: IpcHeap(world.rank, world.size, world.device.index, layout, site.group.exchange)
    )


def _open_nvshmem(site: Site, reason: str) -> Communicator:
    world = site.world

    def open_heap(layout: Layout) -> DeviceHeap:
        from comm.heap_nvshmem import NvshmemHeap

        return NvshmemHeap(world.rank, world.size, world.device.index, layout, site.group.exchange)

    return _open_device(site, reason, open_heap)


def _open_device(site: Site, reason: str, open_heap: Callable[[Layout], DeviceHeap]) -> Communicator:
    """Our collectives on GPUs. What cannot be had here (no cupy, no compiler) is a reason, not an error."""
    world, group = site.world, site.group
    failure = None
    try:
        kernels = load_collectives(Build(default_cache_folder()))
        device_watch = DeviceWatch(DEVICE_DEADLINE_S, site.standing.ranks_per_gpu)
    except ImportError as error:
        failure = f"{error}; install the cuda12 or cuda13 extra"
    except DoorbellError as error:
        failure = str(error)
    _agree(site, failure, "loading its kernels")
    capacity = Capacity(two_shot_bytes=DEVICE_TWO_SHOT_BYTES)
    heap = open_heap(layout_for(world.size, capacity))
    collectives = DeviceCollectives(heap, device_watch, kernels, capacity, ranks_per_gpu=site.standing.ranks_per_gpu)
    vocabulary = DeviceVocabulary(heap, device_watch, kernels, ranks_per_gpu=site.standing.ranks_per_gpu)
    group.exchange(None)  # all inboxes are ready before anybody sends
    control = GlooCommunicator(group, "")
    open_nccl = (lambda: NcclGroup(group)) if site.standing.is_one_rank_per_gpu else None
    communicator = DeviceCommunicator(
        heap, collectives, vocabulary, device_watch, control, reason, open_nccl, site.algorithm
    )
    return _tested(site, communicator, control, undo=heap.abandon)


def _open_nccl(site: Site, reason: str) -> Communicator:
    control = GlooCommunicator(site.group, "")
    return _tested(site, NcclCommunicator(NcclGroup(site.group), control, reason), control)


def _open_host_loop(site: Site, reason: str) -> Communicator:
    control = GlooCommunicator(site.group, "")
    if site.standing.device != "cuda" or not site.standing.is_one_rank_per_gpu:
        return HostLoopCommunicator(control, reason)  # which is gloo, the reference of the self-test
    return _tested(site, HostLoopCommunicator(control, reason, NcclGroup(site.group)), control)


def _open_gloo(site: Site, reason: str) -> Communicator:
    return GlooCommunicator(site.group, reason)


OPENERS: dict[str, Callable[[Site, str], Communicator]] = {
    "ipc": _open_ipc,
    "nvshmem": _open_nvshmem,
    "nccl": _open_nccl,
    "one_shot": _open_one_shot,
    "gloo": _open_gloo,
    "host_loop": _open_host_loop,
}


def _tested(
    site: Site, communicator: Communicator, control: GlooCommunicator, undo: Callable[[], None] | None = None
) -> Communicator:
    verdict = self_test(communicator, control, DEVICE_TEST_BYTES, site.world.device, _DEVICE_TEST_SIZES)
    _agree(site, verdict, "its self-test", undo)
    return communicator


def _agree(site: Site, failure: str | None, what: str, undo: Callable[[], None] | None = None) -> None:
    """*Collective*. *Raises* on all ranks what failed on one, after `undo` on each."""
    try:
        agree(site.group.exchange, None if failure is None else DoorbellError(failure), what)
    except DoorbellError:
        if undo is not None:
            undo()
        raise
