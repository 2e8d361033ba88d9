"""Which communicator a world gets, and why: a table, tried from the top."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from comm.board import Board, HeapBoard, StoreBoard
from comm.communicator import Communicator
from comm.device_collectives import Capacity, DeviceCollectives, layout_for
from comm.device_communicator import DeviceCommunicator
from comm.device_kernels import load_collectives
from comm.device_vocabulary import DeviceVocabulary
from comm.device_watch import DeviceWatch
from comm.gloo import GlooCommunicator
from comm.heap_ipc import IpcHeap
from comm.heap_posix import PosixHeap
from comm.one_shot import OneShotCommunicator
from comm.peer_process import Identity, PeerProcess
from comm.process_group import ProcessGroup
from comm.self_test import self_test
from comm.single import SingleCommunicator
from comm.watch import PeerWatch
from comm.words import Patience
from kernels.build import Build, default_cache_folder
from launch.errors import ConnectError, DoorbellError, PeerLost, UsageError
from launch.world import World

MAX_BYTES = 1 << 20  # one round of the all-reduce; 8 ranks then stay under docker's default of 64 MiB shared memory
DEVICE_DEADLINE_S = 30.0  # of a wait in a kernel: a peer may be late by a long step, not by this
DEVICE_TWO_SHOT_BYTES = 16 << 20
DEVICE_TEST_BYTES = 3 << 20  # reaches every kernel of the table
_TEST_DEADLINE_S = 60.0  # ranks of a loaded machine may reach the self-test seconds apart


@dataclass(frozen=True)
class _Site:
    """What a candidate may build on."""

    world: World
    group: ProcessGroup
    watch: PeerWatch
    max_bytes: int
    deadline_s: float


@dataclass(frozen=True)
class _Candidate:
    """A row of the table. `open(site, reason)` returns the communicator or raises `DoorbellError`, alike on all ranks.

    `device`: the kind of device it is for, None for any; on others it is no candidate unless asked for by name.
    """

    name: str
    reason: str
    open: Callable[[_Site, str], Communicator]
    device: str | None = None


def connect(
    world: World,
    requested: str = "auto",
    max_bytes: int = MAX_BYTES,
    deadline_s: float = 600.0,
    stall_s: float = 5.0,
) -> Communicator:
    """The communicator of `world`, self-tested; its `name` and `reason` are for the start summary.

    `requested`: `auto`, or the only candidate to take. `max_bytes`: largest message reduced in one round. `deadline_s`:
    how long a collective waits for a living peer. `stall_s`: how long a peer may be silent. `.watch` is ready but not
    started.

    *Collective.* *Raises* `UsageError` for an unknown name, `ConnectError` when the ranks do not find each other,
    `HeapExhausted` or another `DoorbellError` when a candidate asked for by name is not possible here.
    """
    names = [candidate.name for candidate in _CANDIDATES]
    if requested not in ("auto", *names):
        raise UsageError(f"communication {requested!r} is not known; choose auto, {' or '.join(names)}")
    if world.size == 1:
        return SingleCommunicator()
    group = ProcessGroup(world, deadline_s)
    site = _Site(world, group, _open_watch(world, group, stall_s), max_bytes, deadline_s)
    rejected: list[str] = []
    for candidate in _CANDIDATES:
        if requested not in ("auto", candidate.name):
            continue
        if requested == "auto" and candidate.device not in (None, world.device.type):
            continue
        reason = "asked for" if requested != "auto" else "; ".join([*rejected, candidate.reason])
        try:
            communicator = candidate.open(site, reason)
        except DoorbellError as error:
            is_peer_gone = isinstance(error, (ConnectError, PeerLost))  # then no other candidate would do better
            if is_peer_gone or requested != "auto" or candidate is _CANDIDATES[-1]:
                site.watch.leave(error.exit_code, str(error))
                site.watch.close()
                group.close()
                raise
            rejected.append(f"not {candidate.name}: {error}")
            continue
        communicator.watch = site.watch
        return communicator
    raise AssertionError("unreachable: the last candidate either opened or raised")


def _open_one_shot(site: _Site, reason: str) -> Communicator:
    world, group = site.world, site.group
    if world.device.type != "cpu":
        raise DoorbellError(f"it sums in host memory, and this run computes on {world.device.type}")
    if not world.is_single_node:
        raise DoorbellError("the ranks are on several machines")
    layout = OneShotCommunicator.layout_for(world.size, site.max_bytes)
    heap = PosixHeap(world.rank, world.size, world.run_id, layout, group.exchange)
    patience = Patience.for_ranks(world.local_size, _TEST_DEADLINE_S, site.watch.gone)
    verdict = self_test(OneShotCommunicator(heap, patience, ""), GlooCommunicator(group, ""), site.max_bytes)
    _agree_or_raise(group, verdict, "its self-test failed on ", undo=heap.close)
    patience = Patience.for_ranks(world.local_size, site.deadline_s, site.watch.gone)
    return OneShotCommunicator(heap, patience, reason, group)


def _open_ipc(site: _Site, reason: str) -> Communicator:
    """Our collectives on GPUs. What cannot be had here (no cupy, no compiler, no peer access) is a reason, not an error."""
    world, group = site.world, site.group
    if world.device.type != "cuda":
        raise DoorbellError(f"it needs GPUs, and this run computes on {world.device.type}")
    if not world.is_single_node:
        raise DoorbellError("the ranks are on several machines")
    failure = None
    try:
        torch.cuda.set_device(world.device)
        kernels = load_collectives(Build(default_cache_folder()))
        device_watch = DeviceWatch(DEVICE_DEADLINE_S)
    except (DoorbellError, ImportError) as error:
        failure = str(error)
    _agree_or_raise(group, failure)
    capacity = Capacity(two_shot_bytes=DEVICE_TWO_SHOT_BYTES)
    heap = IpcHeap(world.rank, world.size, world.device.index, layout_for(world.size, capacity), group.exchange)
    ranks_per_gpu = -(-world.local_size // torch.cuda.device_count())
    collectives = DeviceCollectives(heap, device_watch, kernels, capacity, ranks_per_gpu=ranks_per_gpu)
    vocabulary = DeviceVocabulary(heap, device_watch, kernels, ranks_per_gpu=ranks_per_gpu)
    group.exchange(None)  # all inboxes are ready before anybody sends
    control = GlooCommunicator(group, "")
    communicator = DeviceCommunicator(heap, collectives, vocabulary, device_watch, control, reason)
    verdict = self_test(communicator, control, DEVICE_TEST_BYTES, world.device, (1, 7, 1025, 100_003))
    _agree_or_raise(group, verdict, "its self-test failed on ", undo=heap.abandon)
    return communicator


def _agree_or_raise(
    group: ProcessGroup, failure: str | None, what: str = "", undo: Callable[[], None] | None = None
) -> None:
    """*Collective*. *Raises* on all ranks what failed on one, after `undo` on each; `what` comes before the rank's name."""
    failures = [(peer, text) for peer, text in enumerate(group.exchange(failure)) if text is not None]
    if failures:
        if undo is not None:
            undo()
        peer, text = failures[0]
        raise DoorbellError(f"{what}rank {peer}: {text}")


def _open_gloo(site: _Site, reason: str) -> Communicator:
    return GlooCommunicator(site.group, reason)


_CANDIDATES = (
    _Candidate("ipc", "GPUs reach each other's memory", _open_ipc, "cuda"),
    _Candidate("one_shot", "ranks share memory", _open_one_shot, "cpu"),
    _Candidate("gloo", "works everywhere", _open_gloo),
)


def _open_watch(world: World, group: ProcessGroup, stall_s: float) -> PeerWatch:
    here = Identity.of_this_process()
    identities = [Identity(*fields) for fields in group.exchange([here.pid, here.start_ticks, here.namespace])]
    processes = {peer: PeerProcess(identity, here) for peer, identity in enumerate(identities) if peer != world.rank}
    return PeerWatch(world.rank, _open_board(world, group), processes, stall_s)


def _open_board(world: World, group: ProcessGroup) -> Board:
    if world.is_single_node:
        try:
            return HeapBoard(PosixHeap(world.rank, world.size, world.run_id, HeapBoard.LAYOUT, group.exchange))
        except DoorbellError:
            pass  # no shared memory at all; all ranks agree on that, and the store serves
    return StoreBoard(group.store(), world.rank)
