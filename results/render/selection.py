"""Which records and which of their numbers are rendered: the newest of each case, checked, with something beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from results.render.layout import bench_order, layout_of
from results.render.metric import LIMITS, Metric
from results.render.record import Record, is_number

TEXTBOOK = "all_reduce_one_shot"  # what an algorithm is held against where there is neither a ceiling nor a peer
ALGORITHM_KEYS = ("algorithm", "threads")  # which algorithm, not which work


def ceiling_of(record: Record, name: str) -> float | None:
    """The ceiling, or the limit, of a metric."""
    name = layout_of(record.bench).like.get(name, name)
    return record.ceiling.get(name, LIMITS.get(name))


def peers_of(record: Record, name: str) -> dict[str, float]:
    """What the peers reach in the metric `name`, by their names.

    A peer has the metric itself (its name is `name` in `peer`), or a key like `flashinfer_us` of its own, which belongs to the
    first metric with this unit.
    """
    name = layout_of(record.bench).like.get(name, name)
    peers = {str(record.peer.get("name", "peer")): record.peer[name]} if name in record.peer else {}
    unit = Metric(name).suffix
    if unit and name == next((other for other in record.metrics if Metric(other).suffix == unit), None):
        for key, value in record.peer.items():
            if key not in record.metrics and Metric(key).suffix == unit:
                peers[key.removesuffix(unit)] = value
    return {peer: value for peer, value in peers.items() if is_number(value)}


def whole_of(record: Record, name: str) -> float | None:
    """The number of which this metric is a part, or which it is, if there are parts."""
    whole = layout_of(record.bench).whole
    if whole not in record.metrics:
        return None
    parts = {part for part in record.metrics if Metric(part).unit == Metric(whole).unit}
    return record.metrics[whole] if name in parts and len(parts) > 1 else None


def is_drawn(record: Record, name: str) -> bool:
    """Whether the number stands in a plot only: a tenth of a long run, between the limits of its drift."""
    return name.startswith("tenth_") and "drift_percent" in record.ceiling


def is_grounded(record: Record, name: str) -> bool:
    """Whether the number has something beside it: a ceiling, a limit, a peer, the whole that it is part of."""
    return (
        Metric(name).is_ratio
        or ceiling_of(record, name) is not None
        or whole_of(record, name) is not None
        or bool(peers_of(record, name))
    )


@dataclass
class Selection:
    """`records`: those to render, in the order of the files. `left_out`: how many, by bench and reason. `numbers_left_out`:
    how many records miss a number, by bench and metric."""

    records: list[Record] = field(default_factory=list)
    left_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    numbers_left_out: Counter[tuple[str, str]] = field(default_factory=Counter)

    def benches(self) -> list[str]:
        return sorted({record.bench for record in self.records}, key=bench_order)


def work_of(record: Record) -> tuple[object, ...]:
    """The work of an all-reduce, whichever algorithm does it."""
    rest = {key: value for key, value in record.case.items() if key not in ALGORITHM_KEYS}
    return record.kind, record.device, tuple(sorted((key, repr(value)) for key, value in rest.items()))


def select(records: Iterable[Record]) -> Selection:
    """`records` in file order: of equal ones the newest date wins, of equal dates the last."""
    selection, newest = Selection(), {}
    for record in records:
        if not record.checked:
            selection.left_out[record.bench, "whose result was not checked"] += 1
            continue
        before = newest.get(record.identity)
        if before is not None:
            selection.left_out[record.bench, "with a newer one of the same case"] += 1
        if before is None or record.date >= before.date:
            newest[record.identity] = record
    textbook = {work_of(record) for record in newest.values() if record.case.get("algorithm") == TEXTBOOK}
    for record in newest.values():
        grounded = {name for name in record.metrics if is_grounded(record, name)}
        if layout_of(record.bench).is_by_algorithm and work_of(record) in textbook:
            grounded = set(record.metrics)
        if not grounded:
            selection.left_out[record.bench, "with neither a ceiling nor a baseline"] += 1
            continue
        selection.records.append(record)
        shown = grounded.union(layout_of(record.bench).work, (name for name in record.metrics if is_drawn(record, name)))
        selection.numbers_left_out.update((record.bench, name) for name in record.metrics if name not in shown)
    return selection
