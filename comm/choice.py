"""Which communicator a world gets, and why: the candidates of `launch.comm_policy`, tried from the top."""

from __future__ import annotations

from collections.abc import Sequence

from comm.board import Board, HeapBoard, StoreBoard
from comm.candidates import OPENERS
from comm.choice_table import FORCED
from comm.communicator import Communicator
from comm.heap_posix import PosixHeap
from comm.peer_process import Identity, PeerProcess
from comm.process_group import ProcessGroup
from comm.single import SingleCommunicator
from comm.site import Site, survey
from comm.watch import PeerWatch
from launch.comm_policy import NAMES, WITH_ALGORITHMS, Candidate, automatic, obstacle, rejections
from launch.errors import EXIT_BUG, CommUnavailable, ConnectError, DoorbellError, PeerLost, UsageError
from launch.world import World

MAX_BYTES = 1 << 20  # one round of the all-reduce; 8 ranks then stay under docker's default of 64 MiB shared memory


def connect(
    world: World,
    requested: str = "auto",
    max_bytes: int = MAX_BYTES,
    deadline_s: float = 600.0,
    stall_s: float = 5.0,
    all_reduce: str = "auto",
) -> Communicator:
    """The communicator of `world`, self-tested; its `name`, `reason` and `detail` are for the start summary.

    `requested`: `auto`, or the only candidate to take. `max_bytes`: largest message reduced in one round. `deadline_s`:
    how long a collective waits for a living peer. `stall_s`: how long a peer may be silent. `all_reduce`: of
    `comm.choice_table.FORCED`, for comparisons; one that is named rules out what has no such algorithm. `.watch` is ready but
    not started.

    *Collective.* *Raises* `UsageError` for an unknown name or names that do not go together, `ConnectError` when the ranks do
    not find each other, `HeapExhausted`, `CommUnavailable` or another `DoorbellError` when what was asked for by name is not
    possible here.
    """
    _check_names(world, requested, all_reduce)
    if world.size == 1:
        return SingleCommunicator()
    group = ProcessGroup(world, deadline_s)
    watch = _open_watch(world, group, stall_s)
    try:
        site = Site(world, group, watch, survey(world, group), max_bytes, deadline_s, FORCED[all_reduce])
        if requested != "auto":
            communicator = _open_asked_for(site, requested)
        else:
            communicator = _open_best(site) if all_reduce == "auto" else _open_with_algorithm(site, all_reduce)
    except DoorbellError as error:
        watch.leave(error.exit_code, str(error))
        watch.close()
        group.close()
        raise
    communicator.watch = watch
    return communicator


def _check_names(world: World, requested: str, all_reduce: str) -> None:
    if requested not in ("auto", *NAMES):
        raise UsageError(f"communication {requested!r} is not known; choose auto, {', '.join(NAMES[:-1])} or {NAMES[-1]}")
    if all_reduce not in FORCED:
        *names, last = FORCED
        raise UsageError(f"the all-reduce {all_reduce!r} is not known; choose {', '.join(names)} or {last}")
    if all_reduce == "auto":
        return
    if world.size == 1:
        raise UsageError(f"--all-reduce {all_reduce} is how ranks add, and this run has one rank")
    able = [candidate.name for candidate in WITH_ALGORITHMS]
    if requested not in ("auto", *able):
        raise UsageError(f"--all-reduce {all_reduce} goes with --comm {' or '.join(able)}, not with {requested}")


def _open_asked_for(site: Site, name: str) -> Communicator:
    why = obstacle(name, site.standing)
    if why is not None:
        raise CommUnavailable(f"--comm {name} is not possible here: {why}")
    try:
        return OPENERS[name](site, "asked for")
    except DoorbellError as error:
        if error.exit_code != EXIT_BUG:  # it says itself whose mistake it is
            raise
        raise CommUnavailable(f"--comm {name} is not possible here: {error}") from error


def _open_best(site: Site) -> Communicator:
    """The first candidate with nothing in its way that opens and passes its self-test. *Raises* when the last does not."""
    *first, last = automatic(site.standing.device)
    communicator, obstacles = _open_first(site, first)
    return OPENERS[last.name](site, _reason(site, last, obstacles)) if communicator is None else communicator


def _open_with_algorithm(site: Site, all_reduce: str) -> Communicator:
    """As `_open_best`, of the candidates that have algorithms. *Raises* `CommUnavailable` when none of them can be had."""
    communicator, obstacles = _open_first(site, WITH_ALGORITHMS)
    if communicator is None:
        raise CommUnavailable(f"--all-reduce {all_reduce} is not possible here: {'; '.join(rejections(obstacles))}")
    return communicator


def _open_first(site: Site, candidates: Sequence[Candidate]) -> tuple[Communicator | None, list[tuple[str, str]]]:
    """The first of `candidates` that opens, or None, and what was in the way of those before it."""
    obstacles: list[tuple[str, str]] = []
    for candidate in candidates:
        why = obstacle(candidate.name, site.standing)
        if why is None:
            try:
                return OPENERS[candidate.name](site, _reason(site, candidate, obstacles)), obstacles
            except (ConnectError, PeerLost):  # no other candidate would do better
                raise
            except DoorbellError as error:
                why = str(error)
        obstacles.append((candidate.name, why))
    return None, obstacles


def _reason(site: Site, candidate: Candidate, obstacles: list[tuple[str, str]]) -> str:
    standing = site.standing
    sharing = [] if standing.is_one_rank_per_gpu else [f"{standing.num_ranks} ranks share {standing.gpus}"]
    return "; ".join([*rejections(obstacles), candidate.reason, *sharing])


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
