"""A thread that notices when a peer is gone, stopped or frozen, while the main thread may be stuck waiting for it.

Two kinds of evidence. A process that has *ended* is seen through its pidfd within the tick. One that is *stopped* still
exists, so every rank's watch also advances a heartbeat. A heart that has not beaten for `stall_s` is not yet proof: a
long call that holds the interpreter lock stops it too, and so does a slow disk. The kernel decides between them
(`_is_stuck`).

A process that ends in order says so first, and is not missed.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from comm.board import Board, Notice, Phase
from comm.peer_process import PeerProcess
from launch.errors import EXIT_PEER_LOST, PeerFailed, PeerLost

TICK_S = 0.1
_FAILED_GRACE_S = 1.0  # a user's error usually strikes all ranks; each should have time to meet its own
_DISK_PATIENCE = 12  # times stall_s: how long a process in a disk wait may be silent


@dataclass
class _Peer:
    """What the watch remembers about one peer. Silences count only time during which this process itself ran."""

    rank: int
    process: PeerProcess
    beats: int = -1
    silent_s: float = 0.0
    failed_s: float = 0.0
    cpu_ticks: int | None = None
    is_stuck: bool = False


class PeerWatch:
    """Watch of this rank over `processes` (by rank, without its own), and its own entry on `board`.

    `lost` is the loss that was reported, once the callback has returned; waits of the main thread end with it.
    """

    lost: PeerLost | None = None

    def __init__(self, rank: int, board: Board, processes: dict[int, PeerProcess], stall_s: float = 5.0):
        self.rank = rank
        self._board, self._stall_s = board, stall_s
        self._peers = [_Peer(peer, process) for peer, process in sorted(processes.items())]
        self._on_lost: Callable[[PeerLost], None] | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._has_left = False
        # Whether peers can still be met at the end: no loss was seen, and no error was left with.
        self.is_orderly = True

    def start(self, on_lost: Callable[[PeerLost], None] | None = None) -> None:
        """Begin to beat and to watch. Once per rank, after `connect`.

        `on_lost` is called at most once, from the watch's thread, while the main thread may be stuck: it should say
        what is to be said, save what is to be saved and end the process. If it returns, or is None, waits of the main
        thread raise.
        """
        self._on_lost = on_lost
        self._board.beat()
        self._board.post(Notice(Phase.RUNNING))
        self._thread = threading.Thread(target=self._run, name="peer-watch", daemon=True)
        self._thread.start()

    def lost_peer(self) -> PeerLost | None:
        """A loss that can be seen now, without waiting. For signal handlers: torchrun's SIGTERM often comes first."""
        return self.lost or self._dead_peer() or self._failed_peer(grace_s=0.0)

    def gone(self, peer: int) -> PeerLost | None:
        """Why a wait for `peer` is in vain, if it is: a reported loss, or the peer has closed its end."""
        if self.lost is not None:
            return self.lost
        if self._board.read(peer).phase is Phase.CLOSING:
            return PeerLost(peer, f"rank {peer} finished while this rank was still waiting for it")
        return None

    @property
    def is_reporter(self) -> bool:
        """Whether no lower rank can speak for all: each of them died or is stuck, and none had the time to say how it ends."""
        return not any(peer.rank < self.rank and self._can_speak(peer) for peer in self._peers)

    def leave(self, exit_code: int = 0, message: str = "") -> None:
        """Say how this rank ends: in order (0), or with an error, to end the others too. The first call counts."""
        if not self._has_left:
            self._has_left = True
            self.is_orderly = exit_code == 0
            phase = Phase.FAILED if exit_code else Phase.CLOSING
            self._board.post(Notice(phase, exit_code, self.rank, message))

    def close(self) -> None:
        """Leave in order, unless `leave` was called, and stop watching. Idempotent, waits for no peer."""
        self.leave()
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5 * TICK_S)
            if self._thread.is_alive():
                return  # busy in the callback; it needs the handles
        for peer in self._peers:
            peer.process.close()

    def _run(self) -> None:
        poll = select.poll()
        for peer in self._peers:
            if peer.process.pidfd is not None:
                poll.register(peer.process.pidfd, select.POLLIN)
        before = time.monotonic()
        while not self._stop.is_set():
            for pidfd, _ in poll.poll(TICK_S * 1000):
                poll.unregister(pidfd)  # it stays readable, and would turn this loop into a spin
            now = time.monotonic()
            # A longer tick means that we, or the whole machine, did not run: no time to hold against a peer.
            ran_s, before = min(now - before, 2 * TICK_S), now
            lost = self._look(ran_s)
            if lost is not None and not self._stop.is_set():
                self._report(lost)
                return

    def _look(self, ran_s: float) -> PeerLost | None:
        if not self._board.beat():
            return self._dead_peer()
        for peer in self._peers:
            notice = self._board.read(peer.rank)
            if notice.phase is Phase.FAILED:
                peer.failed_s += ran_s
            elif notice.phase is Phase.RUNNING:
                self._listen(peer, ran_s)
        return self._dead_peer() or self._stuck_peer() or self._failed_peer(_FAILED_GRACE_S)

    def _listen(self, peer: _Peer, ran_s: float) -> None:
        beats = self._board.beats(peer.rank)
        if beats != peer.beats:
            peer.beats, peer.silent_s, peer.cpu_ticks = beats, 0.0, None
            return
        peer.silent_s += ran_s
        if peer.cpu_ticks is None and peer.silent_s >= self._stall_s / 2:
            stat = peer.process.stat()
            peer.cpu_ticks = stat.cpu_ticks if stat is not None else None
        peer.is_stuck = peer.silent_s >= self._stall_s and self._is_stuck(peer)

    def _is_stuck(self, peer: _Peer) -> bool:
        """Whether a silent peer is stopped or frozen, rather than busy in a call that keeps its watch from running."""
        stat = peer.process.stat()
        if stat is None or stat.state in "Tt":
            return True  # not visible from here (the silence is all we have), or stopped
        if stat.state == "D":
            return peer.silent_s >= self._stall_s * _DISK_PATIENCE
        if stat.cpu_ticks != peer.cpu_ticks:  # it computed in the second half of its silence: give it another
            peer.silent_s, peer.cpu_ticks = 0.0, None
            return False
        return True

    def _can_speak(self, peer: _Peer) -> bool:
        # One that is leaving in order speaks, or has spoken and is gone: looking only for a living one would have two speak.
        is_leaving = self._board.read(peer.rank).phase >= Phase.CLOSING
        return is_leaving or not (peer.is_stuck or peer.process.is_dead())

    def _dead_peer(self) -> PeerLost | None:
        for peer in self._peers:
            if peer.process.is_dead() and self._board.read(peer.rank).phase < Phase.CLOSING:
                # Another rank may have ended it because it had stopped answering, and then knows more than we can see.
                return self._blamed(peer.rank) or PeerLost(
                    peer.rank, f"rank {peer.rank} (pid {peer.process.pid}) was killed or crashed"
                )
        return None

    def _blamed(self, rank: int) -> PeerLost | None:
        for peer in self._peers:
            notice = self._board.read(peer.rank)
            if notice.phase is Phase.FAILED and notice.culprit == rank != peer.rank:
                return PeerLost(rank, notice.message)
        return None

    def _stuck_peer(self) -> PeerLost | None:
        for peer in self._peers:
            if peer.is_stuck:
                who = f"rank {peer.rank} (pid {peer.process.pid})"
                return PeerLost(peer.rank, f"{who} has not answered for {peer.silent_s:.1f} s; it was ended")
        return None

    def _failed_peer(self, grace_s: float) -> PeerLost | None:
        for peer in self._peers:
            notice = self._board.read(peer.rank)
            if notice.phase is not Phase.FAILED or peer.failed_s < grace_s:
                continue
            if notice.culprit != peer.rank:
                return PeerLost(notice.culprit, notice.message)
            cause = f": {notice.message}" if notice.message else ""
            return PeerFailed(
                peer.rank, f"rank {peer.rank} ended with exit code {notice.exit_code}{cause}", notice.exit_code
            )
        return None

    def _report(self, lost: PeerLost) -> None:
        self.is_orderly = False
        # First say why we are about to leave, so that no other rank takes us for the cause; only then end a stuck peer,
        # so that no other rank takes it for crashed.
        if not self._has_left:
            self._has_left = True
            code = lost.exit_code if isinstance(lost, PeerFailed) else EXIT_PEER_LOST
            self._board.post(Notice(Phase.FAILED, code, lost.rank, str(lost)))
        for peer in self._peers:
            if peer.is_stuck:
                peer.process.kill()
        if self._on_lost is not None:
            self._on_lost(lost)
        self.lost = lost
