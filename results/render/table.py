"""Records as Markdown tables, each with what its rows share above it, and where they are from below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from results.render.algorithms import algorithm_columns
from results.render.border import border_columns, is_border
from results.render.case import describe, order, split_keys
from results.render.columns import Column, markdown, plain_columns
from results.render.layout import layout_of
from results.render.record import Record

MOST_OPEN_ROWS = 40  # of a table that is not folded


def table(caption_keys: Sequence[str], columns: Sequence[Column], records: Sequence[Record]) -> list[str]:
    """A caption with what all rows share, the rows, where they are from, and how to get them again. A long table is folded."""
    caption = describe(caption_keys, records[0].case)
    lines = [*markdown(columns), "", f"<sub>{origin(records)}</sub>", ""]
    commands = dict.fromkeys(record.command for record in records)
    how = ", under MPS (<code>sh launch/with_mps.sh COMMAND</code>)" if is_gpu_shared(records) else ""
    lines += [f"<details><summary>To run it again{how}</summary>", "", "```", *commands, "```", "</details>", ""]
    if len(records) > MOST_OPEN_ROWS:
        return [f"<details><summary><b>{caption}</b>: {len(records)} rows</summary>", "", *lines, "</details>", ""]
    return [f"**{caption}**", "", *lines] if caption else lines


def is_gpu_shared(records: Sequence[Record]) -> bool:
    return any(record.case.get("ranks_per_gpu", 1) != 1 for record in records)


def origin(records: Sequence[Record]) -> str:
    def distinct(values: Iterable[str]) -> str:
        return " / ".join(dict.fromkeys(values))

    names = dict.fromkeys(name for record in records for name in record.versions)
    versions = [f"{n} {distinct(r.versions[n] for r in records if n in r.versions)}" for n in names]
    dates = sorted({record.date for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    commits = f"commit {distinct(record.commit for record in records)}"
    return "; ".join([distinct(record.device for record in records), ", ".join(versions), commits, when]) + "."


def tables(bench: str, records: Sequence[Record]) -> list[str]:
    """All tables of records of one bench and one kind: one a device and a value of the layout's split keys."""
    layout, groups = layout_of(bench), {}
    keys = list(dict.fromkeys(key for record in records for key in record.case))
    for record in sorted(records, key=lambda r: order(keys, r.case)):
        is_fused = layout.is_by_algorithm and "rows" in record.case
        place = (record.device, [order([key], record.case) for key in layout.split], is_fused, is_border(record))
        groups.setdefault(repr(place), (place, []))[1].append(record)
    lines = []
    for _, group in sorted(groups.values(), key=lambda item: item[0]):
        alike, differing = split_keys([record.case for record in group])
        if is_border(group[0]):
            columns, alike = border_columns(group)
        elif layout.is_by_algorithm:
            columns, alike = algorithm_columns(group)
        else:
            columns = plain_columns(group, differing, layout)
        lines += table(alike, columns, group)
    return lines
