"""Tests here need no GPU, so they do not see one: `auto` must mean the CPU on every machine, in child processes too."""

import os

import pytest

os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Tests of these files look at /dev/shm, count processes, or give them seconds to end.
ALONE = (
    "test_command", "test_comm_heap", "test_comm_watch", "test_kernel_build", "test_life", "test_processes",
    "test_speculation_command",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.stem.startswith(ALONE) or item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.alone)
