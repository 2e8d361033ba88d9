"""Which communicator a world gets, and what it is told about it."""

import math

import pytest
import torch

from comm import candidates, choice
from comm.choice import connect
from comm.gloo import GlooCommunicator
from comm.one_shot import OneShotCommunicator
from comm.self_test import self_test
from launch.environment import Environment
from launch.errors import EXIT_MODEL, CommUnavailable, DoorbellError, HeapExhausted, PeerTimeout, UsageError
from launch.world import World
from tests.ranks_harness import RankFailed, run_ranks


def world_here():
    return World.from_environment(Environment.read())


def test_a_world_of_one_needs_nothing():
    communicator = connect(World())
    assert (communicator.name, communicator.size, communicator.watch) == ("none", 1, None)


def test_unknown_names_are_refused_before_any_connection():
    with pytest.raises(UsageError, match="'nvlink' is not known; choose auto, ipc, nvshmem, nccl, one_shot, gloo or host_loop"):
        connect(World(rank=0, size=2, local_size=2), "nvlink")


def connect_and_sum(rank, size, requested, max_bytes):
    communicator = connect(world_here(), requested, max_bytes)
    total = communicator.all_reduce(torch.ones(10)).sum().item()
    communicator.close()
    return communicator.name, communicator.reason, total


def test_auto_takes_the_heap():
    assert run_ranks(2, connect_and_sum, "auto", 4096) == [("one_shot", "ranks share memory", 20.0)] * 2


def test_auto_falls_back_to_gloo_and_says_why():
    for name, reason, total in run_ranks(2, connect_and_sum, "auto", 1 << 50):
        assert (name, total) == ("gloo", 20.0)
        assert reason.startswith("not one_shot: shared memory in /dev/shm is too small") and "--shm-size" in reason
        assert "\n" not in reason


def expect_exhausted(rank, size):
    with pytest.raises(HeapExhausted, match="--shm-size"):
        connect(world_here(), "one_shot", 1 << 50)


def test_what_was_asked_for_by_name_is_not_replaced():
    run_ranks(2, expect_exhausted)


def expect_refusals(rank, size):
    for name in ("ipc", "nvshmem", "nccl"):
        with pytest.raises(CommUnavailable) as caught:
            connect(world_here(), name)
        assert str(caught.value) == f"--comm {name} is not possible here: it needs GPUs, and this run computes on cpu"
        assert caught.value.exit_code == EXIT_MODEL


def test_what_needs_gpus_is_refused_with_one_sentence_on_cpus():
    run_ranks(2, expect_refusals)


@pytest.mark.parametrize(
    "size, requested, all_reduce, words",
    [
        (2, "auto", "ring", "the all-reduce 'ring' is not known; choose auto, lamport or one_shot"),
        (2, "nccl", "lamport", "--all-reduce lamport goes with --comm ipc or nvshmem, not with nccl"),
        (2, "one_shot", "one_shot", "--all-reduce one_shot goes with --comm ipc or nvshmem, not with one_shot"),
        (1, "auto", "lamport", "--all-reduce lamport is how ranks add, and this run has one rank"),
    ],
)
def test_an_all_reduce_that_cannot_be_meant_is_refused_before_any_connection(size, requested, all_reduce, words):
    with pytest.raises(UsageError) as caught:
        connect(World(rank=0, size=size, local_size=size), requested, all_reduce=all_reduce)
    assert str(caught.value) == words


def expect_no_algorithms(rank, size):
    with pytest.raises(CommUnavailable) as caught:
        connect(world_here(), all_reduce="lamport")
    why = "not ipc or nvshmem: it needs GPUs, and this run computes on cpu"
    assert str(caught.value) == f"--all-reduce lamport is not possible here: {why}"
    assert caught.value.exit_code == EXIT_MODEL


def test_an_all_reduce_of_gpus_is_refused_on_cpus():
    run_ranks(2, expect_no_algorithms)


def open_made_up(rank, size, broken):
    opened = []

    def stand_in(name):
        def open_it(site, reason):
            opened.append((name, site.algorithm, reason))
            if name in broken:
                raise DoorbellError(f"{name} is broken")
            return GlooCommunicator(site.group, reason)

        return open_it

    for name in ("ipc", "nvshmem", "gloo"):
        candidates.OPENERS[name] = stand_in(name)
    choice.obstacle = lambda name, standing: None
    try:
        connect(world_here(), all_reduce="one_shot").close()
    except CommUnavailable as error:
        opened.append(str(error))
    return opened


def test_the_algorithm_reaches_whoever_has_it_and_nobody_else_is_tried():
    ipc = ("ipc", "all_reduce_one_shot", "GPUs reach each other's memory")
    assert run_ranks(2, open_made_up, ()) == [[ipc]] * 2
    nvshmem = ("nvshmem", "all_reduce_one_shot", "not ipc: ipc is broken; GPUs reach each other's memory through NVSHMEM")
    assert run_ranks(2, open_made_up, ("ipc",)) == [[ipc, nvshmem]] * 2
    refusal = "--all-reduce one_shot is not possible here: not ipc: ipc is broken; not nvshmem: nvshmem is broken"
    assert run_ranks(2, open_made_up, ("ipc", "nvshmem")) == [[ipc, nvshmem, refusal]] * 2


def break_rank_1_and_connect(rank, size):
    if rank == 1:

        class Wrong(OneShotCommunicator):
            def all_reduce(self, x):
                return super().all_reduce(x).nan_to_num_(1.0)

        candidates.OneShotCommunicator = Wrong
    return connect_and_sum(rank, size, "auto", 4096)


def test_a_path_that_fails_its_self_test_on_one_rank_is_left_by_all():
    for name, reason, _ in run_ranks(3, break_rank_1_and_connect):
        assert name == "gloo"
        assert "its self-test failed on rank 1: its sum of" in reason


class WrongSum(GlooCommunicator):
    def all_reduce(self, x):
        return super().all_reduce(x).mul_(1.0 if x.numel() < 1025 else 1.001)


class SumFromZero(GlooCommunicator):
    """Loses the sign of -0.0, which only a comparison of bits sees."""

    def all_reduce(self, x):
        return super().all_reduce(x).add_(0.0)


class OtherOrder(GlooCommunicator):
    """Right, but as NCCL is: from the last rank to the first, rounded to the tensor's dtype after each addition."""

    is_rank_order = False

    def all_reduce(self, x):
        parts = self._all_gather(x.view(-1))
        total = parts[-1].clone()
        for part in reversed(parts[:-1]):
            total += part
        x.view(-1).copy_(total)
        return x


class OtherOrderOffByOne(OtherOrder):
    """One wrong element, by a little more than rounding can explain."""

    def all_reduce(self, x):
        super().all_reduce(x)
        if x.numel() >= 1025:
            x.view(-1)[700] += 1e-5
        return x


class OtherOrderWithoutRank1(OtherOrder):
    """Loses a rank's small integers only: random sums are not touched."""

    def all_reduce(self, x):
        is_integer = bool(torch.equal(x, x.nan_to_num().round()))
        own = x.clone()
        super().all_reduce(x)
        return x.copy_(own) if is_integer and x.numel() == 1025 else x


class OtherOrderNoNan(OtherOrder):
    def all_reduce(self, x):
        return super().all_reduce(x).nan_to_num_(0.0, math.inf, -math.inf)


class WrongGather(GlooCommunicator):
    def gather(self, x):
        gathered = super().gather(x)
        return None if gathered is None else gathered.flip(-1)


class WrongBroadcast(GlooCommunicator):
    def broadcast_ints(self, values):
        return super().broadcast_ints(values)[:-1]


class Stuck(GlooCommunicator):
    def barrier(self):
        raise PeerTimeout(1, "rank 1 did not arrive at barrier number 1")


def verdicts_on_wrong_communicators(rank, size):
    right = connect(world_here(), "gloo")
    wrong_ones = (GlooCommunicator, WrongSum, SumFromZero, WrongGather, WrongBroadcast, Stuck)
    return [self_test(wrong(right._group, ""), right, 4096) for wrong in wrong_ones]


def test_self_test_finds_each_kind_of_fault():
    first, second = run_ranks(2, verdicts_on_wrong_communicators)
    assert first == [
        None,
        "its sum of 1025 float32 values is wrong",
        "its sum of 1 float32 values is wrong",
        "its gather is wrong",
        "its broadcast is wrong",
        "rank 1 did not arrive at barrier number 1",
    ]
    assert second == [None, *first[1:3], None, *first[4:]]  # only rank 0 sees what was gathered


def verdicts_without_rank_order(rank, size):
    right = connect(world_here(), "gloo")
    kinds = (OtherOrder, OtherOrderOffByOne, OtherOrderWithoutRank1, OtherOrderNoNan)
    return [self_test(kind(right._group, ""), right, 4096) for kind in kinds]


def test_self_test_allows_another_order_of_sums_and_nothing_else():
    for verdicts in run_ranks(3, verdicts_without_rank_order):
        assert verdicts == [
            None,
            "its sum of 1025 float32 values is wrong",
            "its sum of 1025 float32 values is wrong",
            "its sum of 7 float32 values is wrong",
        ]


def lose_rank_1_before_it_connects(rank, size):
    if rank == 1:
        raise SystemExit(7)
    connect(world_here())


def test_a_rank_that_never_comes_does_not_hang_the_harness():
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, lose_rank_1_before_it_connects)
    assert caught.value.rank == 1
