"""What a row may look like: case C 46, and options, messages, token ids and OpenAI bodies."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest

from engine.rows import Row, RowError, read_rows
from engine.sampling_params import SamplingParams

BASE = SamplingParams()


def read(data: bytes, **options) -> list[Row | RowError]:
    return list(read_rows(io.BytesIO(data), BASE, **options))


def one(value: object, **options) -> Row | RowError:
    (row,) = read(json.dumps(value).encode(), **options)
    return row


def good(value: object, **options) -> Row:
    row = one(value, **options)
    assert isinstance(row, Row), row
    return row


def bad(value: object, **options) -> RowError:
    row = one(value, **options)
    assert isinstance(row, RowError), row
    return row


def chat(*contents: str) -> list[dict]:
    return [{"role": "user", "content": content} for content in contents]


def test_plain_prompt_with_options_and_data():
    row = good({"id": 7, "prompt": "a", "temperature": 1, "label": {"x": [1]}, "speed": 3, "completion_tokens": 9})
    assert (row.id_field, row.row_id, row.prompt, row.is_openai) == ("id", 7, "a", False)
    assert row.params == replace(BASE, temperature=1.0)
    assert row.extra == {"label": {"x": [1]}, "speed": 3, "completion_tokens": 9}


@pytest.mark.parametrize("key", ["sampling_params", "params"])
def test_options_in_an_object(key):
    assert good({"prompt": "a", key: {"temperature": 1, "n": 2}}).params == replace(BASE, temperature=1.0, n=2)
    assert good({"prompt": "a", key: None}).params == BASE
    assert bad({"prompt": "a", key: {"temprature": 1}}).code == "unknown_option"
    assert bad({"prompt": "a", key: [1]}).code == "invalid_row"
    assert bad({"prompt": "a", key: {"n": 2}, "n": 3}).code == "invalid_option"


@pytest.mark.parametrize("key", ["temprature", "max_token", "Temperature", "topP", "stop_token_id", "do_sample"])
def test_mistyped_option_at_the_top_level_is_an_error(key):
    error = bad({"prompt": "a", key: 1, "id": "x"})
    assert error.code == "unknown_option" and key in error.message and error.row_id == "x"


@pytest.mark.parametrize("key", ["tools", "response_format", "guided_json", "best_of", "suffix"])
def test_unsupported_option_at_the_top_level_is_an_error(key):
    assert bad({"prompt": "a", key: [1]}).code == "unsupported_option"
    assert good({"prompt": "a", key: None}).extra == {key: None}


@pytest.mark.parametrize(
    "key", ["topic", "speed", "min", "need", "step", "text", "prediction", "metadata", "model", "user", "output_tokens"]
)
def test_data_columns_are_not_taken_for_options(key):
    assert good({"prompt": "a", key: 1}).extra == {key: 1}


def test_option_of_the_wrong_type_is_an_error_of_the_row():
    error = bad({"custom_id": "x", "prompt": "a", "temperature": "0"})
    assert error.code == "invalid_option" and (error.id_field, error.row_id) == ("custom_id", "x")


def test_token_ids():
    for key in ("prompt_token_ids", "input_ids"):
        assert good({key: [0, 5]}).prompt_token_ids == [0, 5]
        for wrong in ([], [1.0], [True], [-1], "1 2", [[1], [2]], [None]):
            assert isinstance(one({key: wrong}), RowError), wrong
    assert good({"prompt": [1, 2]}).prompt_token_ids == [1, 2]


def test_list_of_prompts_is_refused_with_the_remedy():
    assert "one row for each prompt" in bad({"prompt": ["a", "b"]}).message
    assert good({"prompt": ["a"]}).prompt == "a"
    assert "one row for each prompt" in bad({"body": {"prompt": [[1], [2]]}}).message


def test_more_than_one_input_is_refused():
    error = bad({"prompt": "a", "messages": chat("b")})
    assert "prompt and messages" in error.message
    assert isinstance(one({"prompt": "a", "input_ids": [1]}), RowError)
    assert good({"prompt": "a", "messages": None}).prompt == "a"


def test_prompt_field_wins_over_other_columns():
    row = good({"question": "q", "prompt": "template", "messages": "m"}, prompt_field="question")
    assert row.prompt == "q" and row.extra == {"prompt": "template", "messages": "m"}
    assert good({"prompt": "a"}, prompt_field="question").prompt == "a"
    assert good({"talk": chat("a")}, prompt_field="talk").messages == chat("a")
    assert "question" in bad({"x": 1}, prompt_field="question").message
    assert good({"text": "t", "prompt_token_ids": [1]}, prompt_field="text").prompt == "t"


def test_messages_are_brought_to_one_form():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    row = good({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts, "name": "x"}]})
    assert row.messages == [{"role": "system", "content": "s"}, {"role": "user", "content": "a b"}]
    assert row.continue_final_message is False


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "non-empty list"),
        ("hello", "non-empty list"),
        (["hello"], "messages[0] must be an object"),
        ([{"from": "human", "value": "x"}], "found: 'from', 'value'"),
        ([{"role": "user"}], "has no 'content'"),
        ([{"role": "tool", "content": "x"}], "'tool'"),
        ([{"role": ["user"], "content": "x"}], "the role"),
        ([{"role": "user", "content": None}], "null"),
        ([{"role": "user", "content": []}], "a list of 0"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "null"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(messages, words):
    error = bad({"messages": messages})
    assert error.code == "invalid_messages" and words in error.message


def test_final_assistant_message_is_continued_only_when_asked():
    messages = [*chat("a"), {"role": "assistant", "content": "b"}]
    assert good({"messages": messages}).continue_final_message is False
    assert good({"messages": messages, "continue_final_message": True}).continue_final_message is True
    assert good({"body": {"messages": messages, "continue_final_message": True}}).continue_final_message is True
    assert isinstance(one({"messages": chat("a"), "continue_final_message": True}), RowError)
    assert isinstance(one({"messages": messages, "continue_final_message": "yes"}), RowError)


def test_system_text():
    assert good({"messages": chat("a")}, system="s").messages[0] == {"role": "system", "content": "s"}
    own = [{"role": "system", "content": "own"}, *chat("a")]
    assert good({"messages": own}, system="s").messages == own
    assert good({"messages": chat("a"), "system": "row"}, system="s").messages[0]["content"] == "row"
    assert isinstance(one({"messages": own, "system": "row"}), RowError)
    assert (good({"prompt": "a"}, system="s").prompt, good({"prompt": "a"}, system="s").system) == ("a", "s")
    assert good({"prompt": "a", "system": "row"}, system="s").system == "row"
    assert good({"body": {"messages": chat("a")}}, system="s").messages[0]["content"] == "s"


@pytest.mark.parametrize("outer", [{}, {"method": "POST"}, {"method": "post", "url": "/v1/chat/completions"}])
def test_openai_chat_row(outer):
    body = {"model": "m", "messages": chat("a"), "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}
    row = good({"custom_id": "a", **outer, "body": body, "batch": 1})
    assert (row.id_field, row.row_id, row.is_openai, row.endpoint) == ("custom_id", "a", True, "/v1/chat/completions")
    assert row.params == replace(BASE, max_tokens=3, logprobs=2) and row.extra == {"batch": 1}


def test_openai_completions_row():
    row = good({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "p", "logprobs": 3}})
    assert (row.prompt, row.endpoint, row.params.logprobs) == ("p", "/v1/completions", 3)
    assert good({"custom_id": "a", "body": {"prompt": "p"}}).endpoint == "/v1/completions"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"custom_id": "a", "params": {"messages": [{}]}}, "stands under 'body', not 'params'"),
        ({"custom_id": "a", "request": {}}, "'request'"),
        ({"custom_id": "a", "body": "x"}, "body must be an object"),
        ({"custom_id": "a", "method": "GET", "body": {"prompt": "a"}}, "method must be POST"),
        ({"custom_id": "a", "url": "/v1/embeddings", "body": {"input": "a"}}, "/v1/embeddings"),
        ({"custom_id": "a", "url": "/v1/chat/completions", "body": {"prompt": "a"}}, "needs 'messages'"),
        ({"custom_id": "a", "url": "/v1/completions", "body": {"messages": [{}]}}, "messages[0]"),
        ({"custom_id": "a", "body": {}}, "unknown shape"),
        ({"custom_id": "a", "body": {"prompt": "a", "zzz": 1}}, "unknown option 'zzz'"),
        ({"custom_id": "a", "body": {"prompt": "a", "stream": "yes"}}, "stream must be true or false"),
        ({"custom_id": "a", "body": {"prompt": "a", "model": 5}}, "model must be a string"),
        ({"custom_id": "a", "body": {"prompt": "a"}, "temperature": 1}, "belongs inside its body"),
    ],
)
def test_openai_rows_that_cannot_be_answered_keep_their_id(row, words):
    error = bad(row)
    assert words in error.message and error.row_id == "a" and error.is_openai == ("body" in row)


def test_openai_fields_without_meaning_here_are_accepted():
    body = {"prompt": "a", "user": "u", "metadata": {}, "store": True, "service_tier": "auto", "stream_options": {}}
    assert good({"body": body}).warnings == ()
