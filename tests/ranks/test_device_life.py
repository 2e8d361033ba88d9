"""Ranks on GPUs that die or stop in the middle of a graph, worlds side by side and one after the other, odd environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.ranks.reduce_once import wrong_sums
from tests.ranks_harness import RankProcesses, report, run_ranks, wait_until

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ROOT = Path(__file__).resolve().parents[2]
STALL_S = 1.5
DEADLINE_S = 2.0
GRACE_S = 5.0  # beyond the stall or the deadline, to the end of the last process
GRAPH_CALLS = 200
TOLERANCE_BYTES = 64 << 20


def connect_on_gpus(**options):
    from comm.choice import connect
    from launch.environment import Environment
    from launch.world import World

    communicator = connect(World.from_environment(Environment.read(), "cuda"), **options)
    assert communicator.name == "ipc", communicator.reason
    return communicator


def reduce_for_ever(rank: int, size: int, has_watch: bool) -> None:
    """Replays graphs of all-reduces, a few ahead of the host, until the watch or the deadline of the kernels ends the process."""
    import comm.candidates
    from launch.errors import PeerTimeout

    if not has_watch:
        comm.candidates.DEVICE_DEADLINE_S = DEADLINE_S
    communicator = connect_on_gpus(stall_s=STALL_S)

    def end(lost, is_speaker: bool) -> None:
        report((type(lost).__name__, lost.rank, str(lost), is_speaker))
        os._exit(lost.exit_code)

    if has_watch:
        communicator.watch.start(lambda lost: end(lost, communicator.watch.is_reporter))
    x = torch.zeros(8192, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    communicator.all_reduce(x)
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            communicator.all_reduce(x)
    try:
        for turn in range(10**9):
            for _ in range(10):
                graph.replay()
            torch.cuda.synchronize()
            communicator.all_reduce(x)  # looks at the record of the kernels before it
            if turn == 10:
                report("running")
    except PeerTimeout as error:
        end(error, True)


def lose_a_rank(victim: int, number: int, has_watch: bool = True) -> tuple[tuple, float, list[int | None]]:
    """What the survivor of two says when `victim` gets the signal in mid replay, the seconds to its end, and the exit codes."""
    with RankProcesses(2, reduce_for_ever, has_watch) as ranks:
        for rank in range(2):
            assert ranks.receive(rank, timeout_s=90) == "running"
        survivor = 1 - victim
        start = time.monotonic()
        os.kill(ranks.processes[victim].pid, number)
        said = ranks.receive(survivor, timeout_s=40)
        ranks.processes[survivor].join(timeout=40)
        elapsed_s = time.monotonic() - start
        if has_watch:
            ranks.processes[victim].join(timeout=10)
        codes = [process.exitcode for process in ranks.processes]
    assert codes[survivor] == 5
    return said, elapsed_s, codes


def run_once(rank: int, size: int) -> int:
    communicator = connect_on_gpus()
    communicator.watch.start()
    wrong = wrong_sums(communicator, rank, size)
    communicator.barrier()
    communicator.close()
    return wrong


def free_bytes(rank: int, size: int, wanted: list[int] | None) -> list[int]:
    """Free memory of each GPU as a new process sees it; waits a while for as much as `wanted`."""

    def look() -> list[int]:
        return [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]

    look()  # this process's own contexts, before and after alike
    if wanted is not None:
        wait_until(lambda: all(now >= then - TOLERANCE_BYTES for now, then in zip(look(), wanted)), 10)
    return look()


@pytest.fixture(scope="module")
def free_before() -> list[int]:
    return run_ranks(1, free_bytes, None)[0]


def assert_gpus_are_free(before: list[int]) -> None:
    after = run_ranks(1, free_bytes, before)[0]
    assert all(now >= then - TOLERANCE_BYTES for now, then in zip(after, before)), (before, after)


@pytest.mark.parametrize("victim, number", [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_lost_rank_ends_the_other_and_leaves_the_gpus_free(free_before, victim, number):
    (kind, rank, message, is_speaker), elapsed_s, codes = lose_a_rank(victim, number)
    assert (kind, rank, is_speaker) == ("PeerLost", victim, True)
    cause = "was killed or crashed" if number == signal.SIGKILL else "has not answered for"
    assert message.startswith(f"rank {victim} (pid ") and cause in message and "\n" not in message
    assert elapsed_s < GRACE_S + (STALL_S if number == signal.SIGSTOP else 0)
    assert codes[victim] == -signal.SIGKILL
    assert_gpus_are_free(free_before)
    assert run_ranks(2, run_once, timeout_s=90) == [0, 0]


def test_without_a_watch_the_kernels_give_up_by_themselves(free_before):
    (kind, rank, message, _), elapsed_s, _ = lose_a_rank(1, signal.SIGSTOP, has_watch=False)
    assert (kind, rank) == ("PeerTimeout", 1)
    assert message.startswith("rank 1 did not arrive at all_reduce_lamport (call ") and "before the deadline" in message
    assert DEADLINE_S * 0.9 < elapsed_s < DEADLINE_S + GRACE_S
    assert_gpus_are_free(free_before)


def test_a_run_after_all_ranks_were_killed(free_before):
    with RankProcesses(2, reduce_for_ever, True) as ranks:
        for rank in range(2):
            assert ranks.receive(rank, timeout_s=90) == "running"
        for process in ranks.processes:
            ranks.kill(process.pid)
    assert_gpus_are_free(free_before)
    assert run_ranks(2, run_once, timeout_s=90) == [0, 0]


def test_two_worlds_side_by_side():
    with RankProcesses(2, run_once) as first, RankProcesses(2, run_once) as second:
        assert first.results(timeout_s=120) == [0, 0]
        assert second.results(timeout_s=120) == [0, 0]


def torchrun(**environ: str) -> list[dict]:
    """What both ranks of `tests.ranks.reduce_once` found, in a fresh torchrun with these variables."""
    command = [*(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")]
    command += ["-m", "tests.ranks.reduce_once"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2, done.stdout
    assert all((ranks["name"], ranks["wrong"]) == ("ipc", 0) for ranks in found), found
    return sorted(found, key=lambda ranks: ranks["rank"])


@pytest.fixture(scope="module")
def gpus() -> list[str]:
    """The UUIDs of the GPUs that ranks 0 and 1 get when nothing special is set."""
    return [found["gpu"] for found in torchrun()]


def test_expandable_segments_of_torch_do_not_concern_the_heap():
    assert all(found["is_expandable"] for found in torchrun(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"))


def test_gpus_in_reversed_order(gpus):
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    first, second = visible[:2] if len(visible) > 1 else ("0", "1")
    assert [found["gpu"] for found in torchrun(CUDA_VISIBLE_DEVICES=f"{second},{first}")] == gpus[::-1]


def test_gpus_named_by_uuid(gpus):
    assert [found["gpu"] for found in torchrun(CUDA_VISIBLE_DEVICES=",".join(gpus[::-1]))] == gpus[::-1]
