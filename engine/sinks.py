"""Where finished rows go on rank 0: JSON lines, or the plain text of a single answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.completion import Completion
from engine.openai_format import openai_error_row, openai_row
from engine.output import OutputWriter
from engine.request import Request
from engine.result_row import encode_row, error_row, result_row
from engine.rows import Row, RowError


class Sink(Protocol):
    """Takes each row exactly once, from any thread."""

    def text_callback(self, row: Row) -> Callable[[str], None] | None:
        """What should be called with new text of the row as it grows, if anything."""

    def answered(self, row: Row, request: Request, completions: Sequence[Completion]) -> None: ...

    def refused(self, row: Row | RowError, code: str, message: str) -> None: ...


class RowSink:
    """One JSON line a row, in the plain or the OpenAI shape."""

    def __init__(self, writer: OutputWriter, model_name: str, is_openai: bool, with_token_ids: bool):
        self._writer, self._model_name = writer, model_name
        self._is_openai, self._with_token_ids = is_openai, with_token_ids

    def text_callback(self, row: Row) -> None:
        return None

    def answered(self, row: Row, request: Request, completions: Sequence[Completion]) -> None:
        prompt_tokens = len(request.prompt_ids)
        if self._is_openai:
            created = int(time.time())
            result = openai_row(row, completions, prompt_tokens=prompt_tokens, model=self._model_name, created=created)
        else:
            result = result_row(
                row,
                completions,
                prompt_tokens=prompt_tokens,
                prompt_logprobs=completions[0].prompt_logprobs,
                with_token_ids=self._with_token_ids,
            )
        self._writer.write(encode_row(result))

    def refused(self, row: Row | RowError, code: str, message: str) -> None:
        make = openai_error_row if self._is_openai else error_row
        self._writer.write(encode_row(make(row, code, message)))


class TextSink:
    """The answer to a single prompt as text, as it grows or when it is done. A refusal goes to stderr."""

    def __init__(self, writer: OutputWriter, is_stream: bool):
        self._writer, self._is_stream = writer, is_stream

    def text_callback(self, row: Row) -> Callable[[str], None] | None:
        return self._write if self._is_stream and row.params.n == 1 else None

    def answered(self, row: Row, request: Request, completions: Sequence[Completion]) -> None:
        if request.on_text is None:
            self._write("\n---\n".join(item.text for item in completions))
        self._write("\n")

    def refused(self, row: Row | RowError, code: str, message: str) -> None:
        print(f"doorbell: {message}", file=sys.stderr, flush=True)

    def _write(self, text: str) -> None:
        self._writer.write(text.encode("utf-8", errors="replace"))
