"""Which device a rank computes on."""

import pytest
import torch

from engine.memory import kv_budget_bytes
from engine.settings import EngineSettings
from launch.devices import resolve_device
from launch.environment import Environment, forbid_nccl_multicast
from launch.errors import UsageError


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def rank(local_rank, local_size):
    return Environment(local_rank, local_size, local_rank, local_size)


def test_auto_takes_a_gpu_if_there_is_one(monkeypatch):
    for count, device in ((0, "cpu"), (2, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert resolve_device("auto", rank(0, 1)) == device


def test_each_rank_gets_a_gpu_of_its_own(two_gpus):
    assert [resolve_device("cuda", rank(r, 2)) for r in range(2)] == ["cuda:0", "cuda:1"]


def test_more_ranks_than_gpus_share_them_only_when_asked(two_gpus):
    with pytest.raises(UsageError, match="5 ranks were started but 2 GPUs are visible; .* --share-gpus"):
        resolve_device("cuda", rank(0, 5))
    assert [resolve_device("cuda", rank(r, 5), is_sharing=True)[-1] for r in range(5)] == list("01010")


def test_a_named_gpu_is_kept_or_refused(two_gpus):
    assert resolve_device("cuda:1", rank(0, 1)) == "cuda:1"
    with pytest.raises(UsageError, match="--device cuda:2: the last of the 2 visible GPUs is cuda:1"):
        resolve_device("cuda:2", rank(0, 1))


def test_what_is_not_there_is_not_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="torch sees no GPU here"):
        resolve_device("cuda", rank(0, 1))
    with pytest.raises(UsageError, match="--share-gpus goes with GPUs, and this run computes on cpu"):
        resolve_device("auto", rank(0, 2), is_sharing=True)


def test_ranks_that_share_a_gpu_share_its_memory(two_gpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    device = torch.device("cuda:0")
    assert kv_budget_bytes(EngineSettings("m"), device, 2) == 800
    assert kv_budget_bytes(EngineSettings("m", is_gpu_sharing=True), device, 4) == 400
    assert kv_budget_bytes(EngineSettings("m", is_gpu_sharing=True), device, 8) == 200


def test_nccl_multicast_is_off_whatever_the_shell_says():
    environ = {"NCCL_NVLS_ENABLE": "1"}
    forbid_nccl_multicast(environ)
    assert environ == {"NCCL_NVLS_ENABLE": "0"}
