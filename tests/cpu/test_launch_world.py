"""What a process learns about itself from its environment."""

import pytest
import torch

from launch.environment import Environment, prefer_loopback
from launch.errors import UsageError
from launch.world import World

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1234",
    "TORCHELASTIC_RUN_ID": "abc",
    "OMP_NUM_THREADS": "1",
}


def world_from(environ, device="cpu"):
    return World.from_environment(Environment.read(environ), device)


def test_alone_by_default():
    assert world_from({}) == World(0, 1, 0, 1, "", False, torch.device("cpu"))


def test_torchrun_is_read():
    world = world_from(TORCHRUN, "cuda")
    assert world == World(3, 4, 1, 2, "abc", True, torch.device("cuda:1"))
    assert not world.is_single_node
    assert world_from(TORCHRUN, "cuda:0").device == torch.device("cuda:0")


@pytest.mark.parametrize(
    "change, names",
    [
        ({"RANK": "4"}, "RANK=4"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2"),
        ({"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8"),
        ({"MASTER_ADDR": ""}, "torchrun --standalone --nproc-per-node 4"),
        ({"MASTER_PORT": ""}, "MASTER_PORT"),
    ],
)
def test_contradictions_are_refused_by_name(change, names):
    with pytest.raises(UsageError, match=names):
        world_from(TORCHRUN | change)


def test_unknown_device():
    with pytest.raises(UsageError, match="'gpu' is not a device"):
        world_from({}, "gpu")


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, None),  # torchrun's own 1
        ({"OMP_NUM_THREADS": "6"}, 6),  # exported by the user before torchrun
        ({"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1),  # torchrun leaves a single process alone: the user's
        ({"OMP_NUM_THREADS": "4,2"}, None),
        ({"OMP_NUM_THREADS": ""}, None),
    ],
)
def test_omp_num_threads_counts_when_the_user_set_it(change, expected):
    assert Environment.read(TORCHRUN | change).omp_num_threads == expected


def test_loopback_unless_the_user_named_an_interface():
    environ = {}
    prefer_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo"}
    environ = {"GLOO_SOCKET_IFNAME": "eth0"}
    prefer_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth0"}
