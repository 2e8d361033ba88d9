"""Real ranks that die, stop, fail or leave: who notices, how soon, and what they say."""

import os
import signal
import time

import pytest
import torch

from comm.choice import connect
from comm.heap_posix import SHM_FOLDER
from launch.environment import Environment
from launch.errors import PeerFailed, PeerLost, PeerTimeout
from launch.world import World
from tests.ranks_harness import RankFailed, RankProcesses, report, run_ranks, wait_until

STALL_S = 1.5


def open_communicator(requested="one_shot", **options):
    return connect(World.from_environment(Environment.read()), requested, max_bytes=4096, **options)


def leftovers():
    return list(SHM_FOLDER.glob(f"doorbell-test{os.getpid()}-*"))


def reduce_for_ever(rank, size, requested):
    communicator = open_communicator(requested, stall_s=STALL_S)

    def on_lost(lost):
        report((type(lost).__name__, lost.rank, str(lost), communicator.watch.is_reporter))
        os._exit(lost.exit_code)

    communicator.watch.start(on_lost)
    x = torch.zeros(512)
    for call in range(10**9):
        communicator.all_reduce(x)
        if call == 20:
            report("running")


def lose_a_rank(size, requested, lost_rank, signal_number, environ=None):
    """What the survivors say when `lost_rank` gets the signal in mid all-reduce, and after how long."""
    with RankProcesses(size, reduce_for_ever, requested, environ=environ) as ranks:
        for rank in range(size):
            assert ranks.receive(rank) == "running"
        start = time.monotonic()
        os.kill(ranks.processes[lost_rank].pid, signal_number)
        survivors = [rank for rank in range(size) if rank != lost_rank]
        said = {rank: ranks.receive(rank, timeout_s=10) for rank in survivors}
        elapsed_s = time.monotonic() - start
        for process in ranks.processes:
            process.join(timeout=5)
        codes = [process.exitcode for process in ranks.processes]
    assert [codes[rank] for rank in survivors] == [5] * len(survivors)
    assert codes[lost_rank] == -signal.SIGKILL
    assert leftovers() == []
    return said, elapsed_s


@pytest.mark.parametrize("size, requested, lost_rank", [(2, "one_shot", 0), (3, "one_shot", 1), (2, "gloo", 1)])
def test_a_killed_rank_is_named_at_once(size, requested, lost_rank):
    said, elapsed_s = lose_a_rank(size, requested, lost_rank, signal.SIGKILL)
    assert elapsed_s < 2.0
    for kind, rank, message, _ in said.values():
        assert (kind, rank) == ("PeerLost", lost_rank)
        assert f"rank {lost_rank} (pid " in message and "was killed or crashed" in message
    assert said[min(said)][3], "the lowest survivor speaks"


@pytest.mark.parametrize("size, requested, lost_rank", [(3, "one_shot", 1), (2, "gloo", 0)])
def test_a_stopped_rank_is_named_and_ended(size, requested, lost_rank):
    said, elapsed_s = lose_a_rank(size, requested, lost_rank, signal.SIGSTOP)
    assert STALL_S * 0.9 < elapsed_s < 10
    for kind, rank, message, _ in said.values():
        assert (kind, rank) == ("PeerLost", lost_rank)
        assert "has not answered for" in message
    assert said[min(said)][3]


def test_ranks_that_share_no_memory_watch_each_other_through_the_store():
    each_on_a_machine_of_its_own = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    said, elapsed_s = lose_a_rank(3, "auto", 1, signal.SIGSTOP, each_on_a_machine_of_its_own)
    assert STALL_S * 0.9 < elapsed_s < 10
    assert all(rank == 1 and "has not answered for" in message for _, rank, message, _ in said.values())


def leave_early(rank, size):
    communicator = open_communicator(stall_s=0.5)
    losses = []
    communicator.watch.start(losses.append)
    communicator.all_reduce(torch.zeros(1))
    if rank != 0:
        communicator.close()
        return []
    time.sleep(1.5)  # well after the others' processes are gone
    communicator.close()
    return [str(lost) for lost in losses]


def test_an_orderly_exit_is_not_a_loss():
    assert run_ranks(3, leave_early) == [[], [], []]


def fail_on_rank_1(rank, size):
    communicator = open_communicator()
    communicator.watch.start()
    if rank == 1:
        communicator.watch.leave(3, "the model folder has no config.json")
        os._exit(3)
    with pytest.raises(PeerFailed) as caught:
        communicator.all_reduce(torch.zeros(1))
    return caught.value.rank, caught.value.exit_code, str(caught.value)


def test_a_rank_that_fails_takes_the_others_along_with_its_code():
    with RankProcesses(2, fail_on_rank_1) as ranks:
        assert ranks.receive(0) == (1, 3, "rank 1 ended with exit code 3: the model folder has no config.json")
        with pytest.raises(RankFailed) as caught:
            ranks.receive(1)
        assert caught.value.exit_code == 3


def close_while_awaited(rank, size):
    communicator = open_communicator()
    communicator.watch.start()
    if rank == 1:
        communicator.close()
        time.sleep(1.0)
        return None
    with pytest.raises(PeerLost) as caught:
        communicator.all_reduce(torch.zeros(1))
    return str(caught.value)


def test_waiting_for_a_rank_that_has_finished_ends():
    assert run_ranks(2, close_while_awaited)[0] == "rank 1 finished while this rank was still waiting for it"


def never_arrive(rank, size):
    communicator = open_communicator(deadline_s=0.5)
    communicator.watch.start()
    communicator.barrier()
    if rank == 1:
        time.sleep(1.5)
        return None
    with pytest.raises(PeerTimeout) as caught:
        communicator.all_reduce(torch.zeros(1))
    record = caught.value.record
    return caught.value.rank, record.operation, record.epoch - record.seen


def test_a_living_rank_that_does_not_arrive_runs_into_the_deadline():
    assert run_ranks(2, never_arrive)[0] == (1, "all_reduce_one_shot", 2)


def hold_the_interpreter_lock(rank, size):
    communicator = open_communicator(stall_s=0.6)
    losses = []
    communicator.watch.start(losses.append)
    start = time.perf_counter()
    sum(range(2_000_000))
    per_second = 2_000_000 / (time.perf_counter() - start)
    communicator.barrier()
    if rank == 1:
        sum(range(int(3.0 * per_second)))  # one call, in C, that never lets another thread of this process run
    communicator.barrier()
    communicator.close()
    return [str(lost) for lost in losses]


def test_a_busy_rank_whose_heart_cannot_beat_is_not_accused():
    assert run_ranks(2, hold_the_interpreter_lock) == [[], []]


def ask_without_a_thread(rank, size):
    communicator = open_communicator()
    assert communicator.watch.lost_peer() is None
    communicator.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert wait_until(lambda: communicator.watch.lost_peer() is not None, 5)
    return communicator.watch.lost_peer().rank


def test_a_signal_handler_can_ask_who_died():
    with RankProcesses(2, ask_without_a_thread) as ranks:
        assert ranks.receive(0) == 1


def run_once(rank, size):
    communicator = open_communicator()
    communicator.watch.start()
    total = communicator.all_reduce(torch.ones(100)).sum().item()
    communicator.close()
    return total


def test_runs_one_after_the_other_and_after_a_kill_start_clean():
    for attempt in range(5):
        if attempt == 2:
            lose_a_rank(2, "one_shot", 1, signal.SIGKILL)
        assert run_ranks(2, run_once) == [200.0, 200.0]
    assert leftovers() == []


def test_two_worlds_side_by_side():
    with RankProcesses(2, run_once) as first, RankProcesses(3, run_once) as second:
        assert second.results() == [300.0] * 3
        assert first.results() == [200.0] * 2
    assert leftovers() == []
