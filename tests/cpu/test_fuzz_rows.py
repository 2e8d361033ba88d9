"""Nothing a file can hold raises anything but the documented error, loses a row, or breaks the output."""

from __future__ import annotations

import io
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.completion import Completion, TokenLogprob
from engine.openai_format import openai_error_row, openai_row
from engine.option_names import ALIASES, OPTIONS, RENAMED, UNSUPPORTED
from engine.options import OptionError, check_params, parse_options
from engine.result_row import encode_row, error_row, result_row
from engine.rows import Row, RowError, read_rows
from engine.sampling_params import SamplingParams
from launch.errors import UsageError

BASE = SamplingParams()
# Sized for about half a minute on two busy cores; an example of rows holds three of them on average.
NUM_FILES, NUM_ROW_LISTS, NUM_OPTIONS = 3000, 700, 2000
fuzz = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)

_NAMES = [*OPTIONS, *ALIASES, *RENAMED, *UNSUPPORTED, "temprature", "model", "stream", "metadata", "x"]
_KEYS = [
    *_NAMES,
    "prompt",
    "messages",
    "body",
    "params",
    "sampling_params",
    "custom_id",
    "id",
    "method",
    "url",
    "system",
]
_KEYS += ["prompt_token_ids", "input_ids", "continue_final_message"]
_WORDS = ["", "a", "POST", "/v1/chat/completions", "/v1/completions", "user", "assistant", "system", "text", "none"]
# Surrogates are text as well here: json.dumps writes them as escapes, as broken producers do.
_TEXT = st.sampled_from([*_WORDS, "\ud83d", "\udc00", "\u2028", "\x85", "\x00", "é", "😀", "9" * 30]) | st.text(
    max_size=4
)
_NUMBERS = [
    0,
    1,
    -1,
    2,
    5,
    64,
    65,
    100,
    101,
    1024,
    2**31,
    2**63,
    10**400,
    0.0,
    -0.0,
    0.5,
    1.0,
    1.5,
    -2.5,
    1e308,
    5e-324,
]
_NOT_FINITE = [float("nan"), float("inf"), float("-inf")]
_SCALARS = st.sampled_from([None, True, False, *_NUMBERS]) | _TEXT
_MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls"]), _SCALARS, max_size=4)
_VALUES = st.recursive(
    _SCALARS | st.lists(_MESSAGE, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3),
    max_leaves=5,
)
_OPTIONS = st.dictionaries(st.sampled_from(_NAMES), _VALUES | st.sampled_from(_NOT_FINITE), max_size=3)
_REQUEST = st.fixed_dictionaries(
    {},
    optional={
        "prompt": _VALUES,
        "messages": st.lists(_MESSAGE | _VALUES, max_size=3) | _VALUES,
        "prompt_token_ids": st.lists(st.integers(-1, 9), max_size=3),
        "continue_final_message": _SCALARS,
        "temperature": _SCALARS,
        "logprobs": _SCALARS,
    },
)
_ROW = st.one_of(
    st.builds(lambda *parts: {**parts[0], **parts[1], **parts[2]}, _REQUEST, _OPTIONS, st.dictionaries(_TEXT, _VALUES)),
    st.fixed_dictionaries(
        {"body": _REQUEST | _VALUES}, optional={"custom_id": _SCALARS, "url": _TEXT, "method": _TEXT}
    ),
    st.fixed_dictionaries({"prompt": _TEXT, "id": _SCALARS}, optional={"sampling_params": _OPTIONS | _VALUES}),
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def check_output(row: Row | RowError) -> None:
    """Both output shapes of `row` are one line of strict JSON each, for any way of splitting lines."""
    if isinstance(row, Row):
        top = (TokenLogprob("\ud800", 1, float("-inf")),)
        tokens = (TokenLogprob("a\u2028", 2, float("nan"), b"\xff", top),)
        samples = [Completion("x\ud83d\u2028y", (1, 2), "stop", "x", tokens, 5)] * min(row.params.n, 3)
        values = [
            result_row(row, samples, prompt_tokens=3, prompt_logprobs=[None, *tokens], with_token_ids=True),
            openai_row(row, samples, prompt_tokens=3, model="m", created=0),
            error_row(row, "too_long", "x"),
        ]
    else:
        values = [error_row(row, row.code, row.message), openai_error_row(row, row.code, row.message)]
    for value in values:
        line = encode_row(value)
        assert line.endswith(b"\n") and len(line.decode("utf-8").splitlines()) == 1
        back = json.loads(line.decode("utf-8"), parse_constant=refuse_constant)
        assert back["index"] == row.index


def read_all(data: bytes) -> list[Row | RowError] | None:
    try:
        return list(read_rows(io.BytesIO(data), BASE, system="s", default_model="m"))
    except UsageError:
        return None


def num_rows_of(data: bytes) -> int:
    lines = (line.removeprefix(b"\xef\xbb\xbf") for line in data.split(b"\n"))
    return sum(bool(line.strip()) for line in lines)


_PIECES = st.sampled_from(
    [b"\n", b"\r\n", b"\r", b" ", b"\xef\xbb\xbf", b"\xe2\x80\xa8", b"\xff", b"\x00", b'{"prompt":"a"}', b"{", b"}"]
    + [b'"', b"[", b":", b",", b"\\ud800", b"\\", b"1e999", b"NaN", b'"prompt"', b"\xc2\x85", b'{"id":1,"prompt":"b"}']
)


@settings(fuzz, max_examples=NUM_FILES)
@given(st.lists(_PIECES | st.binary(max_size=5), max_size=12).map(b"".join))
def test_any_bytes_give_one_result_for_every_line(data):
    rows = read_all(data)
    if rows is None:
        assert b"\x00" in data[:4] or data[:2] in (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b", b"PK", b"PA", b"\x28\xb5")
        return
    assert len(rows) == num_rows_of(data)
    assert [row.index for row in rows] == list(range(len(rows)))
    for row in rows:
        check_output(row)


@settings(fuzz, max_examples=NUM_ROW_LISTS)
@given(st.lists(_ROW, min_size=2, max_size=4))
def test_any_rows_give_one_result_each_that_can_be_written(values):
    data = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    rows = read_all(data)
    assert rows is not None and len(rows) == len(values)
    for row in rows:
        if isinstance(row, Row):
            assert sum(item is not None for item in (row.prompt, row.messages, row.prompt_token_ids)) == 1
            assert check_params(row.params) == row.params
        check_output(row)


@settings(fuzz, max_examples=NUM_OPTIONS)
@given(
    st.dictionaries(st.sampled_from(_NAMES) | _TEXT | st.integers(), _VALUES | st.sampled_from(_NOT_FINITE), max_size=3)
)
def test_any_options_are_taken_or_refused(options):
    try:
        params = parse_options(options, BASE)
    except OptionError as error:
        assert error.code in ("invalid_option", "unknown_option", "unsupported_option")
        assert error.message.encode("utf-8") and len(error.message) < 400
    else:
        assert check_params(params) == params
