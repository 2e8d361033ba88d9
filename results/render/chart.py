"""What a plot shows, without how it is drawn: `charts.py` makes these from records, `draw.py` draws them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """`role`: `ours`, `peer`, or `ceiling` (a dashed line). `color`: equal numbers share a colour; None is a grey."""

    label: str
    xs: tuple[float, ...]
    ys: tuple[float, ...]
    role: str = "ours"
    color: int | None = None


@dataclass(frozen=True)
class LineChart:
    """`name`: of the file, without `.svg`. `ticks`: places of the x axis and their names; empty for those of the library."""

    name: str
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    ticks: tuple[tuple[float, str], ...] = ()
    is_log_x: bool = False
    is_log_y: bool = False
    is_from_zero: bool = False


@dataclass(frozen=True)
class BarChart:
    """Bars of parts: `parts` has the shares of each bar, 1 in all, by the name of the part."""

    name: str
    title: str
    bars: tuple[str, ...]
    parts: tuple[tuple[str, tuple[float, ...]], ...]
