"""Draws charts as SVG with matplotlib (the extra `results`). Equal charts give equal bytes with one version of it."""

from __future__ import annotations

from pathlib import Path

from results.render.chart import BarChart, LineChart

SETTINGS = {
    "svg.hashsalt": "doorbell", "svg.fonttype": "none", "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
GREY = "#555555"
WIDE_LABEL = 30  # characters; beside the axes, longer names would leave them no room
LABEL_INCHES = 0.2  # height of a row of the legend


def is_drawable() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(chart: LineChart | BarChart, path: Path) -> None:
    """Write the SVG. The user's settings of matplotlib have no say. *Raises* ImportError without it."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        height = 4.5 if isinstance(chart, LineChart) else 1.5 + 0.35 * len(chart.bars)
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(chart.title, fontsize="medium")
        (draw_lines if isinstance(chart, LineChart) else draw_bars)(axes, chart)
        labels = axes.get_legend_handles_labels()[1]
        is_wide = max(map(len, labels)) > WIDE_LABEL
        figure.legend(loc="outside lower center" if is_wide else "outside right center", frameon=False)
        if is_wide:
            figure.set_figheight(height + LABEL_INCHES * len(labels))
        FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None, "Creator": None})


def draw_lines(axes, chart: LineChart) -> None:
    from matplotlib.ticker import LogLocator

    styles = {"ours": {"marker": "o", "markersize": 4}, "peer": {"marker": "s", "markersize": 4, "linestyle": ":"},
              "ceiling": {"linestyle": "--", "linewidth": 1.0}}  # fmt: skip
    for series in chart.series:
        color = GREY if series.color is None else f"C{series.color % 10}"
        axes.plot(series.xs, series.ys, label=series.label, color=color, **styles[series.role])
    if chart.is_log_x:
        axes.set_xscale("log", base=2)
    if chart.is_log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    if chart.ticks:
        axes.set_xticks([place for place, _ in chart.ticks], [name for _, name in chart.ticks])
        axes.minorticks_off()
        if len(chart.ticks) > 10:
            axes.tick_params("x", rotation=45)
    if chart.is_from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)


def draw_bars(axes, chart: BarChart) -> None:
    left = [0.0] * len(chart.bars)
    for index, (name, shares) in enumerate(chart.parts):
        percents = [100 * share for share in shares]
        color = "#cccccc" if name == "rest" else f"C{index % 10}"
        axes.barh(chart.bars, percents, left=left, label=name, color=color)
        left = [start + width for start, width in zip(left, percents)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the wall time")
