"""The rows of the output, plain and as OpenAI writes them: cases C 40, 41, D 52 and 58."""

from __future__ import annotations

import io
import json
import math

import pytest

from engine.completion import Completion, TokenLogprob
from engine.openai_format import openai_error_row, openai_row
from engine.result_row import encode_row, error_row, result_row
from engine.rows import Row, RowError, read_rows
from engine.sampling_params import SamplingParams


def row_of(value: dict) -> Row | RowError:
    return next(read_rows(io.BytesIO(b"\n" + json.dumps(value).encode()), SamplingParams()))


def strict(line: bytes) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    return json.loads(line.decode("utf-8"), parse_constant=refuse)


def tokens() -> tuple[TokenLogprob, ...]:
    top = (TokenLogprob("b", 2, -0.5), TokenLogprob("c", 3, -math.inf), TokenLogprob("b", 4, -9.0))
    return (TokenLogprob("a", 1, -0.25, b"a", top), TokenLogprob("\ufffd", 5, math.nan, b"\xf0"))


def test_result_row_holds_what_joins_and_explains_it():
    row = row_of({"custom_id": "x", "prompt": "p", "logprobs": 3, "label": [1]})
    result = result_row(
        row, [Completion("hi", (1, 5), "stop", "###", tokens(), 7)], prompt_tokens=4, with_token_ids=True
    )
    logprobs = result.pop("logprobs")
    assert result == {
        "custom_id": "x",
        "index": 0,
        "line": 2,
        "status": "ok",
        "text": "hi",
        "finish_reason": "stop",
        "stop_reason": "###",
        "seed": 7,
        "token_ids": [1, 5],
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "extra": {"label": [1]},
    }
    first, second = logprobs["content"]
    assert (first["token"], first["token_id"], first["logprob"], first["bytes"]) == ("a", 1, -0.25, [97])
    assert [item["logprob"] for item in first["top_logprobs"]] == [-0.5, None, -9.0]
    assert second["logprob"] is None and second["bytes"] == [0xF0]


def test_several_samples_are_lists_and_the_count_is_the_total():
    row = row_of({"prompt": "p", "n": 2})
    result = result_row(row, [Completion("a", (1,), "stop"), Completion("b", (1, 2), "length")], prompt_tokens=4)
    assert result["text"] == ["a", "b"] and result["finish_reason"] == ["stop", "length"]
    assert result["completion_tokens"] == 3 and "logprobs" not in result and "token_ids" not in result


def test_prompt_logprobs_keep_the_place_of_the_first_token():
    row = row_of({"prompt": "p"})
    result = result_row(row, [Completion("a", (1,), "stop")], prompt_tokens=2, prompt_logprobs=[None, tokens()[0]])
    assert result["prompt_logprobs"][0] is None and result["prompt_logprobs"][1]["token"] == "a"


def test_error_row_carries_id_line_and_data():
    row = row_of({"id": 7, "prompt": "p", "x": 1})
    result = error_row(row, "too_long", "5 tokens, 4 fit")
    assert result["id"] == 7 and result["line"] == 2 and result["status"] == "error" and result["extra"] == {"x": 1}
    assert result["error"] == {"code": "too_long", "message": "5 tokens, 4 fit"}
    refused = row_of({"id": "7", "prompt": 5})
    assert error_row(refused, refused.code, refused.message)["id"] == "7"


def test_openai_chat_shape():
    row = row_of({"custom_id": "x", "body": {"messages": [{"role": "user", "content": "u"}], "logprobs": True}})
    result = strict(
        encode_row(
            openai_row(row, [Completion("hi", (1, 5), "stop", None, tokens())], prompt_tokens=4, model="m", created=9)
        )
    )
    body = result["response"]["body"]
    assert (result["custom_id"], result["index"], result["error"], result["response"]["status_code"]) == (
        "x",
        0,
        None,
        200,
    )
    assert (body["object"], body["model"], body["created"]) == ("chat.completion", "m", 9)
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    choice = body["choices"][0]
    assert choice["message"]["content"] == "hi" and choice["finish_reason"] == "stop" and choice["index"] == 0
    assert choice["logprobs"]["content"][1]["logprob"] is None


def test_openai_completions_shape():
    row = row_of({"prompt": "p", "logprobs": 2, "n": 2})
    samples = [Completion("hi", (1, 5), "length", None, tokens()), Completion("ho", (2,), "stop")]
    body = openai_row(row, samples, prompt_tokens=4, model="m", created=9)["response"]["body"]
    assert body["object"] == "text_completion" and [choice["text"] for choice in body["choices"]] == ["hi", "ho"]
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd"] and logprobs["text_offset"] == [0, 1]
    assert logprobs["token_logprobs"] == [-0.25, None]
    assert logprobs["top_logprobs"] == [{"b": -0.5, "c": None}, {}]


def test_openai_error_is_where_either_kind_of_reader_looks():
    result = openai_error_row(row_of({"body": {}}), "invalid_row", "why")
    assert result["custom_id"] == "row-0" and result["response"]["status_code"] == 400
    assert result["response"]["body"]["error"]["message"] == "why" and result["error"]["code"] == "invalid_row"


def test_lines_are_strict_json_utf8_and_one_line_for_any_reader():
    line = encode_row({"text": "a\u2028\u2029\u0085\n\x1c é😀 \ud83d", "index": 0})
    assert len(line.decode("utf-8").splitlines()) == 1 and "é😀".encode() in line
    assert strict(line)["text"] == "a\u2028\u2029\u0085\n\x1c é😀 \ufffd"
    with pytest.raises(ValueError):
        encode_row({"x": math.nan})
