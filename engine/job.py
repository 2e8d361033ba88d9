"""Rank 0's whole task: every row of the input ends as one row of the output, answered or refused, never lost, never twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.completion import Completion
from engine.prepare import RowPreparer
from engine.progress import Progress
from engine.refused import Refused
from engine.request import Request
from engine.resume import ResumeState
from engine.rows import Row, RowError
from engine.sinks import Sink
from launch.errors import EXIT_ROWS_FAILED, DoorbellError


class RowFailed(DoorbellError):
    """With `--strict`: a row failed, so the run ends."""

    exit_code = EXIT_ROWS_FAILED


@dataclass
class Counts:
    """Rows of the output by outcome, those of an earlier part of a resumed run included."""

    ok: int = 0
    failed: int = 0
    skipped: int = 0

    def as_record(self) -> dict[str, int]:
        return {"rows": self.ok + self.failed, "ok": self.ok, "failed": self.failed, "resumed": self.skipped}


class Job:
    """Turns rows into requests and answers into output rows.

    The feed's thread runs `requests`, the loop's thread runs the callbacks; `sink` and `progress` see one row at a time.
    """

    def __init__(self, preparer: RowPreparer, sink: Sink, progress: Progress, state: ResumeState, is_strict: bool):
        self._preparer, self._sink, self._progress, self._state, self._is_strict = preparer, sink, progress, state, is_strict
        self.counts = Counts(state.num_ok, state.num_failed, len(state.done))
        self._lock = threading.Lock()

    def final_counts(self) -> Counts:
        """Counts that agree with the output, once that is closed: a row that was being written is in both or in neither."""
        with self._lock:
            return replace(self.counts)

    def requests(self, rows: Iterator[Row | RowError]) -> Iterator[Request | None]:
        """A request for every row that can be answered, None for one that has been answered already."""
        for row in rows:
            yield None if row.index in self._state.done else self._request(row)

    def _request(self, row: Row | RowError) -> Request | None:
        for warning in row.warnings:
            self._progress.note(f"doorbell: line {row.line}: {warning}")
        if isinstance(row, RowError):
            self._refuse(row, row.code, row.message)
            return None
        try:
            request = self._preparer.request(row)
        except Refused as error:
            self._refuse(row, error.code, error.message)
            return None
        request.on_text = self._sink.text_callback(row)
        request.on_done = self._answer(row, request)
        return request

    def _answer(self, row: Row, request: Request) -> Callable[[Sequence[Completion]], None]:
        def on_done(completions: Sequence[Completion]) -> None:
            failure = next((item.stop_reason for item in completions if item.finish_reason == "error"), None)
            if failure is not None:
                self._refuse(row, "model_error", str(failure))
                return
            with self._lock:
                self._sink.answered(row, request, completions)
                self.counts.ok += 1
                self._progress.row_done(is_failed=False)

        return on_done

    def _refuse(self, row: Row | RowError, code: str, message: str) -> None:
        with self._lock:
            self._sink.refused(row, code, message)
            self.counts.failed += 1
            self._progress.row_done(is_failed=True)
        if self._is_strict:
            raise RowFailed(f"--strict: line {row.line} failed: {message}")
