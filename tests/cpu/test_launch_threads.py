"""How many threads a rank gets, on machines made of files."""

import os

import pytest

from launch.environment import Environment
from launch.errors import UsageError
from launch.threads import ThreadChoice, choose_threads, count_cores


@pytest.mark.parametrize(
    "environment, requested, expected",
    [
        (Environment(local_world_size=2), None, ThreadChoice(4, "8 cores for 2 ranks")),
        (Environment(local_world_size=3), None, ThreadChoice(2, "8 cores for 3 ranks")),
        (Environment(local_world_size=16), None, ThreadChoice(1, "8 cores for 16 ranks")),
        (Environment(), None, ThreadChoice(8, "8 cores")),
        (Environment(omp_num_threads=3), None, ThreadChoice(3, "set by OMP_NUM_THREADS")),
        (Environment(omp_num_threads=3, num_threads=5), None, ThreadChoice(5, "set by DOORBELL_NUM_THREADS")),
        (Environment(omp_num_threads=3, num_threads=5), 7, ThreadChoice(7, "set by --threads")),
    ],
)
def test_the_users_number_first_then_a_share_of_the_cores(environment, requested, expected):
    assert choose_threads(environment, requested, num_cores=8) == expected


def test_no_threads_is_refused():
    with pytest.raises(UsageError, match="--threads must be at least 1, not 0"):
        choose_threads(Environment(), 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight processors on four cores, all of them allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):
        write(tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hyperthreads_are_not_cores(machine, monkeypatch):
    assert count_cores(machine) == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 4, 1})
    assert count_cores(machine) == 2


def test_unreadable_topology_counts_processors(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    assert count_cores(tmp_path) == 3


@pytest.mark.parametrize(
    "quota, expected", [("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1), ("900000 100000", 4)]
)
def test_cgroup_2_quota_of_an_ancestor(machine, quota, expected):
    write(machine / "proc/self/cgroup", "0::/user/job\n")
    write(machine / "sys/fs/cgroup/user/cpu.max", quota + "\n")
    write(machine / "sys/fs/cgroup/user/job/cpu.max", "max 100000\n")
    assert count_cores(machine) == expected


@pytest.mark.parametrize("quota, expected", [("-1", 4), ("200000", 2)])
def test_cgroup_1_quota(machine, quota, expected):
    write(machine / "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota + "\n")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert count_cores(machine) == expected


def test_this_machine_has_a_core():
    assert 1 <= count_cores() <= len(os.sched_getaffinity(0))
