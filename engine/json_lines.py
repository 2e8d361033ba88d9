"""A file of JSON objects, one a line: how lines are cut, decoded and parsed. What the objects mean is in `engine.rows`.

Stricter than `json.loads`: NaN and Infinity, numbers that overflow to infinity, duplicate keys and absurd nesting are
refused, because each would lose or change data without a word or break the output line that carries it back.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from engine.refused import Refused, replace_surrogates, show
from launch.errors import UsageError

MAX_LINE_BYTES = 64 << 20  # a line is held in memory; 64 MiB is far above any context length in text
MAX_DEPTH = 64  # levels of nesting; no request needs 10, and Python's JSON code recurses once a level
_BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


def open_lines(source: BinaryIO | Path | str) -> BinaryIO:
    """`source` open for reading bytes; `-` is standard input.

    *Raises*: UsageError when the file is missing, a folder or not readable.
    """
    if source == "-" or source == Path("-"):
        return sys.stdin.buffer
    if not isinstance(source, (str, Path)):
        return source
    try:
        return Path(source).open("rb")
    except FileNotFoundError:
        raise UsageError(f"input file {source} does not exist") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the input file {source}: {_reason(error)}") from None


def numbered_lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """1-based line number and bytes (no line end, no byte order mark) of every line that is not blank.

    Lines end at `\\n` only, so U+2028, U+0085 and lone `\\r` stay inside their line. A line of `MAX_LINE_BYTES` or
    more is skipped to its end and given as None; nothing else is dropped but blank lines.

    *Raises*: UsageError for UTF-16, UTF-32 and compressed files, and when reading fails.
    """
    number = 0
    while True:
        try:
            line, is_whole = _read_line(stream)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the input after line {number}: {_reason(error)}") from None
        if not line:
            return
        number += 1
        if number == 1:
            _check_encoding(line)
        if not is_whole:
            yield number, None
            continue
        line = line.removeprefix(_BOM).rstrip(b"\r\n")  # files joined by `cat` can hold the mark on any line
        if line.strip():
            yield number, line


def parse_object(line: bytes) -> tuple[dict[str, object], bool]:
    """The object a line holds, and whether lone surrogate escapes in it were replaced by U+FFFD.

    *Raises*: Refused with code `invalid_utf8` or `invalid_json`.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("invalid_utf8", f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start}") from None
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise Refused("invalid_json", f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise Refused("invalid_json", f"nested more than {MAX_DEPTH} levels deep") from None
    except ValueError as error:
        if isinstance(error, Refused):
            raise
        raise Refused("invalid_json", f"holds a number with too many digits (at most {_max_digits()})") from None
    if not isinstance(value, dict):
        raise Refused("invalid_json", f"the line is {show(value)}, not an object; a file holds one JSON object a line")
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(value)
    if not _SURROGATE_ESCAPE.search(text):
        return value, False
    cleaned = _without_surrogates(value)
    return cleaned, cleaned != value


def _read_line(stream: BinaryIO) -> tuple[bytes, bool]:
    """The next line with its end, empty at the end of the file; of one that is too long, a first piece and False."""
    line = stream.readline(MAX_LINE_BYTES)
    if len(line) < MAX_LINE_BYTES or line.endswith(b"\n"):
        return line, True
    piece = line
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(MAX_LINE_BYTES)
    return line, False


def _check_encoding(head: bytes) -> None:
    """Refuse files that are not UTF-8 text, from their first bytes (byte order marks; RFC 4627, section 3)."""
    zeros = tuple(byte == 0 for byte in head[:4])
    name = {
        (True, True, True, False): "UTF-32",
        (False, True, True, True): "UTF-32",
        (True, False, True, False): "UTF-16 (big-endian)",
        (False, True, False, True): "UTF-16 (little-endian)",
    }.get(zeros)
    for mark, encoding in _FOREIGN_MARKS:
        if name is None and head.startswith(mark):
            name = encoding
    if name in _COMPRESSED:
        raise UsageError(f"the input is a {name} file, not JSON lines; unpack or convert it first")
    if name is not None:
        raise UsageError(f"the input is encoded as {name}; convert it to UTF-8 (for example with iconv)")


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise Refused("invalid_json", f"nested more than {MAX_DEPTH} levels deep")


def _without_surrogates(value: object) -> object:
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return _object([(replace_surrogates(key), _without_surrogates(item)) for key, item in value.items()])
    return value


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object whose keys all differ: of two equal keys, `json` would keep the last and drop the other silently."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise Refused("invalid_json", f"the key {show(twice)} is there twice")
    return result


def _refuse_constant(name: str) -> object:
    raise Refused("invalid_json", f"not JSON: {name} is not a JSON value")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise Refused("invalid_json", f"the number {show(text)} is too large")
    return number


def _max_digits() -> int:
    return sys.get_int_max_str_digits()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite)
_COMPRESSED = ("gzip", "zip", "zstd", "parquet")
_FOREIGN_MARKS = (
    (b"\xff\xfe\x00\x00", "UTF-32"),
    (b"\x00\x00\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16 (little-endian)"),
    (b"\xfe\xff", "UTF-16 (big-endian)"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PAR1", "parquet"),
)
