"""Stop strings of one row: finds them in the generated text, whatever tokens or pieces it comes in.

The rule, which does not depend on the pieces: a row stops at the stop string that is *complete* first; of several
that are complete with the same character the longest counts. So with stops `a` and `ab` the text `ab` stops at `a`.
The text is cut where the matched string begins (or ends, with `include`), also when that is in the middle of a token.
A stop string that stands in the prompt does not count, since the prompt is never pushed.

Stop strings that are special tokens never show up in text; `Text.split_stops` turns them into ids.
"""

from __future__ import annotations

from collections.abc import Iterable

from launch.errors import UsageError


class StopStrings:
    """One row's search. Text that may yet turn out to begin a stop string is held back until that is known.

    `stops`: the strings, in any order. `include`: give out the matched string too. *Raises* UsageError on an empty
    string, which would match everywhere. *Cost*: a push looks at the pushed text and at most one stop string's length
    before it.
    """

    def __init__(self, stops: Iterable[str], include: bool = False):
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise UsageError("a stop string is empty; remove it or give it at least one character")
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, new_text: str) -> tuple[str, str | None]:
        """Take `new_text`; returns the text that is safe to show and the matched stop string, if there is one by now.

        After a match everything is swallowed: no text, and the same match again.
        """
        if self._matched is not None:
            return "", self._matched
        text = self._held + new_text
        match = self._first_complete(text)
        if match is not None:
            end, self._matched = match
            self._held = ""
            return text[: end if self._include else end - len(self._matched)], self._matched
        safe = len(text) - self._open_length(text)
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """End of the row without a match: the text held back. Empty after a match."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """Where the first complete stop string ends, and which it is."""
        found = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), stop) for start, stop in found if start >= 0]
        return min(ends, key=lambda match: (match[0], -len(match[1])), default=None)

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
