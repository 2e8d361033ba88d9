"""Typed, bounded access to the keys of a JSON object, with errors that name the file, the key and the value.

Not a schema language: a reader that turns "whatever the file holds" into Python values or a `ModelError`. A key
that is present but null counts as absent everywhere, because exporters write null for "not set".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from launch.errors import ModelError

REQUIRED: Any = object()


class ConfigFields:
    """The keys of one JSON object. `where` names it in errors (a file, or a file and a key)."""

    def __init__(self, data: Any, where: str):
        self.where = where
        if not isinstance(data, Mapping):
            self.fail(f"must hold a JSON object, not {shown(data)}")
        self.data = data

    def fail(self, message: str) -> NoReturn:
        raise ModelError(f"{self.where}: {message}")

    def has(self, key: str) -> bool:
        return self.data.get(key) is not None

    def value(self, key: str, default: Any = REQUIRED) -> Any:
        """The raw value, or `default` where the key is absent or null; a missing required key is an error by name."""
        if self.has(key):
            return self.data[key]
        if default is REQUIRED:
            self.fail(f"the key {key!r} is missing; it is needed to build the model")
        return default

    def whole(self, key: str, default: Any = REQUIRED, low: int = 1, high: int = 2**31 - 1) -> Any:
        """An integer in [low, high]. `true` is not 1, and 4.0 is not 4: both are typing mistakes in a config."""
        value = self.value(key, default)
        if not self.has(key):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(f"{key!r} must be a whole number from {low} to {high}, not {shown(value)}")
        return value

    def number(self, key: str, default: Any = REQUIRED, low: float = 0.0, high: float = 1e12) -> Any:
        """A finite number in [low, high] as a float; NaN and infinities fail the comparison."""
        value = self.value(key, default)
        if not self.has(key):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.fail(f"{key!r} must be a number from {low:g} to {high:g}, not {shown(value)}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            self.fail(f"{key!r} must be true or false, not {shown(value)}")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        value = self.value(key, default)
        if self.has(key) and not isinstance(value, str):
            self.fail(f"{key!r} must be a string, not {shown(value)}")
        return value


def shown(value: Any, limit: int = 60) -> str:
    """`repr` of a value from a file, cut to a length fit for a sentence."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers past Python's digit limit; absurdly nested lists
        return f"an unprintable {type(value).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."
