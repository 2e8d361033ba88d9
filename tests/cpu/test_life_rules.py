"""Who speaks and what a signal means: the decisions at the end of a run that processes take too fast to be tested by killing."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from comm.board import Board, Notice, Phase
from comm.watch import PeerWatch
from engine.run import RankRun
from launch.environment import Environment
from launch.errors import PeerFailed, PeerLost
from launch.exits import describe_signal
from launch.signals import SignalNote


@dataclass
class FakeProcess:
    pid: int = 1
    pidfd: None = None
    dead: bool = False

    def is_dead(self) -> bool:
        return self.dead


@dataclass
class FakeBoard(Board):
    """A board on which the test has written what the peers posted."""

    notices: dict[int, Notice] = field(default_factory=dict)

    def beat(self) -> bool:
        return True

    def beats(self, peer: int) -> int:
        return 0

    def post(self, notice: Notice) -> None:
        pass

    def read(self, peer: int) -> Notice:
        return self.notices.get(peer, Notice(Phase.RUNNING))


FAILED = Notice(Phase.FAILED, 5, 1, "rank 1 was killed")


@pytest.mark.parametrize(
    "dead, posted, speaks",
    [
        (set(), {}, False),
        ({1}, {}, False),  # rank 0 lives
        ({0}, {}, False),  # rank 1 lives
        ({0, 1}, {}, True),  # both killed: nobody else is left
        ({1}, {0: FAILED}, False),  # rank 0 is about to speak
        ({0, 1}, {0: FAILED}, False),  # rank 0 has spoken and left
        ({0, 1}, {0: Notice(Phase.CLOSING), 1: Notice(Phase.CLOSING)}, False),  # everybody left in order
        ({0}, {1: FAILED}, False),
    ],
)
def test_exactly_one_of_three_ranks_speaks(dead, posted, speaks):
    processes = {peer: FakeProcess(dead=peer in dead) for peer in (0, 1)}
    assert PeerWatch(2, FakeBoard(posted), processes).is_reporter is speaks


LOST = PeerLost(1, "rank 1 was killed or crashed")


@pytest.mark.parametrize(
    "asked, lost, outcome",
    [
        (None, None, None),
        (None, LOST, None),  # the watch's own thread deals with that
        (130, None, 130),
        (143, LOST, LOST),  # torchrun has noticed first, and sends SIGTERM to those who are left
        (143, PeerFailed(1, "rank 1 ended with exit code 3", 3), "raised"),
        (143, PeerFailed(1, "rank 1 ended with exit code 130", 130), 130),  # it alone was pressed on
        (130, PeerFailed(1, "rank 1 ended with exit code 130", 130), 130),
    ],
)
def test_what_a_signal_means(asked, lost, outcome):
    run = RankRun(None, Environment(), SignalNote())
    run.note.exit_code = asked
    run.comm = SimpleNamespace(watch=SimpleNamespace(lost_peer=lambda: lost))
    if outcome is LOST or outcome == "raised":
        with pytest.raises(PeerLost) as caught:
            run._asked()
        assert caught.value is lost
    else:
        assert run._asked() == outcome


def test_without_peers_a_signal_is_a_signal():
    run = RankRun(None, Environment(), SignalNote())
    run.note.exit_code = 143
    assert run._asked() == 143


def test_only_torchrun_knows_before_the_ranks_have_met():
    torchrun = Environment(rank=0, world_size=2, is_torchrun=True)
    assert "torchrun names it" in describe_signal(143, torchrun, has_met=False)
    assert describe_signal(143, torchrun, has_met=True) == "terminated"
    assert describe_signal(130, torchrun, has_met=False) == "interrupted"
    assert describe_signal(143, Environment(), has_met=False) == "terminated"
