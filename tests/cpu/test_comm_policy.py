"""The one policy behind the probe's advice and the choice at start, and the table of messages, on made-up facts."""

from itertools import pairwise

import pytest

from comm.candidates import OPENERS
from comm.choice_table import FORCED, NCCL, TABLES, Row, Table, describe, pick, table_for
from comm.site import GpuView, standing_of
from engine.generate import command
from engine.summary import describe_comm
from launch.comm_policy import NAMES, Standing, automatic, obstacle, rejections

PAIR = Standing("cuda", 2, num_gpus=2)
SHARED = Standing("cuda", 4, num_gpus=2, ranks_per_gpu=2)
CPU = Standing("cpu", 2)


def test_every_candidate_can_be_opened_and_asked_for():
    assert set(OPENERS) == set(NAMES)
    option = next(parameter for parameter in command.params if parameter.name == "comm")
    assert tuple(option.type.choices) == ("auto", *NAMES)


def test_every_all_reduce_can_be_asked_for():
    option = next(parameter for parameter in command.params if parameter.name == "all_reduce")
    assert tuple(option.type.choices) == tuple(FORCED) and FORCED["auto"] is None
    options = command.main(args=["--all-reduce", "one_shot", "--comm", "ipc"], standalone_mode=False)
    assert options.engine_settings().all_reduce == "one_shot"


def test_the_order_of_each_device_ends_with_what_always_works():
    assert [candidate.name for candidate in automatic("cuda")] == ["ipc", "nvshmem", "nccl", "gloo"]
    assert [candidate.name for candidate in automatic("cpu")] == ["one_shot", "gloo"]


@pytest.mark.parametrize(
    "name, standing, words",
    [
        ("ipc", PAIR, None),
        ("ipc", SHARED, None),
        ("ipc", CPU, "it needs GPUs, and this run computes on cpu"),
        ("ipc", Standing("cuda", 2, 2, is_single_node=False), "several machines"),
        ("ipc", Standing("cuda", 2, 2, mapping="no way"), "no way"),
        ("ipc", Standing("cuda", 2, 2, ipc="refused"), "refused"),
        ("nvshmem", PAIR, None),
        ("nvshmem", Standing("cuda", 2, 2, nvshmem="not installed"), "not installed"),
        ("nvshmem", Standing("cuda", 2, 2, mapping="no way"), "no way"),
        ("nccl", PAIR, None),
        ("nccl", SHARED, "NCCL refuses 4 ranks on 2 GPUs"),
        ("nccl", Standing("cuda", 2, 2, mapping="no way", is_single_node=False), None),
        ("one_shot", CPU, None),
        ("one_shot", PAIR, "it sums in host memory, and this run computes on cuda"),
        ("one_shot", Standing("cpu", 2, shared_memory="too small"), "too small"),
        ("gloo", Standing("cuda", 2, 1, 2, False, mapping="no way"), None),
        ("host_loop", SHARED, None),
        ("host_loop", CPU, None),
    ],
)
def test_what_stands_in_the_way(name, standing, words):
    why = obstacle(name, standing)
    assert why is None if words is None else words in why


def test_the_same_obstacle_is_told_once():
    assert rejections([("ipc", "no way"), ("nvshmem", "no way"), ("nccl", "refuses")]) == [
        "not ipc or nvshmem: no way",
        "not nccl: refuses",
    ]


def test_what_the_ranks_see_becomes_one_standing():
    views = [GpuView("a", (), None), GpuView("b", (), None)]
    assert standing_of(views, True) == PAIR
    shared = standing_of([*views, *views], True)
    assert (shared.num_gpus, shared.ranks_per_gpu, shared.gpus) == (2, 2, "2 GPUs")
    uneven = standing_of([views[0], views[0], views[0], views[1]], True)
    assert (uneven.num_gpus, uneven.ranks_per_gpu) == (2, 3)


def test_a_gpu_that_no_rank_uses_does_not_count():
    assert standing_of([GpuView("a", ("c",), None), GpuView("b", (), None)], True).mapping is None


def test_one_rank_that_cannot_reach_another_decides_for_all():
    standing = standing_of([GpuView("a", (), None), GpuView("b", ("a",), "missing")], True)
    assert standing.mapping == "the GPUs of ranks 1 and 0 have no peer access" and standing.nvshmem == "missing"


# The table of messages


def test_tables_rise_and_take_every_size():
    for table in TABLES:
        limits = [row.max_bytes for row in table.rows]
        assert limits[-1] is None and all(low < high for low, high in pairwise(limits[:-1]))
        assert all(row.run for row in table.rows)
        assert table.is_one_rank_per_gpu or NCCL not in [row.algorithm for row in table.rows]


def test_each_size_takes_its_row_up_to_the_last_byte(monkeypatch):
    rows = (Row(100, "all_reduce_small", "r"), Row(200, "all_reduce_large", "r"), Row(None, NCCL, "r"))
    monkeypatch.setattr("comm.choice_table.TABLES", (Table(2, True, rows), Table(8, True, rows[1:])))
    sizes = (1, 100, 101, 200, 201, 1 << 40)
    names = ["all_reduce_small"] * 2 + ["all_reduce_large"] * 2
    assert [pick(n, 2, True, False) for n in sizes] == [*names, NCCL, NCCL]
    assert [pick(n, 2, True, True) for n in sizes] == [*names, "all_reduce_large", "all_reduce_large"]
    assert pick(1, 8, True, False) == "all_reduce_large"
    assert [table_for(size, True).size for size in (2, 3, 8, 16)] == [2, 8, 8, 8]


def test_the_table_on_one_line():
    line = describe(2, True)
    assert line.startswith("to 64 KB lamport, to 4 MB sentinel, to 32 MB two-shot, above nccl; thresholds: results/")
    assert "ranks" not in line and describe(4, True).endswith(", from 2 ranks")
    assert "nccl" not in describe(8, False)


class Described:
    name, reason, detail = "ipc", "not x: its self-test failed on rank 1: its gather is wrong; y", "to 64 KB lamport"


def test_the_summary_says_what_was_chosen_why_and_how():
    facts = describe_comm(Described)
    assert facts["all-reduce"] == f"ipc ({Described.reason})" and "to 64 KB lamport" in facts[""]
    Described.detail = ""
    assert list(describe_comm(Described)) == ["all-reduce"]
