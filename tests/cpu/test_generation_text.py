"""How rows end, with a scripted model: stop ids and strings, minimum and maximum length, broken logits, unused ids."""

from __future__ import annotations

import pytest
import torch

from engine.text import Text
from tests.cpu.engine_harness import answer_scripted, request
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def say(text: Text, content: str, prompt=(0,), end: str = "<|im_end|>", vocab=None, **options):
    """Let the model say `content` and then its end token, for ever; returns the completion."""
    ids = [*text.encode(content), text.token_id(end)]

    def script(token_id: int, position: int) -> int:
        return ids[min(position - len(prompt) + 1, len(ids) - 1)]

    options.setdefault("max_tokens", 100)
    stops, special = text.split_stops(options.pop("stop", ()))
    stop_ids = () if options.pop("ignore_eos", False) else (text.token_id(end),)
    row = request(prompt, stop=stops, stop_ids=(*stop_ids, *special, *options.get("stop_token_ids", ())), **options)
    return answer_scripted(script, [row], text, vocab).answers[0][0]


def test_the_end_token_ends_the_row_and_is_not_text(text):
    done = say(text, "hello there")
    assert (done.text, done.finish_reason, done.stop_reason) == ("hello there", "stop", text.token_id("<|im_end|>"))
    assert done.token_ids[-1] == text.token_id("<|im_end|>")


def test_max_tokens_and_ignore_eos(text):
    done = say(text, "abcdefgh", max_tokens=3)
    assert done.finish_reason == "length" and len(done.token_ids) == 3
    done = say(text, "ab", ignore_eos=True, max_tokens=20)
    assert len(done.token_ids) == 20 and done.finish_reason == "length" and done.text.rstrip() == "ab"


@pytest.mark.parametrize(
    "content, stop, expected, matched",
    [
        ("say: one two three four", ["two three"], "say: one ", "two three"),
        ("answer\n\nUser: more", ["\n\nUser:"], "answer", "\n\nUser:"),
        ("wait...", [".."], "wait", ".."),
        ("count six seven", ["seven", "six seven"], "count ", "six seven"),
        ("why?", ["\n"], "why?", None),
        ("almost <sto", ["<stop>"], "almost <sto", None),
    ],
)
def test_stop_strings(text, content, stop, expected, matched):
    done = say(text, content, stop=stop)
    assert done.text == expected
    assert done.finish_reason == "stop"
    assert done.stop_reason == (matched or text.token_id("<|im_end|>"))


def test_a_stop_string_in_the_prompt_does_not_count(text):
    prompt = text.encode("User: hi")
    assert say(text, "fine", prompt=prompt, stop=["User:"]).text == "fine"


def test_a_special_token_as_stop_string(text):
    done = say(text, "good", stop=["<|im_end|>"], ignore_eos=True)
    assert (done.text, done.finish_reason) == ("good", "stop")


def test_stop_string_can_be_kept(text):
    assert say(text, "one two three", stop=["two"], include_stop_str=True).text == "one two"


def test_minimum_length_holds_back_every_kind_of_stop(text):
    done = say(text, "a b c d e f", stop=["b"], min_tokens=6)
    assert "b" in done.text and len(done.token_ids) >= 6
    done = say(text, "", min_tokens=4, max_tokens=4)
    assert len(done.token_ids) == 4 and text.token_id("<|im_end|>") not in done.token_ids


def test_half_a_character_at_the_end_becomes_a_replacement_mark(text):
    ids = text.encode("né")
    assert say(text, "né", max_tokens=len(ids) - 1, ignore_eos=True).text == "n\ufffd"


def test_state_is_per_row(text):
    words = ["red", "green", "blue"]
    content = text.encode(" red green blue end")
    rows = [request([0], stop=[word], max_tokens=len(content)) for word in words]

    def script(token_id: int, position: int) -> int:
        return content[min(position, len(content) - 1)]

    texts = answer_scripted(script, rows, text).texts
    assert texts == [" ", " red ", " red green "]


def test_logits_that_are_not_numbers_fail_their_row_only(text):
    nan = torch.full((text.vocab_size,), float("nan"))
    good = text.encode("x")[0]
    rows = [request([1], max_tokens=3), request([2], max_tokens=3)]
    bad, fine = answer_scripted(lambda token_id, position: nan if token_id == 1 else good, rows, text).answers
    assert bad[0].finish_reason == "error" and "not finite" in bad[0].stop_reason
    assert fine[0].finish_reason == "length" and len(fine[0].token_ids) == 3


def test_ids_beyond_the_tokenizer_are_never_chosen(text):
    vocab = text.vocab_size + 40

    def script(token_id: int, position: int) -> torch.Tensor:
        logits = torch.zeros(vocab)
        logits[text.vocab_size :] = 50.0
        return logits

    rows = [request([1], row_key=key, temperature=t, max_tokens=30) for key, t in enumerate((0.0, 1.0, 5.0))]
    run = answer_scripted(script, rows, text, vocab)
    assert max(token for tokens in run.token_ids for token in tokens) < text.vocab_size


def test_streamed_pieces_make_the_text(text):
    pieces: list[str] = []
    content = "héllo wörld, one two three"
    ids = [*text.encode(content), text.token_id("<|im_end|>")]
    row = request([0], stop=["zzz", "three"], stop_ids=[ids[-1]], max_tokens=99)
    row.on_text = pieces.append
    done = answer_scripted(lambda token_id, position: ids[position], [row], text).answers[0][0]
    assert "".join(pieces) == done.text == "héllo wörld, one two "
