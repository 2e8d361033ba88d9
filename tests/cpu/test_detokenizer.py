"""The text of a token stream equals the tokenizer's own decoding, and little is held back on the way."""

from __future__ import annotations

import codecs

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.detokenizer import Detokenizer
from engine.text import Text
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer

TURN_END = 511


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    text = Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))
    # Added tokens with characters inside and outside the byte alphabet: 512 and 513.
    text._tokenizer.add_tokens([AddedToken("<tool é>", special=False), AddedToken("é", special=False)])
    return text


@pytest.fixture(scope="module")
def pieces_text():
    """A tokenizer in the manner of Llama 2: pieces with a leading `▁`, bytes for the rest."""
    words = ["<unk>", "<s>", "▁", "▁hello", "▁world", "a", "▁a", "b", "中"]
    vocab = [(word, -1.0) for word in words] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    backend = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Text(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>"))


def stream(detokenizer, ids):
    return "".join([*map(detokenizer.push, ids), detokenizer.flush()])


@pytest.fixture(scope="module")
def id_of_byte(text):
    """The id of the one-byte token of each byte."""
    single = {text.token_bytes[i][0]: i for i in reversed(range(512)) if len(text.token_bytes[i]) == 1}
    assert len(single) == 256
    return single


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 520) | st.integers(0, 255) | st.just(150_000), max_size=40), skip=st.booleans())
@example(ids=[512, 513, 513], skip=True)
@example(ids=[TURN_END, 5, TURN_END], skip=False)
def test_any_ids_equal_the_whole_decoding(text, ids, skip):
    expected = text._tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert stream(Detokenizer(text, skip), ids) == expected == text.decode(ids, skip)
    assert stream(Detokenizer(text, skip, context=[3]), ids) == expected  # context changes nothing for byte-level BPE


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=24) | st.text(max_size=8).map(lambda s: s.encode("utf-8", "ignore")))
def test_holds_back_at_most_one_character(text, id_of_byte, data):  # case 61
    detokenizer, shown = Detokenizer(text), ""
    for count, byte in enumerate(data, 1):
        shown += detokenizer.push(id_of_byte[byte])
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        assert shown == reader.decode(data[:count])
        assert len(reader.getstate()[0]) <= 3
    assert shown + detokenizer.flush() == data.decode("utf-8", "replace")


def test_stray_bytes_do_not_stall(text, id_of_byte):  # case 61
    detokenizer = Detokenizer(text)
    assert [detokenizer.push(id_of_byte[0xFF]) for _ in range(5)] == ["\ufffd"] * 5
    assert detokenizer.push(id_of_byte[ord("A")]) == "A"


def test_cut_in_mid_character(text, id_of_byte):  # case 61
    smile = "🙂".encode()
    detokenizer = Detokenizer(text)
    assert [detokenizer.push(id_of_byte[byte]) for byte in smile[:3]] == ["", "", ""]
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_work_per_token_does_not_grow(text, monkeypatch):
    ids = text.encode("The quick brown fox. 你好 🙂 " * 50)
    stream(Detokenizer(text), ids)  # fills the table of bytes
    monkeypatch.setattr(text.token_bytes, "_look_up", None)  # a second look at any id would fail
    monkeypatch.setattr(text.token_bytes, "_tokenizer", None)  # and so would any call of the tokenizer
    assert stream(Detokenizer(text), ids) == "The quick brown fox. 你好 🙂 " * 50


def test_leading_space_at_the_start_of_a_text(pieces_text):
    hello, world = pieces_text._backend.token_to_id("▁hello"), pieces_text._backend.token_to_id("▁world")
    bos = pieces_text.token_id("<s>")
    assert stream(Detokenizer(pieces_text), [hello, world]) == "hello world"
    assert stream(Detokenizer(pieces_text, context=[bos]), [hello, world]) == "hello world"
    assert stream(Detokenizer(pieces_text, context=[bos, hello]), [hello, world]) == " hello world"
    assert stream(Detokenizer(pieces_text), [bos, 150_000, hello]) == "hello"  # ids without text start nothing
    assert stream(Detokenizer(pieces_text, skip_special_tokens=False), [bos, hello]) == "<s> hello"


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(
        st.integers(1, 8).map(lambda i: [i])
        | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=2).map(
            lambda s: [9 + byte for byte in s.encode()]
        ),
        max_size=12,
    ).map(lambda groups: [i for group in groups for i in group]),
    skip=st.booleans(),
)
@example(ids=[9 + ord(" ")], skip=False)  # a space of its own byte is dropped at the start as any other
def test_pieces_and_bytes_equal_the_whole_decoding(pieces_text, ids, skip):
    assert stream(Detokenizer(pieces_text, skip), ids) == pieces_text.decode(ids, skip)


def test_malformed_byte_pieces(pieces_text):
    a = pieces_text._backend.token_to_id("a")
    ids = [9 + 0xE4, 9 + 0xB8, a, 9 + 0xFF]
    assert stream(Detokenizer(pieces_text), ids) == "\ufffda\ufffd"  # one mark a broken character, nothing lost
