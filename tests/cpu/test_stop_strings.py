"""Stop strings against the plain rule: search the whole text for the first one that is complete."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.stop_strings import StopStrings
from engine.text import Text
from launch.errors import UsageError
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer


def run(stops, chunks, include=False):
    """All text shown, the match, and the text shown up to each chunk."""
    search, shown, matched, history = StopStrings(stops, include), "", None, []
    for chunk in chunks:
        emitted, matched = search.push(chunk)
        shown += emitted
        history.append(shown)
    return shown + search.flush(), matched, history


def reference(stops, text, include=False):
    """The same answer from the whole text: the shortest beginning that ends in a stop string, the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


_SMALL = st.text("abc\n", max_size=5)


@settings(max_examples=600, deadline=None)
@given(stops=st.lists(_SMALL.filter(bool), max_size=4), chunks=st.lists(_SMALL, max_size=8), include=st.booleans())
@example(stops=["abcd", "c"], chunks=["ab", "cd"], include=False)
@example(stops=["a", "ab"], chunks=["xab"], include=True)
@example(stops=["bc", "abc"], chunks=["ab", "c"], include=False)
@example(stops=["aab"], chunks=["a", "a", "a", "b"], include=False)
def test_equals_the_whole_search_for_any_chunks(stops, chunks, include):
    text = "".join(chunks)
    shown, matched, history = run(stops, chunks, include)
    assert (shown, matched) == reference(stops, text, include)
    for so_far in history:
        assert shown.startswith(so_far)  # nothing shown is ever taken back


@settings(max_examples=300, deadline=None)
@given(stops=st.lists(_SMALL.filter(bool), max_size=4), text=st.text("abc\n", max_size=20))
def test_holds_back_only_what_may_begin_a_stop_string(stops, text):
    search, shown = StopStrings(stops), ""
    for count, char in enumerate(text, 1):
        emitted, matched = search.push(char)
        if matched:
            break
        shown += emitted
        held = text[len(shown) : count]
        assert text[:count] == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def generate(text, stops, answer, include=False):
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push(token_id) for token_id in text.encode(answer)]
    return run(stops, [*pieces, detokenizer.flush()], include)[:2]


def test_spans_tokens(text):  # case 65
    assert len(text.encode("two three")) > 2
    assert generate(text, ["two three"], "say: one two three four") == ("say: one ", "two three")
    assert generate(text, ["\n\nUser:"], "Fine.\n\nUser: and you?") == ("Fine.", "\n\nUser:")


def test_nothing_lost_nothing_past_the_match(text):  # case 67
    assert generate(text, ["\n"], "Why?") == ("Why?", None)
    assert generate(text, ["?\n\n"], "Why?\n") == ("Why?\n", None)
    assert generate(text, ["seven"], "one two six seven eight") == ("one two six ", "seven")
    search = StopStrings(["seven"])
    assert search.push("six seven eight") == ("six ", "seven")
    assert search.push(" nine") == ("", "seven") and search.flush() == ""


def test_inside_the_last_token():  # case 70
    assert run([".."], ["well", "..."])[:2] == ("well", "..")
    assert run([".."], ["well", "..."], include=True)[:2] == ("well..", "..")


def test_inside_a_multibyte_answer(text):
    assert generate(text, ["好，"], "你好，世界！") == ("你", "好，")
    assert generate(text, ["🙃"], "🙂🙃🙂") == ("🙂", "🙃")


def test_state_is_per_row():  # case 71
    first, second = StopStrings(["ab"]), StopStrings(["ab"])
    assert first.push("a") == ("", None)
    assert second.push("b") == ("b", None)
    assert first.push("b") == ("", "ab")
    assert second.push("c") == ("c", None)


def test_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])
