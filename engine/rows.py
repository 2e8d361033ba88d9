"""Batch input: every line that is not blank becomes one `Row` or one `RowError`, in order, lazily.

Shapes: `prompt`, `messages`, token ids (`prompt_token_ids`, `input_ids`), and OpenAI batch rows (`custom_id`, `body`,
optional `method` and `url`). No tokenizer here: lengths and vocabulary are checked by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from engine.json_lines import MAX_LINE_BYTES, numbered_lines, open_lines, parse_object
from engine.messages import Message
from engine.refused import Refused, show
from engine.row_shapes import read_openai, read_plain
from engine.sampling_params import SamplingParams

ID_FIELDS = ("custom_id", "id")


@dataclass(frozen=True)
class Row:
    """One request. Exactly one of `prompt`, `messages` and `prompt_token_ids` is set.

    `index`: 0-based count of lines that are not blank; the key everything is joined by, never the id. `line`: 1-based
    line number in the file. `row_id`, `id_field`: the user's id and the key it stood under, or None. `system`: system
    text for a `prompt` row, for a caller that renders it as a chat (it is already in `messages`). `endpoint`: OpenAI
    path of an OpenAI row. `extra`: the row's other keys, to be carried to the output. `warnings`: sentences for the
    user.
    """

    index: int
    line: int
    row_id: str | int | None
    id_field: str | None
    params: SamplingParams
    prompt: str | None = None
    messages: list[Message] | None = None
    prompt_token_ids: list[int] | None = None
    continue_final_message: bool = False
    system: str | None = None
    is_openai: bool = False
    endpoint: str | None = None
    extra: dict[str, object] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class RowError:
    """A line that cannot be answered: `code` for programs, `message` for people. The other fields as in `Row`."""

    index: int
    line: int
    code: str
    message: str
    row_id: str | int | None = None
    id_field: str | None = None
    is_openai: bool = False
    endpoint: str | None = None
    warnings: tuple[str, ...] = ()


def read_rows(
    source: BinaryIO | Path | str,
    defaults: SamplingParams,
    *,
    prompt_field: str = "prompt",
    system: str | None = None,
    default_model: str | None = None,
    limit: int | None = None,
) -> Iterator[Row | RowError]:
    """Rows of `source` (a path, `-`, or a stream of bytes), one for every line that is not blank, at most `limit`.

    `defaults`: options of the run; a row's own come over them. `prompt_field`: key of the prompt; a key other than
    `prompt` wins over everything else in the row. `system`: put before chats that have no system message.
    `default_model`: a `model` in an OpenAI body that differs from it is warned about once.

    Nothing is held but the current line and a hash of every id seen (about 100 bytes a row), which finds ids used
    twice: both rows are answered, and the first such pair of the file is warned about with both line numbers.

    *Raises*: UsageError when the file as a whole cannot be read (missing: at the call; not UTF-8: at the first row).
    """
    reader = _RowReader(defaults, prompt_field, system, default_model)
    return reader.read(open_lines(source), limit)


class _RowReader:
    """What has to be remembered from row to row."""

    def __init__(self, defaults: SamplingParams, prompt_field: str, system: str | None, default_model: str | None):
        self._defaults = defaults
        self._prompt_field = prompt_field
        self._system = system
        self._default_model = default_model
        self._line_of_id: dict[int, int] = {}
        self._warned: set[str] = set()

    def read(self, stream: BinaryIO, limit: int | None) -> Iterator[Row | RowError]:
        for index, (line, data) in enumerate(numbered_lines(stream)):
            if limit is not None and index >= limit:
                return
            yield self._read_row(index, line, data)

    def _read_row(self, index: int, line: int, data: bytes | None) -> Row | RowError:
        known: dict[str, object] = {}
        warnings: list[str] = []
        try:
            if data is None:
                raise Refused("line_too_long", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
            value, had_surrogates = parse_object(data)
            if had_surrogates:
                warnings.append("a lone surrogate escape (half of a \\u pair) was replaced by U+FFFD")
            known["is_openai"] = "body" in value
            known["id_field"], known["row_id"] = _take_id(value)
            warnings += self._note_id(known["row_id"], line)
            if known["is_openai"]:
                known["endpoint"], request = read_openai(value, self._defaults, self._system)
            else:
                request = read_plain(value, self._defaults, self._system, self._prompt_field)
        except Refused as error:
            return RowError(index, line, error.code, error.message, warnings=tuple(warnings), **known)
        warnings += self._note_request(request.model, request.wants_stream)
        return Row(index, line, params=request.params, warnings=tuple(warnings), **known, **request.fields())

    def _note_id(self, row_id: str | int | None, line: int) -> list[str]:
        if row_id is None:
            return []
        first = self._line_of_id.setdefault(hash((type(row_id).__name__, row_id)), line)
        if first == line:
            return []
        remedy = "both rows are answered, join them by index or line"
        return self._once("id", f"the id {show(row_id)} of line {line} was already used on line {first}; {remedy}")

    def _note_request(self, model: str | None, wants_stream: bool) -> list[str]:
        warnings = []
        if wants_stream:
            warnings += self._once("stream", "stream: true has no meaning in a batch file and is ignored")
        if model is not None and self._default_model is not None and model != self._default_model:
            text = f"the rows ask for the model {show(model)}; they are answered by {show(self._default_model)}"
            warnings += self._once("model", text)
        return warnings

    def _once(self, topic: str, text: str) -> list[str]:
        """A warning about the file rather than the row: given with the first row it applies to."""
        if topic in self._warned:
            return []
        self._warned.add(topic)
        return [text]


def _take_id(value: dict[str, object]) -> tuple[str | None, str | int | None]:
    """Remove the id from the row; the first of `ID_FIELDS` that is there and not null."""
    for name in ID_FIELDS:
        row_id = value.get(name)
        if row_id is None:
            continue
        if isinstance(row_id, bool) or not isinstance(row_id, (str, int)):
            raise Refused("invalid_row", f"{name} must be a string or a whole number, not {show(row_id)}")
        del value[name]
        return name, row_id
    return None, None
