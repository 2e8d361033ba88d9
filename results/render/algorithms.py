"""The table of a bench in which several algorithms do the same work: a row a piece of work, a column an algorithm."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from results.render.case import order, split_keys
from results.render.columns import Column, beside_ceiling, beside_peer, case_columns
from results.render.metric import Metric
from results.render.metric import number as write
from results.render.record import Record
from results.render.selection import ALGORITHM_KEYS, TEXTBOOK, ceiling_of, peers_of

# Columns, left to right; others follow.
ALGORITHMS = ("chosen", "lamport", "lamport_norm", "sentinel", "one_shot", "two_shot", "two_shot_norm")


def label_of(record: Record, is_threads_told: bool = False) -> str:
    label = str(record.case["algorithm"]).removeprefix("all_reduce_")
    threads = record.case.get("threads")
    return f"{label}/{threads}" if is_threads_told and threads is not None else label


def labels_of(records: Sequence[Record]) -> list[str]:
    """A name a record: the algorithm, with its threads if there are several numbers of them."""
    is_threads_told = len({record.case["threads"] for record in records if "threads" in record.case}) > 1
    return [label_of(record, is_threads_told) for record in records]


def label_order(labels: Iterable[str]) -> list[str]:
    def place(label: str) -> tuple[int, str]:
        name = label.split("/")[0]
        return (ALGORITHMS.index(name) if name in ALGORITHMS else len(ALGORITHMS)), label

    return sorted(set(labels), key=place)


def has_bound(record: Record, name: str) -> bool:
    """Whether there is a ceiling or a peer; without them the textbook algorithm is the baseline."""
    return ceiling_of(record, name) is not None or bool(peers_of(record, name))


def algorithm_columns(records: Sequence[Record]) -> tuple[list[Column], list[str]]:
    """The columns, and the keys of the case that all rows share.

    `records` are of one metric. Those with one case but for the algorithm, one ceiling and the same peers stand in one row.
    """
    (name,) = {name for record in records for name in record.metrics}
    metric = Metric(name)
    rows: dict[str, dict[str, Record]] = {}
    for label, record in zip(labels_of(records), records):
        work = {key: value for key, value in record.case.items() if key not in ALGORITHM_KEYS}
        beside = ceiling_of(record, name), sorted(peers_of(record, name).items())
        rows.setdefault(repr((sorted(work.items()), beside)), {})[label] = record
    alike, differing = split_keys([record.case for record in records])
    differing = [key for key in differing if key not in ALGORITHM_KEYS]
    found = sorted(rows.values(), key=lambda row: order(differing, next(iter(row.values())).case))
    best = [min(row, key=lambda label: row[label].metrics[name]) for row in found]
    fastest = [row[label] for row, label in zip(found, best)]

    baseline = None if any(has_bound(record, name) for record in records) else TEXTBOOK.removeprefix("all_reduce_")

    def cell(row: dict[str, Record], label: str, best: str) -> str:
        if label not in row:
            return ""
        value = row[label].metrics[name]
        if label == best:
            return f"**{write(value)}**" if len(row) > 1 else write(value)
        return beside_peer(metric, row[best].metrics[name], value) if label == baseline else write(value)

    columns = case_columns(differing, fastest)
    for label in label_order(label for row in found for label in row):
        heading = f"{label} (baseline), {metric.unit}" if label == baseline else f"{label}, {metric.unit}"
        columns.append(Column(heading, [cell(row, label, top) for row, top in zip(found, best)]))
    columns.append(Column("ceiling", [beside_ceiling(metric, r.metrics[name], ceiling_of(r, name)) for r in fastest]))
    for peer in dict.fromkeys(peer for record in fastest for peer in peers_of(record, name)):
        columns.append(Column(peer, [beside_peer(metric, r.metrics[name], peers_of(r, name).get(peer)) for r in fastest]))
    return [column for column in columns if any(column.cells)], [key for key in alike if key != "threads"]
