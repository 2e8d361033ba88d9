"""Runs a function in N real processes, the way torchrun would: the one multi-process harness of the tests.

The first failure kills the other ranks and is raised in the test, with its rank and its traceback. Nothing outlives the
`with` block or the time limit. Ranks are forked from a server that has imported torch already (and used none of it),
which saves seconds per rank.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["torch", "torch.distributed", "comm.choice"])


class RankFailed(AssertionError):
    """A rank raised (`text` is its traceback), or died (`exit_code`)."""

    def __init__(self, rank: int, text: str, exit_code: int | None = None):
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text, self.exit_code = rank, text, exit_code


class RankProcesses:
    """`size` processes, each running `target(rank, size, *args)` in torchrun's environment. Use in a `with` block.

    `target` must be a function of a module's top level; what it returns must be picklable.
    """

    def __init__(self, size: int, target: Callable[..., Any], *args: Any, environ: dict[str, str] | None = None):
        # The harness hosts the meeting point, as torchrun's agent does: a free port, and nobody can take it in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.size = size
        self._pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = _SERVER.Pipe()
            settings = _torchrun_environment(rank, size, self._store.port) | (environ or {})
            process = _SERVER.Process(target=_rank_main, args=(theirs, settings, target, rank, size, args), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self.processes:
            self.kill(process.pid)
        for process in self.processes:
            process.join(timeout=10)

    @staticmethod
    def kill(pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def receive(self, rank: int, timeout_s: float = 60.0) -> Any:
        """The next thing that `rank` sent through `report`, or else its result."""
        if not self._pipes[rank].poll(timeout_s):
            raise RankFailed(rank, f"said nothing within {timeout_s} s")
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(timeout=10)
            code = self.processes[rank].exitcode
            raise RankFailed(rank, f"ended without a result, exit code {code}", code) from None
        if kind == "failed":
            raise RankFailed(rank, value)
        return value

    def results(self, timeout_s: float = 60.0) -> list[Any]:
        """What each rank returned, in rank order. *Raises* `RankFailed` for the first failure in time."""
        deadline = time.monotonic() + timeout_s
        results: list[Any] = [None] * self.size
        pending = dict(enumerate(self._pipes))
        while pending:
            ready = multiprocessing.connection.wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(min(pending), f"not done within {timeout_s} s (nor ranks {sorted(pending)})")
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                results[rank] = self.receive(rank)
                del pending[rank]
        return results


def run_ranks(
    size: int, target: Callable[..., Any], *args: Any, timeout_s: float = 60.0, environ: dict[str, str] | None = None
) -> list[Any]:
    """Run `target(rank, size, *args)` on `size` processes and return the results in rank order."""
    with RankProcesses(size, target, *args, environ=environ) as ranks:
        return ranks.results(timeout_s)


def run_bodies(size: int, bodies: dict[str, tuple], timeout_s: float) -> dict[str, str | None]:
    """Run `bodies`, name: (function, arguments after rank and size), one after the other in the same processes, which saves
    their start. For each name None, or what went wrong: the last line of every rank that failed, and the traceback of the one
    that did not just wait for another in vain.
    """
    ranks = run_ranks(size, _run_bodies, bodies, timeout_s=timeout_s)
    outcomes: dict[str, str | None] = {}
    for name in bodies:
        found = {rank: done.get(name, "not reached") for rank, done in enumerate(ranks)}
        failures = {rank: text for rank, text in found.items() if text is not None}
        lines = [f"rank {rank}: {text.strip().splitlines()[-1]}" for rank, text in failures.items()]
        causes = sorted(failures.values(), key=lambda text: "PeerTimeout" in text or "Connection closed" in text)
        outcomes[name] = "\n".join([*lines, causes[0]]) if failures else None
    return outcomes


def _run_bodies(rank: int, size: int, bodies: dict[str, tuple]) -> dict[str, str | None]:
    done: dict[str, str | None] = {}
    for name, (body, *args) in bodies.items():
        try:
            body(rank, size, *args)
            done[name] = None
        except Exception:
            done[name] = traceback.format_exc()
            break  # the ranks are no longer in step
    return done


def report(value: Any) -> None:
    """Called in a rank: send `value` to the test before the result."""
    _pipe_of_this_rank.send(("report", value))


_pipe_of_this_rank: Any = None


def _torchrun_environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"test{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "OMP_NUM_THREADS": "1",
    }


def _rank_main(
    pipe: Any, environ: dict[str, str], target: Callable[..., Any], rank: int, size: int, args: tuple
) -> None:
    global _pipe_of_this_rank
    _pipe_of_this_rank = pipe
    os.environ.update(environ)
    import torch

    torch.set_num_threads(1)
    try:
        pipe.send(("result", target(rank, size, *args)))
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
        pipe.close()
        os._exit(1)


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether `condition` became true within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()
