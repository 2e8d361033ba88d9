"""The calls that are made of NCCL, between real processes, with gloo standing in for it; NCCL itself is in `tests/ranks`."""

import pytest
import torch
import torch.distributed as dist

from comm.nccl_group import NcclGroup
from comm.process_group import ProcessGroup
from launch.environment import Environment
from launch.errors import DoorbellError
from launch.world import World
from tests.ranks_harness import run_ranks


def open_group():
    return ProcessGroup(World.from_environment(Environment.read()), 60.0)


def reduce_and_gather(rank, size):
    group = open_group()
    group.open_nccl = lambda: group._group
    nccl = NcclGroup(group)
    whole = torch.full((3, 7), float("nan"))
    x = whole[1]
    x.copy_(torch.arange(7) + rank)
    assert nccl.all_reduce(x) is x
    assert torch.equal(x, torch.arange(7.0) * size + size * (size - 1) / 2) and whole[::2].isnan().all()
    parts = nccl.all_gather((torch.arange(6) + 100 * rank).view(3, 2).t())
    assert torch.equal(parts, torch.stack([(torch.arange(6) + 100 * peer).view(3, 2).t() for peer in range(size)]))
    assert nccl.all_reduce(torch.zeros(0)).numel() == 0 and nccl.all_gather(torch.zeros(2, 0)).shape == (size, 2, 0)
    for wrong, kind in ((torch.zeros(4, dtype=torch.int32), TypeError), (torch.zeros(4, 4).t(), ValueError)):
        with pytest.raises(kind):
            nccl.all_reduce(wrong)
    group.close()
    group.close(is_orderly=False)


def test_sums_in_place_and_gathers_in_rank_order():
    run_ranks(3, reduce_and_gather)


def expect_no_nccl(rank, size):
    group = open_group()
    for _ in range(2):
        with pytest.raises(DoorbellError, match="^NCCL does not connect on rank 0: this torch was built without NCCL$"):
            group.open_nccl()
    assert group.exchange(rank) == list(range(size)), "the ranks can go on without"
    group.close()


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_a_torch_without_nccl_says_so_on_all_ranks():
    run_ranks(2, expect_no_nccl)
