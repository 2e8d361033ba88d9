"""How far a run is, on stderr of rank 0: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from tqdm import tqdm

from engine.run_stats import RunStats

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Rows done and failed, prefill and decode tok/s (as `RunStats` defines them), and the time left.

    `num_total` is None while the number of rows is unknown (input from a pipe); there is no time left to show then.
    """

    def __init__(
        self, num_total: int | None, num_done: int, stats: RunStats, stream: TextIO = sys.stderr, is_quiet: bool = False
    ):
        self.num_total, self.num_done, self.num_failed = num_total, num_done, 0
        self._num_before, self._stats, self._stream, self._is_quiet = num_done, stats, stream, is_quiet
        self._started = self._last_line = time.monotonic()
        self._bar: tqdm | None = None
        if stream.isatty() and not is_quiet:
            self._bar = tqdm(total=num_total, initial=num_done, file=stream, unit="row", dynamic_ncols=True, leave=False)

    def row_done(self, is_failed: bool) -> None:
        self.num_done += 1
        self.num_failed += is_failed
        if self._bar is not None:
            self._bar.update(1)

    def tick(self) -> None:
        """Call after every step; writes only now and then."""
        if self._is_quiet:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(self._rates(), refresh=False)
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = now
            print(self.line(), file=self._stream, flush=True)

    def line(self) -> str:
        total = "?" if self.num_total is None else str(self.num_total)
        return f"{self.num_done}/{total} rows, {self._rates()}, ETA {self._eta()}"

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def note(self, text: str) -> None:
        """Print a line without tearing the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)

    def _rates(self) -> str:
        stats = self._stats
        return f"{self.num_failed} failed, prefill {stats.prefill_tok_s:.0f} tok/s, decode {stats.decode_tok_s:.1f} tok/s"

    def _eta(self) -> str:
        finished = self.num_done - self._num_before
        if self.num_total is None or finished == 0:
            return "unknown"
        seconds = (time.monotonic() - self._started) / finished * (self.num_total - self.num_done)
        return tqdm.format_interval(seconds)
