"""One run of the command on one rank, from options to exit code.

The order matters. Everything that can be refused is refused before a peer waits; output is opened before weights are read; the
peers are watched from the moment they are connected; and whatever happens, the output ends at a row boundary, the side file says
how, and one rank says why.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback

import torch

from comm.choice import connect
from comm.communicator import Communicator
from engine.command import CommandOptions
from engine.loading import Blueprint, build_replica, draw_blueprint
from engine.loop import Interrupted, follow, lead
from engine.rank_zero import RankZero
from launch.devices import resolve_device
from launch.environment import Environment
from launch.errors import EXIT_BUG, EXIT_OK, DoorbellError, OutputError, PeerLost, UsageError
from launch.exits import report, wait_for_speaker
from launch.signals import SignalNote
from launch.threads import ThreadChoice, choose_threads
from launch.world import World

FOLLOWER_GRACE_S = 5.0  # a follower that was asked to end waits this long for rank 0 to say so first


def run_command(options: CommandOptions, environment: Environment) -> int:
    """Run to the end and return the exit code; says on stderr how it ended."""
    return RankRun(options, environment).run()


class RankRun:
    """What must be let go of at the end, whoever ends it: the main thread, a signal, or the watch over the peers."""

    def __init__(self, options: CommandOptions, environment: Environment):
        self.options, self.environment = options, environment
        self.note = SignalNote()
        self.comm: Communicator | None = None
        self.rank_zero: RankZero | None = None
        self._ending = threading.Lock()
        self._is_over = False

    def run(self) -> int:
        self.note.on_signal = _raise_interrupted
        self.note.install()
        message: str | None = None
        try:
            code = self._execute()
        except DoorbellError as error:
            code, message = error.exit_code, str(error)
        except Exception as error:
            code, message = EXIT_BUG, f"internal error on rank {self.environment.rank}: {type(error).__name__}: {error}"
            traceback.print_exc()
        self.note.on_signal = None
        return self._finish(code, message)

    def _execute(self) -> int:
        options = self.options
        check_usage(options, self.environment)
        world = World.from_environment(self.environment, resolve_device(options.device, self.environment))
        threads = choose_threads(self.environment, options.threads)
        torch.set_num_threads(threads.number)
        blueprint = draw_blueprint(options.engine_settings(), world)
        if world.rank == 0:
            self.rank_zero = RankZero(options, blueprint)
        if options.dry_run:
            return self.rank_zero.dry_run() if self.rank_zero else EXIT_OK
        if self.rank_zero is not None:
            self.rank_zero.open()
        self._connect(world)
        return self._generate(world, blueprint, threads)

    def _connect(self, world: World) -> None:
        self.comm = connect(world, self.options.comm)
        if self.comm.watch is not None:
            self.comm.watch.start(self._on_lost)

    def _generate(self, world: World, blueprint: Blueprint, threads: ThreadChoice) -> int:
        rank_zero = self.rank_zero
        if rank_zero is not None:
            rank_zero.load_draft()
        replica = build_replica(blueprint, world, self.comm, rank_zero.load_progress() if rank_zero else None)
        if rank_zero is None:
            self.note.on_signal = self._leave_later
            return follow(replica)
        self.note.on_signal = None
        rank_zero.begin(replica, self.comm, threads)
        lead(
            replica,
            rank_zero.leader,
            rank_zero.feed,
            rank_zero.stats,
            rank_zero.look_ahead,
            interrupt=self._asked,
            on_step=rank_zero.progress.tick,
        )
        return rank_zero.exit_code()

    def _asked(self) -> int | None:
        """A request to end, unless it is torchrun's way of telling us that a peer is gone."""
        if self.note.exit_code is not None and self.comm is not None and self.comm.watch is not None:
            lost = self.comm.watch.lost_peer()
            if lost is not None:
                raise lost
        return self.note.exit_code

    def _finish(self, code: int, message: str | None) -> int:
        with self._ending:
            if self.comm is not None and self.comm.watch is not None:
                self.comm.watch.leave(code, message or "")
            code, message = self._save(code, message)
            if self.comm is not None:
                self.comm.close()
            is_speaker = self.environment.rank == 0
            if not is_speaker and self.rank_zero is None and code == EXIT_BUG:
                is_speaker = True  # nobody else knows what went wrong here
            report(code, self.environment, message, is_speaker)
            self._is_over = True
        if code != EXIT_OK and self.environment.is_torchrun and self.environment.rank != 0:
            wait_for_speaker()
        return code

    def _save(self, code: int, message: str | None) -> tuple[int, str | None]:
        if self.rank_zero is None:
            return code, message
        try:
            self.rank_zero.finish(code, message)
        except OutputError as error:
            return (code, message) if code != EXIT_OK else (error.exit_code, str(error))
        return code, message

    def _on_lost(self, lost: PeerLost) -> None:
        """A peer is gone; the main thread may be waiting for it for ever. Runs in the watch's thread and ends the process."""
        with self._ending:
            if self._is_over:
                return
            self._save(lost.exit_code, str(lost))
            watch = self.comm.watch if self.comm is not None else None
            report(lost.exit_code, self.environment, str(lost), is_speaker=watch is None or watch.is_reporter)
            sys.stderr.flush()
            os._exit(lost.exit_code)

    def _leave_later(self, code: int) -> None:
        """A follower was signalled. Usually rank 0 was too, and its last message ends us in order; if not, leave alone."""

        def leave() -> None:
            if self.comm is not None and self.comm.watch is not None:
                self.comm.watch.leave(code, f"rank {self.environment.rank} was asked to end")
            os._exit(code)

        timer = threading.Timer(FOLLOWER_GRACE_S, leave)
        timer.daemon = True
        timer.start()


def _raise_interrupted(code: int) -> None:
    raise Interrupted(code)


def check_usage(options: CommandOptions, environment: Environment) -> None:
    """Options that contradict each other or the way the processes were started. *Raises* `UsageError`."""
    if options.tp is not None and options.tp != environment.world_size:
        how = f"torchrun started {environment.world_size}" if environment.is_torchrun else "this is a single process"
        raise UsageError(
            f"--tp {options.tp} asks for {options.tp} ranks, but {how}; "
            f"run 'torchrun --standalone --nproc-per-node {options.tp} -m engine.generate ...'"
        )
    if bool(options.prompts) == (options.input_path is not None):
        raise UsageError("give either --prompt or --input" + (", not both" if options.prompts else "") + " (see --help)")
    if options.resume and options.overwrite:
        raise UsageError("--resume continues the output and --overwrite replaces it; give one of them")
    if options.retry_failed and not options.resume:
        raise UsageError("--retry-failed goes with --resume")
    if options.resume and options.output_path in (None, "-"):
        raise UsageError("--resume needs --output FILE")
