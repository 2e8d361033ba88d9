"""Output rows in the shape of the OpenAI batch service (`--openai`)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.completion import Completion, TokenLogprob
from engine.result_row import finite, logprobs_object
from engine.row_shapes import CHAT, COMPLETIONS
from engine.rows import Row, RowError

OK, BAD_REQUEST = 200, 400


def openai_row(
    row: Row, completions: Sequence[Completion], *, prompt_tokens: int, model: str, created: int
) -> dict[str, object]:
    """An answered row: `id`, `custom_id`, `index`, `response` (`status_code`, `request_id`, `body`) and `error` null.

    `model`: the name the body carries. `created`: Unix seconds. `index` is ours, for readers that join by it and for
    `--resume`. A row without an id gets `row-<index>` as its `custom_id`.
    """
    is_chat = _endpoint(row) == CHAT
    completion_tokens = sum(len(item.token_ids) for item in completions)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{row.index}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created,
        "model": model,
        "choices": [_choice(position, item, is_chat, row) for position, item in enumerate(completions)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }
    return _envelope(row, OK, body, None)


def openai_error_row(row: Row | RowError, code: str, message: str) -> dict[str, object]:
    """A refused row: status 400 with the error in the body, as OpenAI does, and in `error`, as vLLM does.

    Programs written for either look in one of the two places only.
    """
    error = {"code": code, "message": message}
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return _envelope(row, BAD_REQUEST, body, error)


def _envelope(row: Row | RowError, status_code: int, body: dict[str, object], error: object) -> dict[str, object]:
    return {
        "id": f"batch_req_{row.index}",
        "custom_id": f"row-{row.index}" if row.row_id is None else row.row_id,
        "index": row.index,
        "response": {"status_code": status_code, "request_id": f"req_{row.index}", "body": body},
        "error": error,
    }


def _endpoint(row: Row) -> str:
    return row.endpoint or (CHAT if row.messages is not None else COMPLETIONS)


def _choice(position: int, item: Completion, is_chat: bool, row: Row) -> dict[str, object]:
    choice: dict[str, object] = {"index": position}
    tokens = (item.logprobs or ()) if row.params.logprobs is not None else None
    if is_chat:
        choice["message"] = {"role": "assistant", "content": item.text, "refusal": None}
        choice["logprobs"] = None if tokens is None else logprobs_object(tokens)
    else:
        choice["text"] = item.text
        choice["logprobs"] = None if tokens is None else _completion_logprobs(tokens)
    return choice | {"finish_reason": item.finish_reason, "stop_reason": item.stop_reason}


def _completion_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, object]:
    """The older shape of `/v1/completions`. `text_offset` counts the characters of the tokens' own texts before each.

    `top_logprobs` is keyed by text there; of tokens with the same text (parts of characters) the most likely one is
    kept.
    """
    offsets, offset = [], 0
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    tops = []
    for token in tokens:
        top: dict[str, float | None] = {}
        for other in token.top:
            top.setdefault(other.token, finite(other.logprob))
        tops.append(top)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
