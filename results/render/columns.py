"""Columns of a Markdown table: the case, and every number with its ceiling and its peers beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from results.render.case import show
from results.render.layout import Layout
from results.render.metric import Metric, number, percent, words
from results.render.record import Record
from results.render.selection import ceiling_of, is_grounded, peers_of, whole_of


@dataclass(frozen=True)
class Column:
    """`is_text`: aligned to the left. A cell of "" is a number that there is not."""

    heading: str
    cells: list[str]
    is_text: bool = False


def markdown(columns: Sequence[Column]) -> list[str]:
    def row(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    lines = [row(column.heading for column in columns), row("---" if column.is_text else "---:" for column in columns)]
    return lines + [row(cells) for cells in zip(*(column.cells for column in columns))]


def beside_ceiling(metric: Metric, value: float, ceiling: float | None) -> str:
    if ceiling is None:
        return ""
    share = metric.against(value, ceiling)
    return number(ceiling) if share is None else f"{number(ceiling)} ({percent(share)})"


def beside_peer(metric: Metric, value: float, peer: float | None) -> str:
    if peer is None:
        return ""
    ratio = metric.against(value, peer)
    return number(peer) if ratio is None else f"{number(peer)} ({ratio:.2f}x)"


def case_columns(keys: Sequence[str], records: Sequence[Record]) -> list[Column]:
    def is_text(key: str) -> bool:
        return not all(isinstance(record.case.get(key), (int, float)) for record in records)

    return [Column(words(key), [show(key, record.case.get(key)) for record in records], is_text(key)) for key in keys]


def metric_columns(name: str, records: Sequence[Record], layout: Layout) -> list[Column]:
    """The numbers of one metric, then their ceiling and each peer, where any record has one; none if nothing is to be shown."""
    metric, is_work = Metric(name), name in layout.work

    def column(heading: str, cell: Callable[[Record], str]) -> Column:
        return Column(heading, [cell(r) if name in r.metrics else "" for r in records])

    def value(record: Record) -> str:
        if not is_work and not is_grounded(record, name):
            return ""
        whole = whole_of(record, name)
        part = f" ({percent(record.metrics[name] / whole)})" if whole and name != layout.whole else ""
        return number(record.metrics[name]) + part

    columns = [column(metric.heading, value)]
    heading = "limit" if metric.is_more_better is None else "ceiling"
    columns.append(column(heading, lambda r: beside_ceiling(metric, r.metrics[name], ceiling_of(r, name))))
    for peer in dict.fromkeys(peer for record in records for peer in peers_of(record, name)):
        columns.append(column(peer, lambda r, peer=peer: beside_peer(metric, r.metrics[name], peers_of(r, name).get(peer))))
    return [each for each in columns if any(each.cells)]


def plain_columns(records: list[Record], keys: list[str], layout: Layout) -> list[Column]:
    names = dict.fromkeys(name for record in records for name in record.metrics)
    return case_columns(keys, records) + [column for name in names for column in metric_columns(name, records, layout)]
