"""`python -m results.render`: the page and the plots from the records."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from results.render.draw import draw, is_drawable
from results.render.page import PLOTS, render
from results.render.record import BadRecord, read_records

RESULTS = Path(__file__).resolve().parents[1]


@click.command()
@click.option("--folder", type=click.Path(path_type=Path, exists=True, file_okay=False), default=RESULTS,
              help="Of the records, the page and the plots; by default the one that this command is in.")  # fmt: skip
@click.option("--plots/--no-plots", default=True, show_default=True, help="Whether to draw the plots too: it needs matplotlib.")
def main(folder: Path, plots: bool) -> None:
    """Render README.md and plots/*.svg from *.jsonl."""
    if plots and not is_drawable():
        sys.exit("error: plots need matplotlib (pip install -e '.[results]'); --no-plots renders the tables alone")
    try:
        page, charts = render(read_records(folder))
    except BadRecord as error:
        sys.exit(f"error: {error}")
    (folder / "README.md").write_text(page, encoding="utf-8")
    click.echo(f"wrote {folder / 'README.md'}")
    if not plots:
        return
    (folder / PLOTS).mkdir(exist_ok=True)
    wanted = {folder / PLOTS / f"{chart.name}.svg": chart for chart in charts}
    for path in sorted((folder / PLOTS).glob("*.svg")):
        if path not in wanted:
            path.unlink()  # of records that are gone
    for path, chart in wanted.items():
        draw(chart, path)
        click.echo(f"wrote {path}")


if __name__ == "__main__":
    main()
