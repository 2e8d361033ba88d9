"""One run of the command on one rank, from options to exit code.

The order matters. Everything that can be refused is refused before a peer waits; output is opened before weights are read; the
peers are watched from the moment they are connected; and whatever happens, the output ends at a row boundary, the side file says
how, and one rank says why.
"""

from __future__ import annotations

import sys
import threading
import traceback
from pathlib import Path

import torch

from comm.communicator import Communicator
from engine.command import CommandOptions
from engine.loading import Blueprint, build_replica, draw_blueprint, open_communicator
from engine.loop import Interrupted, follow, lead
from engine.rank_zero import RankZero
from launch.devices import resolve_device
from launch.environment import Environment
from launch.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TERMINATED,
    DoorbellError,
    OutputError,
    PeerFailed,
    PeerLost,
    UsageError,
)
from launch.exits import describe_signal, end_process, report, wait_for_speaker
from launch.signals import SignalNote
from launch.threads import ThreadChoice, choose_threads
from launch.world import World

# After a signal: how long a rank may take to end in order before it is ended. A follower leaves rank 0 the time to say so
# first; a long step must not hold up a user who wants out, and finished rows are saved either way.
FOLLOWER_PATIENCE_S = 5.0
LEADER_PATIENCE_S = 8.0
# One thread ends the process. Another that finds it at work gives it this long: it may wait for a pipe that nobody reads.
ENDING_PATIENCE_S = 5.0


def run_command(options: CommandOptions, environment: Environment, note: SignalNote) -> int:
    """Run to the end and return the exit code; says on stderr how it ended. `note` is installed already."""
    return RankRun(options, environment, note).run()


class RankRun:
    """What must be let go of at the end, whoever ends it: the main thread, a signal, or the watch over the peers."""

    def __init__(self, options: CommandOptions, environment: Environment, note: SignalNote):
        self.options, self.environment, self.note = options, environment, note
        self.comm: Communicator | None = None
        self.rank_zero: RankZero | None = None
        self._ending = threading.Lock()

    def run(self) -> int:
        self.note.on_force = self._on_force
        self.note.on_signal = self._on_early_signal
        message: str | None = None
        try:
            code = self._execute()
        except DoorbellError as error:
            code, message = error.exit_code, str(error)
        except Exception as error:
            code, message = EXIT_BUG, f"internal error: {type(error).__name__}: {error}"  # rank 0 puts "rank n" before it
            self._print_traceback()
        self.note.on_signal = None
        return self._finish(code, message)

    def _print_traceback(self) -> None:
        """In one write, every line with the rank it is from: ranks share one terminal."""
        tag = f"[rank {self.environment.rank}] " if self.environment.world_size > 1 else ""
        lines = traceback.format_exc().splitlines()
        sys.stderr.write("".join(f"{tag}{line}\n" for line in lines))
        sys.stderr.flush()

    def _execute(self) -> int:
        options = self.options
        check_usage(options, self.environment)
        world = World.from_environment(self.environment, resolve_device(options.device, self.environment, options.share_gpus))
        threads = choose_threads(self.environment, options.threads)
        torch.set_num_threads(threads.number)
        blueprint = draw_blueprint(options.engine_settings(), world)
        if world.rank == 0:
            self.rank_zero = RankZero(options, blueprint)
        if options.dry_run:
            return self.rank_zero.dry_run() if self.rank_zero else EXIT_OK
        if self.rank_zero is not None:
            self.rank_zero.open()
        self._connect(blueprint, world)
        return self._generate(world, blueprint, threads)

    def _connect(self, blueprint: Blueprint, world: World) -> None:
        self.comm = open_communicator(blueprint.settings, world)
        if self.comm.watch is not None:
            self.comm.watch.start(self._on_lost)

    def _generate(self, world: World, blueprint: Blueprint, threads: ThreadChoice) -> int:
        rank_zero = self.rank_zero
        if rank_zero is not None:
            rank_zero.load_draft(self.comm)
        progress, num_ids = (None, None) if rank_zero is None else (rank_zero.load_progress(), rank_zero.frontend.num_ids)
        replica = build_replica(blueprint, world, self.comm, progress, num_ids)
        self.note.on_signal = None
        self.note.patience_s = FOLLOWER_PATIENCE_S if rank_zero is None else LEADER_PATIENCE_S
        if self.note.exit_code is not None:  # what it raised was swallowed by a library
            raise Interrupted(self.note.exit_code)
        if rank_zero is None:
            return follow(replica)
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
        rank_zero.write_profile()
        return rank_zero.exit_code()

    # -- signals and losses ------------------------------------------------------------------------------------------

    def _asked(self) -> int | None:
        """A request to end, unless it is torchrun's way of telling us that a peer is gone. *Raises* `PeerLost` then."""
        code = self.note.exit_code
        watch = self.comm.watch if self.comm is not None else None
        lost = watch.lost_peer() if code is not None and watch is not None else None
        if lost is None:
            return code
        if isinstance(lost, PeerFailed) and lost.exit_code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
            return lost.exit_code  # the signal reached that rank too, or that rank alone
        raise lost

    def _on_early_signal(self, code: int) -> None:
        """Before the loop no peer is in the middle of a step with us: leave from wherever the main thread is."""
        raise self._interruption(self._asked() or code)

    def _interruption(self, code: int) -> Interrupted:
        return Interrupted(code, describe_signal(code, self.environment, has_met=self.comm is not None))

    def _on_force(self, code: int) -> None:
        """Runs in the thread of `SignalNote`: the main thread did not end in time, or the user pressed again."""
        self._end_now(code, str(self._interruption(code)), is_speaker=self.environment.rank == 0)

    def _on_lost(self, lost: PeerLost) -> None:
        """Runs in the watch's thread: a peer is gone, and the main thread may be waiting for it for ever."""
        self._end_now(lost.exit_code, str(lost), is_speaker=self.comm.watch.is_reporter)

    def _end_now(self, code: int, message: str, is_speaker: bool) -> None:
        if not self._ending.acquire(timeout=ENDING_PATIENCE_S):
            end_process(code)
        self._say_goodbye(code, message)
        code, message = self._save(code, message)
        report(code, self.environment, message, is_speaker)
        end_process(code)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _finish(self, code: int, message: str | None) -> int:
        self._ending.acquire()  # never released: who has it ends the process
        self._say_goodbye(code, message)
        code, message = self._save(code, message)
        report(code, self.environment, message if code != EXIT_OK else None, self._is_speaker())
        if self.comm is not None:
            self.comm.close()
        if code != EXIT_OK and self.environment.is_torchrun and self.environment.rank != 0:
            wait_for_speaker()
        return code

    def _say_goodbye(self, code: int, message: str | None) -> None:
        if self.comm is not None and self.comm.watch is not None:
            self.comm.watch.leave(code, message or "")

    def _is_speaker(self) -> bool:
        """Rank 0, or the lowest rank that is left. A rank that never met the others speaks for itself."""
        if self.environment.rank == 0:
            return True
        return self.comm is not None and self.comm.watch is not None and self.comm.watch.is_reporter

    def _save(self, code: int, message: str | None) -> tuple[int, str | None]:
        if self.rank_zero is None:
            return code, message
        try:
            self.rank_zero.finish(code, message)
        except OutputError as error:
            return (code, message) if code != EXIT_OK else (error.exit_code, str(error))
        return code, message

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
    if options.profile_path is not None:
        check_profile_path(options)


def check_profile_path(options: CommandOptions) -> None:
    """*Raises* `UsageError` for a profile that could not be written, or would replace what the run reads or writes."""
    path = Path(options.profile_path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(f"--profile {path} is a folder" if path.is_dir() else f"--profile {path}: there is no such folder")
    for name, other in (("--input", options.input_path), ("--output", options.output_path)):
        if other is not None and Path(other).absolute() == path.absolute():
            raise UsageError(f"--profile and {name} name the same file, {path}")
    if options.dry_run:
        raise UsageError("--profile times the steps of a run; --dry-run has none")
