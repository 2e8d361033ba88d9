"""Which all-reduce a message on a GPU takes, by its size: measured thresholds, each with the run that gave it.

`--all-reduce` goes round the table, for comparisons: one algorithm then takes all messages.
"""

from __future__ import annotations

from dataclasses import dataclass

NCCL = "nccl"
LAMPORT, ONE_SHOT = "all_reduce_lamport", "all_reduce_one_shot"
# What `--all-reduce` takes, and the algorithm that this is; None: by the table.
FORCED: dict[str, str | None] = {"auto": None, "lamport": LAMPORT, "one_shot": ONE_SHOT}
_RUN = "results/all_reduce.jsonl, 2026-11-30"


@dataclass(frozen=True)
class Row:
    """Messages of up to `max_bytes` (None: any) take `algorithm`, a method of `DeviceCollectives` or `NCCL`; `run` says so."""

    max_bytes: int | None
    algorithm: str
    run: str


@dataclass(frozen=True)
class Table:
    """`rows` by rising `max_bytes`, as measured with `size` ranks on GPUs of their own, or sharing GPUs under MPS."""

    size: int
    is_one_rank_per_gpu: bool
    rows: tuple[Row, ...]


TABLES = (
    Table(
        2,
        True,
        (
            Row(64 << 10, LAMPORT, _RUN),
            Row(4 << 20, "all_reduce_sentinel", _RUN),
            Row(32 << 20, "all_reduce_two_shot", _RUN),  # ahead of NCCL at 16 MB, behind at 64 MB
            Row(None, NCCL, _RUN),
        ),
    ),
    Table(
        8,
        False,
        (
            Row(16 << 10, LAMPORT, _RUN),
            Row(256 << 10, "all_reduce_sentinel", _RUN),
            Row(None, "all_reduce_two_shot", _RUN),
        ),
    ),
)


def table_for(size: int, is_one_rank_per_gpu: bool) -> Table:
    """The smallest measured world that is no smaller than this one, else the largest measured."""
    tables = sorted((table for table in TABLES if table.is_one_rank_per_gpu == is_one_rank_per_gpu), key=lambda table: table.size)
    return next((table for table in tables if table.size >= size), tables[-1])


def pick(num_bytes: int, size: int, is_one_rank_per_gpu: bool, is_capturing: bool) -> str:
    """The algorithm for a message of `num_bytes` among `size` ranks.

    `is_capturing`: whether NCCL is out of the question, because it would have to connect inside a graph capture; the last of our
    own algorithms takes its messages then.
    """
    rows = table_for(size, is_one_rank_per_gpu).rows
    if is_capturing:
        rows = tuple(row for row in rows if row.algorithm != NCCL)
    return next((row.algorithm for row in rows if row.max_bytes is None or num_bytes <= row.max_bytes), rows[-1].algorithm)


def describe(size: int, is_one_rank_per_gpu: bool) -> str:
    """The table on one line, with the runs behind it."""
    table = table_for(size, is_one_rank_per_gpu)
    steps = ", ".join(
        f"{'above' if row.max_bytes is None else f'to {_size(row.max_bytes)}'} {_short(row.algorithm)}" for row in table.rows
    )
    runs = "; ".join(dict.fromkeys(row.run for row in table.rows))
    other = "" if table.size == size else f", from {table.size} ranks"
    return f"{steps}; thresholds: {runs}{other}"


def describe_forced(algorithm: str) -> str:
    """Of a world that takes `algorithm` for all messages, on one line."""
    return f"{_short(algorithm)} for messages of any size, as --all-reduce asks"


def _short(algorithm: str) -> str:
    return algorithm.removeprefix("all_reduce_").replace("_", "-")


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KB"
