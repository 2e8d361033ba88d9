"""`results/README.md` as text: a section a bench, and what was left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from results.render.chart import BarChart, LineChart
from results.render.charts import charts_of
from results.render.layout import layout_of
from results.render.record import Record
from results.render.selection import Selection, select
from results.render.table import tables

PLOTS = "plots"  # the folder of the SVGs, beside the page
HEADER = """\
# Results

Made from `results/*.jsonl` by `make results`; do not edit. `LOG.md` tells what was tried and why.

Every number stands beside its ceiling (in brackets the share of it that is reached) or its peers (in brackets how many times
better ours is; below 1 it is worse). A limit is the most that is allowed, or the best that there can be. Of records of one case
on one device the newest is shown. `+changes` behind a commit: the tree differed from it. Sizes are in KB and MB of 1024.
"""


def charts_by_bench(selection: Selection) -> dict[str, list[LineChart | BarChart]]:
    return {bench: charts_of(bench, [r for r in selection.records if r.bench == bench]) for bench in selection.benches()}


def section(bench: str, records: Sequence[Record], charts: Sequence[LineChart | BarChart]) -> list[str]:
    layout = layout_of(bench)
    lines = [f"## {layout.title}", ""] + ([layout.about, ""] if layout.about else [])
    for chart in charts:
        lines += [f"![{chart.title}]({PLOTS}/{chart.name}.svg)", ""]
    measured = [record for record in records if record.kind == "measured"]
    projected = [record for record in records if record.kind == "projected"]
    if measured:
        lines += tables(bench, measured)
    if projected:
        lines += [f"### {layout.title}: projected, not measured", "", *tables(bench, projected)]
    return lines


def left_out(selection: Selection) -> list[str]:
    lines = ["## Left out", ""]
    for (bench, reason), count in sorted(selection.left_out.items()):
        lines.append(f"- `{bench}`: {count} {'record' if count == 1 else 'records'} {reason}.")
    missing: dict[str, list[str]] = {}
    for bench, name in selection.numbers_left_out:
        missing.setdefault(bench, []).append(name)
    for bench, names in sorted(missing.items()):
        listed = ", ".join(f"`{name}`" for name in names)
        lines.append(f"- `{bench}`: numbers with neither a ceiling nor a baseline: {listed}.")
    return [*lines, ""] if len(lines) > 2 else [*lines, "Nothing.", ""]


def render(records: Iterable[Record]) -> tuple[str, list[LineChart | BarChart]]:
    """The page and the charts that it shows. `records`: in file order. The same records give the same text."""
    selection = select(records)
    charts = charts_by_bench(selection)
    lines = [HEADER]
    for bench in selection.benches():
        lines += section(bench, [record for record in selection.records if record.bench == bench], charts[bench])
    lines += left_out(selection)
    return "\n".join(lines).rstrip() + "\n", [chart for some in charts.values() for chart in some]
