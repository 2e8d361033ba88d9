"""The error that turns one row into an error row and leaves the run alone."""

from __future__ import annotations


class Refused(ValueError):
    """One row, or one value of it, cannot be used. `code` is a stable word for programs, the text is for people."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


def show(value: object, limit: int = 60) -> str:
    """`value` as a short piece of an error message; safe for numbers, nesting and surrogates of any kind."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"  # repr() refuses integers of more than 4300 digits
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit] + "…"
    text = {None: "null", True: "true", False: "false"}.get(value) if value is None or isinstance(value, bool) else None
    return text or replace_surrogates(repr(value))


def replace_surrogates(text: str) -> str:
    """`text` with lone surrogates as U+FFFD, so that UTF-8 can hold it. Surrogate pairs become their character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
