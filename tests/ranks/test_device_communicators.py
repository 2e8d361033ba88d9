"""Every communicator that GPUs can have, opened by `connect` as a run does, by value. One GPU needs MPS; NCCL needs two."""

from __future__ import annotations

import pytest
import torch

from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 7, 1000, 8197, 65_536, 300_001, 1_500_000)  # up to 6 MB: reaches lamport, sentinel and two-shot
LARGE = (40 << 20) // 4  # fp32 elements of a message that the table gives to NCCL
HAS_TWO = torch.cuda.device_count() > 1
needs_two = pytest.mark.skipif(not HAS_TWO, reason="ranks share a GPU, which NCCL refuses")


def open_world(requested: str, all_reduce: str = "auto"):
    from comm.choice import connect
    from launch.devices import resolve_device
    from launch.environment import Environment
    from launch.world import World

    environment = Environment.read()
    world = World.from_environment(environment, resolve_device("cuda", environment, is_sharing=True))
    return connect(world, requested, all_reduce=all_reduce)


def integers(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, different for each rank: every order of every dtype sums them exactly."""
    return ((torch.arange(n, device="cuda") * (rank + 3) + 5 * rank) % 17 - 8).to(dtype)


def check_sums(comm) -> None:
    for dtype in DTYPES:
        for n in SIZES:
            # Two poisoned guards around the message, and a second message straight behind the first.
            room = torch.full((n + 32,), float("nan"), device="cuda", dtype=dtype)
            x = room[16 : n + 16]
            x.copy_(integers(comm.rank, n, dtype))
            wanted = sum(integers(peer, n, torch.float32) for peer in range(comm.size)).to(dtype)
            assert comm.all_reduce(x) is x
            assert torch.equal(x, wanted), (comm.name, dtype, n)
            assert comm.all_reduce(x) is x
            assert torch.equal(x, (wanted.float() * comm.size).to(dtype)), (comm.name, dtype, n, "again")
            assert room[:16].isnan().all() and room[n + 16 :].isnan().all(), "wrote around the message"


def check_gather_and_words(comm) -> None:
    for dtype in (*DTYPES, torch.float64):
        mine = (torch.arange(3 * 1001, device="cuda") % 100 + comm.rank).view(3, 1001).to(dtype)
        before = mine.clone()
        whole = comm.gather(mine)
        assert torch.equal(mine, before), "changed its input"
        if comm.rank == 0:
            parts = [(torch.arange(3 * 1001, device="cuda") % 100 + peer).view(3, 1001) for peer in range(comm.size)]
            assert torch.equal(whole, torch.cat(parts, dim=-1).to(dtype)), (comm.name, dtype)
        else:
            assert whole is None
    assert comm.broadcast_ints([5, -7, 2**62] if comm.rank == 0 else None) == [5, -7, 2**62]
    assert comm.broadcast_object({"a": [1, None]} if comm.rank == 0 else None) == {"a": [1, None]}
    comm.barrier()


def check_communicator(rank: int, size: int, requested: str, all_reduce: str = "auto") -> tuple[str, str, str]:
    comm = open_world(requested, all_reduce)
    check_sums(comm)
    check_gather_and_words(comm)
    said = comm.name, comm.reason, comm.detail
    comm.close()
    return said


@pytest.mark.parametrize("requested", ["ipc", pytest.param("nccl", marks=needs_two), "host_loop", "gloo"])
def test_sums_gather_and_words(requested: str) -> None:
    for name, reason, detail in run_ranks(2, check_communicator, requested, timeout_s=120):
        assert (name, reason) == (requested, "asked for")
        assert ("NCCL" in detail) == (HAS_TWO and requested == "host_loop")


@pytest.mark.parametrize("all_reduce", ["lamport", "one_shot"])
def test_one_algorithm_for_messages_of_any_size(all_reduce: str) -> None:
    for name, _, detail in run_ranks(2, check_communicator, "auto", all_reduce, timeout_s=120):
        assert name == "ipc" and detail == f"{all_reduce.replace('_', '-')} for messages of any size, as --all-reduce asks"


def test_ranks_that_share_gpus() -> None:
    """Under MPS: host_loop through host memory, and a choice that says how many share."""
    size = 4
    for name, _, detail in run_ranks(size, check_communicator, "host_loop", timeout_s=120):
        assert name == "host_loop" and detail.startswith("gloo through host memory")
    for name, reason, detail in run_ranks(size, check_communicator, "auto", timeout_s=120):
        assert name == "ipc" and f"{size} ranks share" in reason and "nccl" not in detail


def choose(rank: int, size: int, requested: str) -> tuple[str, str]:
    from launch.errors import DoorbellError

    try:
        comm = open_world(requested)
    except DoorbellError as error:
        return type(error).__name__, str(error)
    said = comm.name, comm.reason
    comm.close()
    return said


@needs_two
def test_auto_takes_ipc_on_two_gpus_and_says_why() -> None:
    assert run_ranks(2, choose, "auto", timeout_s=60) == [("ipc", "GPUs reach each other's memory")] * 2


def test_nccl_is_refused_before_it_hangs_where_ranks_share_gpus() -> None:
    size = torch.cuda.device_count() + 1
    for kind, message in run_ranks(size, choose, "nccl", timeout_s=60):
        assert kind == "CommUnavailable"
        assert message.startswith(f"--comm nccl is not possible here: NCCL refuses {size} ranks on ")


def break_ipc_and_choose(rank: int, size: int) -> tuple[str, str]:
    """Rank 1's kernels give one wrong element."""
    from comm.device_collectives import DeviceCollectives

    right = DeviceCollectives.all_reduce_lamport

    def wrong(self, x, *args):
        result = right(self, x, *args)
        if x.numel() == 1025:
            result[1000] += 1
        return result

    if rank == 1:
        DeviceCollectives.all_reduce_lamport = wrong
    return choose(rank, size, "auto")


@needs_two
def test_kernels_that_sum_wrongly_on_one_rank_are_left_by_all() -> None:
    for name, reason in run_ranks(2, break_ipc_and_choose, timeout_s=90):
        assert name == "nccl"
        assert "self-test failed on rank 1: its sum of 1025 float32 values is wrong" in reason


def send_large(rank: int, size: int) -> None:
    comm = open_world("ipc")
    wanted = sum(integers(peer, LARGE, torch.float32) for peer in range(size))

    def check(x: torch.Tensor, how: str) -> None:
        torch.cuda.synchronize()
        assert torch.equal(x, wanted), how

    x = torch.full((LARGE,), float("nan"), device="cuda")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        comm.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        comm.all_reduce(x)
    assert comm._nccl is None, "connected inside a capture"
    for _ in range(2):
        x.copy_(integers(rank, LARGE, torch.float32))
        torch.cuda.synchronize()
        comm.barrier()
        graph.replay()
        check(x, "two-shot, replayed")
    for turn in range(3):  # eager: NCCL, connected at the first, between calls of our own
        x = integers(rank, LARGE, torch.float32)
        assert comm.all_reduce(x) is x
        small = comm.all_reduce(torch.full((1000,), 1.0 + rank, device="cuda"))
        check(x, f"nccl, turn {turn}")
        assert (small == size * (size + 1) / 2).all()
    assert comm._nccl is not None
    x.copy_(integers(rank, LARGE, torch.float32))
    torch.cuda.synchronize()
    comm.barrier()
    del graph
    comm.close()


@needs_two
def test_the_largest_messages_go_to_nccl_but_not_in_a_capture() -> None:
    run_ranks(2, send_large, timeout_s=120)
