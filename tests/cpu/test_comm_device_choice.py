"""Which way a tensor on a GPU goes, with tensors, kernels and NCCL made up; the real ones are in `tests/ranks`."""

from types import SimpleNamespace

import pytest
import torch

from comm import device_communicator
from comm.choice_table import FORCED
from comm.device_collectives import DeviceCollectives
from comm.device_communicator import DeviceCommunicator
from comm.host_loop import HostLoopCommunicator
from comm.nccl import NcclCommunicator
from launch.errors import DoorbellError, PeerLost

LARGE, SMALL = 40 << 20, 1 << 10


class GpuTensor:
    """As much of a tensor on a GPU as is looked at."""

    is_cuda, dtype, device = True, torch.bfloat16, "cuda:0"

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def numel(self):
        return self.num_bytes // 2

    def element_size(self):
        return 2


class Calls:
    """Collectives, NCCL, control and watch in one: remembers what is called."""

    rank, size, kind, watch = 0, 2, "ipc", None

    def __init__(self):
        self.names = []

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.names.append(name)


@pytest.fixture
def is_capturing(monkeypatch):
    state = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state[0])
    return state


def communicator(open_nccl, algorithm=None):
    calls = Calls()
    made = DeviceCommunicator(calls, calls, calls, calls, calls, "why", open_nccl, algorithm)
    return made, calls


def algorithms(calls):
    return [name for name in calls.names if name != "check"]


def test_nccl_connects_at_the_first_large_message_outside_a_capture(is_capturing):
    nccl, opened = Calls(), []
    made, calls = communicator(lambda: opened.append(1) or nccl)
    made.all_reduce(GpuTensor(SMALL))
    is_capturing[0] = True
    made.all_reduce(GpuTensor(LARGE))
    assert algorithms(calls) == ["all_reduce_lamport", "all_reduce_two_shot"] and not opened
    is_capturing[0] = False
    made.all_reduce(GpuTensor(LARGE))
    made.all_reduce(GpuTensor(LARGE))
    assert (len(opened), nccl.names) == (1, ["all_reduce", "all_reduce"])
    is_capturing[0] = True
    made.all_reduce(GpuTensor(LARGE))
    assert algorithms(calls)[2:] == ["all_reduce_two_shot"] and len(nccl.names) == 2


@pytest.mark.parametrize("name, is_norm_fused", [("lamport", True), ("one_shot", False)])
def test_an_algorithm_that_is_asked_for_takes_every_size(name, is_norm_fused, is_capturing):
    made, calls = communicator(lambda: pytest.fail("NCCL has no part in it"), FORCED[name])
    for is_capturing[0] in (False, True):
        for num_bytes in (SMALL, 1 << 20, LARGE):
            made.all_reduce(GpuTensor(num_bytes))
    assert algorithms(calls) == [f"all_reduce_{name}"] * 6 and made.is_norm_fused == is_norm_fused
    assert made.detail == f"{name.replace('_', '-')} for messages of any size, as --all-reduce asks"
    assert communicator(None)[0].is_norm_fused and hasattr(DeviceCollectives, FORCED[name])


def test_ranks_that_share_a_gpu_never_meet_nccl_and_come_together_before_they_wait(is_capturing, monkeypatch):
    made, calls = communicator(None)
    stream = SimpleNamespace(synchronize=lambda: calls.names.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    made.all_reduce(GpuTensor(LARGE))
    assert algorithms(calls) == ["synchronize", "barrier", "all_reduce_two_shot"] and "nccl" not in made.detail
    is_capturing[0] = True
    made.all_reduce(GpuTensor(SMALL))
    assert algorithms(calls)[3:] == ["all_reduce_lamport"], "a graph waits for no host"


def test_nccl_that_does_not_connect_is_said_once_and_done_without(is_capturing, capsys):
    tries = []

    def refuse():
        tries.append(1)
        raise DoorbellError("NCCL does not connect on rank 1: no socket")

    made, calls = communicator(refuse)
    made.all_reduce(GpuTensor(LARGE))
    made.all_reduce(GpuTensor(LARGE))
    assert algorithms(calls) == ["all_reduce_two_shot"] * 2 and len(tries) == 1
    assert capsys.readouterr().err == (
        "doorbell: large messages stay with our own all-reduce: NCCL does not connect on rank 1: no socket\n"
    )


def test_a_peer_lost_while_nccl_connects_is_not_taken_for_a_refusal(is_capturing):
    def lose():
        raise PeerLost(1, "gone")

    with pytest.raises(PeerLost):
        communicator(lose)[0].all_reduce(GpuTensor(LARGE))


def test_the_name_is_the_heaps_and_tensors_of_the_cpu_take_the_control():
    made, calls = communicator(None)
    made.all_reduce(torch.ones(3))
    assert made.name == "ipc" and algorithms(calls) == ["all_reduce"]
    calls.kind = "nvshmem"
    assert DeviceCommunicator(calls, calls, calls, calls, calls, "why").name == "nvshmem"


def test_host_loop_waits_before_and_after_and_nccl_does_not(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    nccl, control = Calls(), Calls()
    nccl.names = control.names = events
    HostLoopCommunicator(control, "", nccl).all_reduce(GpuTensor(SMALL))
    assert events == ["wait", "all_reduce", "wait"]
    NcclCommunicator(nccl, control, "").all_reduce(GpuTensor(SMALL))
    assert events[3:] == ["all_reduce"]
    assert not HostLoopCommunicator(control, "", nccl).is_rank_order and HostLoopCommunicator(control, "").is_rank_order


@pytest.mark.parametrize(
    "rank, wait, limit_s", [(0, "kernel", None), (1, "kernel", None), (0, "stream", None), (1, "stream", 40.0)]
)
def test_who_takes_drafts_by_stream_waits_has_a_deadline_that_ends_with_the_communicator(monkeypatch, rank, wait, limit_s):
    limits, closed = [], []

    def deadline(watch, limit_s):
        limits.append(limit_s)
        return SimpleNamespace(close=lambda: closed.append(limit_s))

    monkeypatch.setattr(device_communicator, "load_signal", lambda build: "kernels")
    monkeypatch.setattr(device_communicator, "StreamDeadline", deadline)
    monkeypatch.setattr(device_communicator, "open_draft_channels", lambda *args: args)
    made, calls = communicator(None)
    made.rank, calls.limit_s = rank, 30.0
    *_, kernels, is_pdl, found, given = made.draft_channels("build", wait)
    assert (kernels, is_pdl, found) == ("kernels", False, wait)
    assert limits == ([] if limit_s is None else [limit_s]) and (given is None) == (limit_s is None)
    made.close()
    made.close()
    assert closed == limits


def test_the_watch_is_shared_with_the_control():
    made, calls = communicator(None)
    made.watch = "watch"
    assert made._control.watch == "watch" and device_communicator.NCCL == "nccl"
