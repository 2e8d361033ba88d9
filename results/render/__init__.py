"""Renders the records of `results/` as `results/README.md` and plots: `python -m results.render`, or `make results`."""
