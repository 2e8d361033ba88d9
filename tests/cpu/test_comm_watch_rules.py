"""The rules by which a watch judges, with a board turned by hand and a process that only sleeps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comm.board import Board, Notice, Phase
from comm.peer_process import Identity, PeerProcess
from comm.watch import TICK_S, PeerWatch
from tests.ranks_harness import wait_until


class MemoryBoard(Board):
    """A board that the test turns by hand."""

    def __init__(self, size):
        self.hearts, self.notices, self.can_beat = [0] * size, [Notice(Phase.RUNNING)] * size, True

    def beat(self):
        return self.can_beat

    def beats(self, peer):
        return self.hearts[peer]

    def post(self, notice):
        self.notices[0] = notice

    def read(self, peer):
        return self.notices[peer]


@pytest.fixture
def sleeper():
    """A process that lives, does nothing, and is seen as rank 1."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"], stdout=-1)
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()


def peer_of(process):
    here = Identity.of_this_process()
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return PeerProcess(Identity(process.pid, int(fields[19]), here.namespace), here)


def test_silence_counts_in_time_that_we_ran(sleeper):
    board = MemoryBoard(2)
    watch = PeerWatch(0, board, {1: peer_of(sleeper)}, stall_s=1.0)
    for _ in range(4):
        assert watch._look(0.25) is None  # the first of them heard the heart
    board.hearts[1] += 1
    for _ in range(4):
        assert watch._look(0.25) is None
    lost = watch._look(0.25)  # frozen: silent for a second, and used no processor time in its second half
    assert lost.rank == 1 and "has not answered for 1.0 s" in str(lost)


def test_without_a_working_board_nobody_is_accused(sleeper):
    board = MemoryBoard(2)
    board.can_beat = False
    watch = PeerWatch(0, board, {1: peer_of(sleeper)}, stall_s=0.2)
    assert all(watch._look(0.2) is None for _ in range(5))
    sleeper.kill()
    assert wait_until(lambda: watch._look(0.2) is not None, 5)


def test_the_callback_runs_once_and_waits_end_after_it(sleeper):
    calls = []
    watch = PeerWatch(0, MemoryBoard(2), {1: peer_of(sleeper)}, stall_s=60)
    watch.start(calls.append)
    assert watch.gone(1) is None
    sleeper.kill()
    start = time.monotonic()
    assert wait_until(lambda: watch.gone(1) is not None, 5)
    assert time.monotonic() - start < 1.0
    time.sleep(3 * TICK_S)
    assert [lost.rank for lost in calls] == [1]
    assert calls[0] is watch.lost is watch.gone(1)
    watch.close()
    watch.close()


def test_a_rank_that_ended_another_is_believed(sleeper):
    board = MemoryBoard(3)
    board.notices[2] = Notice(Phase.FAILED, 5, culprit=1, message="rank 1 (pid 9) has not answered for 5.0 s")
    here = Identity.of_this_process()
    nobody = PeerProcess(Identity(1, 0, "elsewhere"), here)
    watch = PeerWatch(0, board, {1: peer_of(sleeper), 2: nobody}, stall_s=60)
    sleeper.kill()
    assert wait_until(lambda: peer_of_is_gone(watch), 5)
    lost = watch.lost_peer()
    assert (lost.rank, str(lost)) == (1, "rank 1 (pid 9) has not answered for 5.0 s")


def peer_of_is_gone(watch):
    return watch._peers[0].process.is_dead()


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_a_zombie_is_dead_and_kill_hits_only_its_process(sleeper, monkeypatch, has_pidfd):
    if not has_pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    peer = peer_of(sleeper)
    assert (peer.pidfd is not None) == has_pidfd
    assert not peer.is_dead() and peer.stat().state in "SR"
    stranger = PeerProcess(Identity(sleeper.pid, 1, Identity.of_this_process().namespace), Identity.of_this_process())
    stranger.kill()  # same pid, another start time: a recycled pid
    assert not wait_until(peer.is_dead, 0.2)
    sleeper.send_signal(signal.SIGSTOP)
    assert wait_until(lambda: peer.stat().state == "T", 5)
    peer.kill()
    assert wait_until(peer.is_dead, 5)  # nobody has waited for it yet
    peer.kill()
    peer.close()


def test_notices_survive_the_word():
    notice = Notice(Phase.FAILED, 143, culprit=7, message="why")
    assert Notice.from_word(notice.word, "why") == notice
