"""What the cost model takes from the records of all-reduces."""

from __future__ import annotations

import pytest

from engine.cost.all_reduce import NORM, PLAIN, ROWS_NORM, AllReduceTable
from launch.errors import UsageError
from tests.cpu.cost_case import GOOD, all_reduce_file, estimate


def test_all_reduce_between_measured_points(tmp_path):
    more = [
        ("all_reduce_lamport", 3000, 2, 9.0, "bf16", "measured"), ("all_reduce_sentinel", 3000, 2, 4.0, "bf16", "measured"),
        ("all_reduce_sentinel", 4000, 2, 3.9, "bf16", "measured"), ("all_reduce_sentinel", 5000, 2, 8.0, "bf16", "measured"),
        ("all_reduce_sentinel", 1000, 2, 0.1, "fp32", "measured"), ("all_reduce_sentinel", 1000, 2, 0.1, "bf16", "projected"),
        ("nccl", 1000, 2, 0.1, "bf16", "measured"), ("all_reduce_sentinel", 5000, 2, 6.0, "bf16", "measured"),
    ]  # fmt: skip
    table = AllReduceTable.load(all_reduce_file(tmp_path / "x.jsonl", GOOD + more))
    found = [table.us(size, 2, PLAIN) for size in (1, 1000, 2000, 3000, 4000, 5000, 6000)]
    assert found == pytest.approx([2, 2, 3, 4, 4, 6, 8])  # flat, on the line, never falling, the newest record, on the last line
    assert table.us(1000, 8, PLAIN) == 4 and table.us(1000, 4, PLAIN) == 3 and table.us(1000, 4, NORM) == 6
    assert table.us(3000, 8, PLAIN) == pytest.approx(4 + 1.75 * 2)  # past the last size of 8 ranks: a two-shot's bytes
    with pytest.raises(UsageError, match="no bf16 all-reduce with a norm of 8 ranks, 4 a GPU; `make bench-comm TP=8`"):
        AllReduceTable.load(all_reduce_file(tmp_path / "y.jsonl", GOOD[:-1]))
    with pytest.raises(UsageError, match="cannot be read from"):
        AllReduceTable.load(tmp_path / "absent.jsonl")


def test_sums_of_many_rows_with_a_norm_once_they_have_records(tmp_path):
    """Until then a sum alone and a pass for residual and norm; of 8 ranks until both worlds have records."""
    name, size = "all_reduce_two_shot_norm", 512 * 8192 * 2
    pair = [(name, size, 2, 20.0, "bf16", "measured")]
    both = [*pair, (name, size, 8, 50.0, "bf16", "measured")]
    without, of_two, of_both = (
        AllReduceTable.load(all_reduce_file(tmp_path / f"{len(more)}.jsonl", GOOD + more)) for more in ([], pair, both)
    )
    known = [[table.has(ROWS_NORM, size) for size in (2, 4, 8)] for table in (without, of_two, of_both)]
    assert known == [[False] * 3, [True, False, False], [True] * 3]
    assert of_both.us(size, 2, PLAIN) == 2  # the fastest of sums alone has no part in it

    def parts(table, **changes):
        return estimate("qwen2.5-72b", table=table, prompt=512, tp=2, **changes).prefill.parts

    old, new = parts(without), parts(of_two)
    assert old["collectives"].us == pytest.approx(161 * (2 + 35)) and new["collectives"].us == pytest.approx(161 * (20 + 35))
    assert old["borders"].us - new["borders"].us == pytest.approx(161 * 4 * size / 4.3e6)
    assert parts(of_two, batch=16)["collectives"].us == pytest.approx(161 * (2 + 35))  # past the memory that it has
    eight = estimate("qwen2.5-72b", table=of_two, tp=8).prefill.parts["collectives"].us
    assert eight == pytest.approx(161 * (4 + 35))
    assert estimate("qwen2.5-72b", table=of_both, tp=8).prefill.parts["collectives"].us == pytest.approx(161 * (50 + 35))
    few = estimate("qwen2.5-72b", table=of_both, tp=2, prompt=64).prefill.parts["collectives"].us
    assert few == pytest.approx(161 * 3)
