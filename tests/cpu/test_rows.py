"""Lines of a batch file: cases C 37, 38, 40, 41, 47, 49 and D 50."""

from __future__ import annotations

import io
import json
import tracemalloc

import pytest

from engine import json_lines
from engine.rows import Row, RowError, read_rows
from engine.sampling_params import SamplingParams
from launch.errors import UsageError

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


def test_blank_lines_are_skipped_and_still_counted():
    rows = read(b'{"prompt":"a"}\n\n   \t\n{"prompt":"b"}\r\n\n')
    assert [(row.index, row.line, row.prompt) for row in rows] == [(0, 1, "a"), (1, 4, "b")]


def test_last_line_needs_no_line_end():
    assert [row.prompt for row in read(b'{"prompt":"a"}\n{"prompt":"b"}')] == ["a", "b"]


def test_byte_order_mark_is_accepted_also_where_files_were_joined():
    mark = b"\xef\xbb\xbf"
    rows = read(mark + b'{"prompt":"a"}\n' + mark + b'{"prompt":"b"}\n' + mark + b"\n")
    assert [row.prompt for row in rows] == ["a", "b"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_other_encodings_are_refused_by_name(encoding):
    name = encoding[:6].upper()
    with pytest.raises(UsageError, match=name):
        read('{"prompt":"a"}\n{"prompt":"b"}\n'.encode(encoding))


@pytest.mark.parametrize("head", [b"\x1f\x8b\x08\x00", b"PK\x03\x04", b"PAR1"])
def test_compressed_files_are_refused(head):
    with pytest.raises(UsageError, match="unpack or convert"):
        read(head + b"whatever\n")


def test_only_newline_ends_a_line():
    text = "a\u2028b\u2029c\u0085d\x1fe"
    row = read(json.dumps({"prompt": text}, ensure_ascii=False).encode())[0]
    assert row.prompt == text
    assert len(read(b'{"prompt":\r"a"}')) == 1


def test_lone_surrogate_becomes_a_replacement_character_with_a_warning():
    (row,) = read(b'{"prompt": "x \\ud83d y", "k\\udc00": "\\ud83d\\ude00"}')
    assert row.prompt == "x \ufffd y" and row.extra == {"k\ufffd": "😀"}
    assert "U+FFFD" in row.warnings[0]
    (pair,) = read(b'{"prompt": "\\ud83d\\ude00"}')
    assert pair.prompt == "😀" and pair.warnings == ()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        (b'{"prompt":"a"', "invalid_json", "not JSON"),
        (b'{"prompt":"\xff"}', "invalid_utf8", "0xff"),
        (b'{"prompt":"\xed\xa0\xbd"}', "invalid_utf8", "UTF-8"),
        (b'{"prompt":"a","x":NaN}', "invalid_json", "NaN"),
        (b'{"prompt":"a","x":-Infinity}', "invalid_json", "Infinity"),
        (b'{"prompt":"a","x":1e999}', "invalid_json", "too large"),
        (b'{"prompt":"a","prompt":"b"}', "invalid_json", "'prompt' is there twice"),
        (b'{"prompt":"a","x":{"k":1,"k":1}}', "invalid_json", "twice"),
        (b'{"prompt":"a","\\ud800":1,"\\ud801":1}', "invalid_json", "twice"),
        (b'{"prompt":"a","x":' + b"9" * 5000 + b"}", "invalid_json", "digits"),
        (b'{"prompt":"a","x":' + b"[" * 65 + b"]" * 65 + b"}", "invalid_json", "nested"),
        (b"[" * 200_000, "invalid_json", "nested"),
        (b'["a"]', "invalid_json", "a list of 1, not an object"),
        (b'"a"', "invalid_json", "not an object"),
        (b"null", "invalid_json", "null, not an object"),
        (b"{}", "invalid_row", "found: nothing"),
        (b'{"question":"a"}', "invalid_row", "'question'"),
    ],
)
def test_a_bad_line_is_one_error_and_the_next_line_is_read(line, code, words):
    first, second = read(line + b'\n{"prompt":"b"}\n')
    assert isinstance(first, RowError) and first.code == code and words in first.message
    assert len(first.message) < 300 and "\n" not in first.message
    assert (second.index, second.line, second.prompt) == (1, 2, "b")


def test_nesting_at_the_limit_is_carried():
    row = read(b'{"prompt":"a","x":' + b"[" * 62 + b"]" * 62 + b"}")[0]
    assert isinstance(row, Row)


def test_a_line_that_is_too_long_is_one_error(monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 64)
    rows = read(b'{"prompt":"a"}\n{"prompt":"' + b"x" * 500 + b'"}\n{"prompt":"b"}\n{"prompt":"' + b"y" * 200)
    assert [getattr(row, "code", None) for row in rows] == [None, "line_too_long", None, "line_too_long"]
    assert [row.line for row in rows] == [1, 2, 3, 4]


def test_missing_file_and_folder_are_refused_at_the_call(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        read_rows(tmp_path / "none.jsonl", BASE)
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path, BASE)


def test_path_with_non_ascii_name(tmp_path):
    path = tmp_path / "Fragen-问题.jsonl"
    path.write_bytes('{"prompt":"你好"}\n'.encode())
    assert [row.prompt for row in read_rows(path, BASE)] == ["你好"]


def test_a_large_file_is_not_held(tmp_path):
    path = tmp_path / "large.jsonl"
    path.write_bytes((json.dumps({"prompt": "x" * 10_000}) + "\n").encode() * 2_000)  # 20 MB
    tracemalloc.start()
    assert sum(isinstance(row, Row) for row in read_rows(path, BASE)) == 2_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_limit_counts_rows_not_lines():
    data = b'\n{"prompt":"a"}\n\nbad\n{"prompt":"c"}\n'
    assert [row.line for row in read(data, limit=2)] == [2, 4]
    assert read(data, limit=0) == []


def test_warnings_about_the_file_are_given_once():
    line = json.dumps({"body": {"prompt": "a", "stream": True, "model": "other"}}).encode() + b"\n"
    rows = read(line * 3, default_model="mine")
    assert [len(row.warnings) for row in rows] == [2, 0, 0]
    assert good({"body": {"prompt": "a", "model": "mine"}}, default_model="mine").warnings == ()


def test_ids_used_twice_are_answered_and_warned_about_once_with_both_lines():
    ids = ["a", 7, "7", "", "", None, "a", "a"]
    rows = read(b"\n".join(json.dumps({"custom_id": row_id, "prompt": "p"}).encode() for row_id in ids))
    assert [row.row_id for row in rows] == ids and [row.index for row in rows] == list(range(8))
    assert [row.index for row in rows if row.warnings] == [4]
    assert "line 5" in rows[4].warnings[0] and "line 4" in rows[4].warnings[0]


def test_seven_and_its_text_are_different_ids():
    assert all(not row.warnings for row in read(b'{"id":7,"prompt":"a"}\n{"id":"7","prompt":"a"}'))


@pytest.mark.parametrize("row_id", [True, 1.5, [], {}])
def test_an_id_must_be_text_or_a_number(row_id):
    assert "must be a string or a whole number" in bad({"id": row_id, "prompt": "a"}).message


def test_first_id_field_is_the_id_and_the_other_is_data():
    row = good({"id": 5, "custom_id": "a", "prompt": "p"})
    assert (row.id_field, row.row_id, row.extra) == ("custom_id", "a", {"id": 5})
