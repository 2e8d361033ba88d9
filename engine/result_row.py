"""The output row of an input row: a dict that strict JSON can hold, and the bytes of its line.

Plain shape here; the OpenAI batch shape is in `engine.openai_format`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from engine.completion import Completion, TokenLogprob
from engine.refused import replace_surrogates
from engine.rows import Row, RowError

# JSON allows these inside strings, but readers that split with str.splitlines() or by Unicode would cut the row there.
_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\u0085\u2028\u2029"}


def result_row(
    row: Row,
    completions: Sequence[Completion],
    *,
    prompt_tokens: int,
    prompt_logprobs: Sequence[TokenLogprob | None] | None = None,
    with_token_ids: bool = False,
) -> dict[str, object]:
    """The output row of an answered row.

    `completions`: the `row.params.n` samples in order. With `n` > 1 the keys `text`, `finish_reason`, `stop_reason`,
    `seed`, `token_ids` and `logprobs` hold lists of n; `completion_tokens` is always the total. A log-probability of
    -inf or NaN is null. `prompt_logprobs`: one entry per prompt token, None for the first.
    """
    result = _head(row)
    result["status"] = "ok"
    fields: dict[str, list[object]] = {
        "text": [item.text for item in completions],
        "finish_reason": [item.finish_reason for item in completions],
        "stop_reason": [item.stop_reason for item in completions],
        "seed": [item.seed for item in completions],
    }
    if with_token_ids:
        fields["token_ids"] = [list(item.token_ids) for item in completions]
    if row.params.logprobs is not None:
        fields["logprobs"] = [logprobs_object(item.logprobs or ()) for item in completions]
    if row.params.n == 1:
        result |= {name: values[0] for name, values in fields.items()}
    else:
        result |= fields
    result["prompt_tokens"] = prompt_tokens
    result["completion_tokens"] = sum(len(item.token_ids) for item in completions)
    if prompt_logprobs is not None:
        result["prompt_logprobs"] = [None if item is None else _entry(item) for item in prompt_logprobs]
    return result | _tail(row)


def error_row(row: Row | RowError, code: str, message: str) -> dict[str, object]:
    """The output row of a row that could not be answered; for a `RowError`, pass its own `code` and `message`."""
    result = _head(row)
    error = {"code": code, "message": message}
    return result | {"status": "error", "text": None, "finish_reason": "error", "error": error} | _tail(row)


def logprobs_object(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """OpenAI chat shape: `{"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}]}`, token ids added."""
    return {"content": [_entry(token) for token in tokens]}


def finite(logprob: float) -> float | None:
    """`logprob`, or None when JSON has no number for it (-inf of a filtered token, NaN of a broken one)."""
    return logprob if math.isfinite(logprob) else None


def encode_row(result: dict[str, object]) -> bytes:
    """One line of strict JSON in UTF-8, with its `\\n`, which is the only line end in it for any reader.

    *Raises*: ValueError for NaN or infinity anywhere: those are mapped to null where they can occur.
    """
    text = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return replace_surrogates(text.translate(_LINE_ENDS)).encode("utf-8") + b"\n"


def _head(row: Row | RowError) -> dict[str, object]:
    head: dict[str, object] = {} if row.id_field is None else {row.id_field: row.row_id}
    return head | {"index": row.index, "line": row.line}


def _tail(row: Row | RowError) -> dict[str, object]:
    tail: dict[str, object] = {}
    if row.warnings:
        tail["warnings"] = list(row.warnings)
    if isinstance(row, Row) and row.extra:
        tail["extra"] = row.extra
    return tail


def _entry(token: TokenLogprob) -> dict[str, object]:
    own = {"token": token.token, "token_id": token.token_id, "logprob": finite(token.logprob)}
    own["bytes"] = None if token.token_bytes is None else list(token.token_bytes)
    if token.top:
        own["top_logprobs"] = [_entry(other) for other in token.top]
    return own
