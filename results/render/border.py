"""The table of where speculation stops paying: a row a batch that was kept full, a column a rate and number of drafts."""

from __future__ import annotations

from collections.abc import Sequence

from results.render.case import order, split_keys
from results.render.columns import Column, case_columns
from results.render.metric import number, percent
from results.render.record import Record

TRIAL_KEYS = ("rate", "num_drafts")  # which drafts, not which batch


def is_border(record: Record) -> bool:
    """Whether the batch of a record about speculation was kept full."""
    return record.bench == "speculate" and "requests" in record.case


def border_columns(records: Sequence[Record]) -> tuple[list[Column], list[str]]:
    """The columns, and the keys of the case that all rows share. A cell has the speedup, the rate, and how many drafts held."""
    rows: dict[str, dict[tuple[object, ...], Record]] = {}
    for record in records:
        work = {key: value for key, value in record.case.items() if key not in TRIAL_KEYS}
        rows.setdefault(repr(sorted(work.items())), {})[_trial(record)] = record
    alike, differing = split_keys([record.case for record in records])
    differing = [key for key in differing if key not in TRIAL_KEYS]
    found = sorted(rows.values(), key=lambda row: order(differing, next(iter(row.values())).case))
    columns = case_columns(differing, [next(iter(row.values())) for row in found])
    trials = sorted({_trial(record) for record in records}, key=lambda trial: order(TRIAL_KEYS, dict(zip(TRIAL_KEYS, trial))))
    for trial in trials:
        heading = "right at {}, {} drafts".format(*trial)
        columns.append(Column(heading, [_cell(row[trial]) if trial in row else "" for row in found]))
    return columns, [key for key in alike if key not in TRIAL_KEYS]


def _trial(record: Record) -> tuple[object, ...]:
    return tuple(record.case[key] for key in TRIAL_KEYS)


def _cell(record: Record) -> str:
    metrics = record.metrics
    return f"{metrics['speedup']:.2f}x ({number(metrics['output_tok_s'])} tok/s, {percent(metrics['acceptance'])} held)"
