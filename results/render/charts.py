"""Charts from measured records that are rendered; projections are never drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from results.render.algorithms import has_bound, label_order, labels_of
from results.render.case import describe, natural, show, split_keys
from results.render.chart import BarChart, LineChart, Series
from results.render.metric import Metric
from results.render.record import Record
from results.render.selection import TEXTBOOK, ceiling_of, peers_of

TENTHS = range(1, 11)
PHASES = {"decode": "decode step", "prefill": "prefill"}


def file_name(*parts: object) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", "-".join(map(str, parts)).lower()).strip("-")


def groups_of(records: Sequence[Record], *keys: str) -> list[list[Record]]:
    """Records of one device with equal values of `keys`, in natural order."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in records:
        groups.setdefault((natural(record.device), *(natural(record.case.get(key, "")) for key in keys)), []).append(record)
    return [groups[place] for place in sorted(groups)]


def points(
    records: Sequence[Record], key: str, value_of: Callable[[Record], Mapping[str, float]]
) -> dict[str, tuple[tuple[float, ...], tuple[float, ...]]]:
    """(xs, ys) by name, where `value_of(record)` gives a number by name and x is `case[key]`."""
    found: dict[str, dict[float, float]] = {}
    for record in sorted(records, key=lambda r: r.case[key]):
        for name, value in value_of(record).items():
            found.setdefault(name, {})[record.case[key]] = value
    return {name: (tuple(values), tuple(values.values())) for name, values in found.items()}


def bound_of(records: Sequence[Record], key: str, name: str, label: str, color: int | None) -> list[Series]:
    """The ceiling of a metric as a series, if any record has one."""
    found = points(records, key, lambda r: {} if ceiling_of(r, name) is None else {label: ceiling_of(r, name)})
    return [Series(label, xs, ys, "ceiling", color) for xs, ys in found.values()]


def all_reduce_charts(records: Sequence[Record]) -> list[LineChart]:
    """Latency against size, one a world, bf16, the plain sums (a fused form does more)."""
    charts, name = [], "all_reduce_us"
    plain = [r for r in records if r.case.get("dtype") == "bf16" and "rows" not in r.case and name in r.metrics]
    for group in groups_of(plain, "world", "ranks_per_gpu"):
        world, ranks_per_gpu = group[0].case["world"], group[0].case["ranks_per_gpu"]
        ours: dict[str, list[Record]] = {}
        for label, record in zip(labels_of(group), group):
            ours.setdefault(label, []).append(record)
        series, has_baseline = [], not any(has_bound(record, name) for record in group)
        for color, label in enumerate(label_order(ours)):
            is_baseline = has_baseline and ours[label][0].case["algorithm"] == TEXTBOOK
            ((xs, ys),) = points(ours[label], "bytes", lambda r: {"": r.metrics[name]}).values()
            series.append(Series(f"{label} (baseline)" if is_baseline else label, xs, ys, color=color))
        for color, (peer, (xs, ys)) in enumerate(points(group, "bytes", lambda r: peers_of(r, name)).items(), len(ours)):
            series.append(Series(peer, xs, ys, "peer", color))
        series += bound_of(group, "bytes", name, "ceiling", None)
        where = f"{world} ranks" if ranks_per_gpu == 1 else f"{world} ranks, {ranks_per_gpu} a GPU under MPS"
        sizes = sorted({record.case["bytes"] for record in group})
        ticks = tuple((size, show("bytes", size)) for size in sizes)
        title = f"All-reduce latency, {where}, bf16 ({group[0].device})"
        slug = file_name("all_reduce", world, "ranks", "" if ranks_per_gpu == 1 else f"{ranks_per_gpu}-a-gpu", group[0].device)
        charts.append(LineChart(slug, title, "size", "us a call", tuple(series), ticks, True, True))
    return charts


def is_alone(record: Record) -> bool:
    """Measured without its peers (`--shard-of`)."""
    return record.case.get("comm") == "loopback"


def tpot_charts(records: Sequence[Record]) -> list[LineChart]:
    """TPOT against TP beside the roofline, one a model; a line needs two degrees, each rank with a GPU of its own."""
    charts, name = [], "tpot_ms"
    whole = [r for r in records if name in r.metrics and r.case.get("ranks_per_gpu") == 1]
    for group in groups_of(whole, "model"):
        series, degrees = [], set()
        work = ("dtype", "batch", "prompt", "output", "backend")
        halves = [[r for r in each if is_alone(r) == alone] for each in groups_of(group, *work) for alone in (False, True)]
        lines = [line for line in halves if len({record.case["tp"] for record in line}) > 1]
        alike = split_keys([{key: line[0].case[key] for key in work} for line in lines])[0] if lines else []
        for color, line in enumerate(lines):
            label = describe((key for key in work if key not in alike), line[0].case) or "Doorbell"
            label += " (one rank alone)" if is_alone(line[0]) else ""
            ((xs, ys),) = points(line, "tp", lambda r: {"": r.metrics[name]}).values()
            degrees.update(xs)
            series.append(Series(label, xs, ys, color=color))
            for peer, (xs, ys) in points(line, "tp", lambda r: peers_of(r, name)).items():
                series.append(Series(peer, xs, ys, "peer", color))
            series += bound_of(line, "tp", name, "roofline", color)
        if series:
            model, device = group[0].case["model"], group[0].device
            ticks = tuple((degree, str(degree)) for degree in sorted(degrees))
            title = f"TPOT against TP, {', '.join([model, describe(alike, lines[0][0].case)]).strip(', ')} ({device})"
            slug = file_name("tpot", model, device)
            charts.append(LineChart(slug, title, "TP", "TPOT, ms", tuple(series), ticks, True, is_from_zero=True))
    return charts


def stage_charts(records: Sequence[Record]) -> list[BarChart]:
    """The shares of the stages of a decode step or a prefill, a bar a case."""
    charts = []
    for group in groups_of([r for r in records if "wall_us" in r.metrics], "phase", "model"):
        found = dict.fromkeys(name for record in group for name in record.metrics if Metric(name).suffix == "_us")
        names = [name for name in found if name not in ("wall_us", "rest_us")]
        _, differing = split_keys([record.case for record in group])
        group.sort(key=lambda r: [natural(r.case.get(key, "")) for key in differing])
        bars = tuple(describe(differing, record.case) or "step" for record in group)
        parts = [(n.removesuffix("_us"), tuple(r.metrics.get(n, 0) / r.metrics["wall_us"] for r in group)) for n in names]
        rest = tuple(max(0.0, 1 - sum(shares)) for shares in zip(*(shares for _, shares in parts)))
        model, phase, device = group[0].case.get("model", ""), group[0].case.get("phase", ""), group[0].device
        parts.append(("rest", rest))
        title = f"Stages of a {PHASES.get(phase, 'step')}, {model} ({device})"
        charts.append(BarChart(file_name("stages", phase, model, device), title, bars, tuple(parts)))
    return charts


def drift_charts(records: Sequence[Record]) -> list[LineChart]:
    """A long run by its tenths, in percent of their mean, between the limits."""
    charts = []
    for group in groups_of(records):
        series, limits = [], set()
        _, differing = split_keys([record.case for record in group])
        for record in group:
            tenths = [value for i in TENTHS for key, value in record.metrics.items() if key.startswith(f"tenth_{i}_")]
            limit = ceiling_of(record, "drift_percent")
            if len(tenths) == len(TENTHS) and limit is not None:
                mean = sum(tenths) / len(tenths)
                label = describe(differing, record.case) or "this run"
                series.append(Series(label, tuple(TENTHS), tuple(100 * (x / mean - 1) for x in tenths), color=len(series)))
                limits.add(limit)
        for limit in sorted(limits):
            series += [Series(f"limit {y:+g} %", (1, 10), (y, y), "ceiling") for y in (limit, -limit)]
        if series:
            bench, device = group[0].bench, group[0].device
            ticks = tuple((tenth, str(tenth)) for tenth in TENTHS)
            slug, title = file_name("drift", bench, device), f"A long run by its tenths, {bench} ({device})"
            charts.append(LineChart(slug, title, "tenth of the run", "% of the mean", tuple(series), ticks))
    return charts


CHARTS = {
    "all_reduce": all_reduce_charts, "decode": tpot_charts, "stages": stage_charts, "soak": drift_charts,
    "throughput": drift_charts, "drift": drift_charts,
}  # fmt: skip


def charts_of(bench: str, records: Sequence[Record]) -> list[LineChart | BarChart]:
    """The charts of a bench. `records`: those that are rendered, of any kind."""
    measured = [record for record in records if record.kind == "measured"]
    return CHARTS[bench](measured) if bench in CHARTS else []
