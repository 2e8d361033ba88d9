"""Tests here need no GPU, so they do not see one: `auto` must mean the CPU on every machine, in child processes too.

Also the order in which `make test` hands out files to its workers, two at a time.
"""

import os

import pytest
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Tests of this file measure how soon ranks notice each other, in tenths of a second.
ALONE = ("test_comm_watch",)
# The files that take longest, first, or a worker would idle while the other is at the last of them. Those that start whole runs,
# which wait a good deal, take turns with those that only compute.
FIRST = (
    "test_life_resume", "test_bench_fp8_error", "test_life_signals", "test_processes", "test_life_torchrun", "test_fp8_linear",
    "test_life_lost_rank", "test_quantize", "test_prefill", "test_command", "test_command_output",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {stem: place for place, stem in enumerate(FIRST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


def pytest_runtest_setup() -> None:
    """Steps as small as most here take a tenth of the time when no threads have to meet, and workers do not fight for cores.

    Before every test, because the command chooses its own number.
    """
    torch.set_num_threads(1)
