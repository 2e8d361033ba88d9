"""Loading a tokenizer, special tokens, stop ids, fingerprints."""

from __future__ import annotations

import json

import pytest

from engine.text import Text, TextError
from launch.errors import ModelError
from tests.cpu.tiny_tokenizer import SPECIALS, build_tiny_tokenizer

TEXT_END, TURN_START, TURN_END = 509, 510, 511


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tiny")))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_raw_prompt_keeps_specials_and_equals_transformers(text):
    prompt = "<|im_start|>user\nStraße 你好 🙂  12<|im_end|>\n"
    ids = text.encode(prompt)
    assert ids == text._tokenizer(prompt)["input_ids"]
    assert ids[0] == TURN_START and TURN_END in ids
    assert text.decode(ids, skip_special_tokens=False) == prompt
    assert text.decode(ids) == "user\nStraße 你好 🙂  12\n"


def test_counts_and_special_ids(text):
    assert text.vocab_size == 512 == len(text._tokenizer)
    assert text.special_ids == {TEXT_END, TURN_START, TURN_END}
    assert [text.token_id(special) for special in SPECIALS] == [TEXT_END, TURN_START, TURN_END]
    assert text.token_id("the") is None and text.token_id("<|im_end|>\n") is None
    assert text.decode([600, 151_999]) == ""


def test_special_stop_strings_become_ids(text):  # case 68
    assert text.split_stops(["\n\n", "<|im_end|>", "User:", "<|endoftext|>", "<|im_end|>"]) == (
        ("\n\n", "User:"),
        (TURN_END, TEXT_END),
    )


def test_stop_set_is_the_union(tmp_path):  # case 29
    folder = build_tiny_tokenizer(tmp_path)
    edit_json(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    text = Text.load(folder)
    assert text.eos_ids() == (TEXT_END, TURN_END)  # the tokenizer's, and the one that ends a turn of the template
    assert text.eos_ids(7, [3, TEXT_END], None) == (3, 7, TEXT_END, TURN_END)
    (folder / "chat_template.jinja").unlink()
    assert Text.load(folder).eos_ids(7) == (7, TEXT_END)


def test_bos_only_if_the_tokenizer_adds_it(tmp_path, text):
    folder = build_tiny_tokenizer(tmp_path)
    processor = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [TEXT_END], "tokens": ["<|endoftext|>"]}},
    }
    edit_json(folder / "tokenizer.json", post_processor=processor)
    with_bos = Text.load(folder)
    assert with_bos.encode("the dog") == [TEXT_END, *text.encode("the dog")]
    messages = [{"role": "user", "content": "the dog"}]
    assert with_bos.encode_chat(messages) == text.encode_chat(messages)  # a template writes its own BOS


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path, text):
    folder = build_tiny_tokenizer(tmp_path)
    edit_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    )
    prompt = "The quick brown fox jumps over the lazy dog"
    assert Text.load(folder).encode(prompt) == text.encode(prompt)
    assert len(text.encode(prompt)) > 4


def test_lone_surrogate_is_a_row_error(text):  # case 41
    for call in (text.encode, lambda prompt: text.encode_chat([{"role": "user", "content": prompt}])):
        with pytest.raises(TextError, match="surrogate") as caught:
            call("x \ud83d y")
        assert caught.value.code == "bad_text"


def test_fingerprint_tells_vocabularies_apart(tmp_path, text):
    same = Text.load(build_tiny_tokenizer(tmp_path / "same"))
    assert same.fingerprint == text.fingerprint
    folder = build_tiny_tokenizer(tmp_path / "swapped")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    path.write_text(json.dumps(content), encoding="utf-8")
    swapped = Text.load(folder)
    assert swapped.vocab_size == text.vocab_size and swapped.fingerprint != text.fingerprint


@pytest.mark.parametrize(
    "break_it",
    [
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").write_text("{", encoding="utf-8"),
        lambda folder: (folder / "tokenizer.json").write_text("{}", encoding="utf-8"),
        lambda folder: (folder / "tokenizer.json").write_bytes(b""),
        lambda folder: (folder / "tokenizer_config.json").write_text("[1", encoding="utf-8"),
        lambda folder: edit_json(folder / "tokenizer_config.json", tokenizer_class="NoSuchTokenizer"),
    ],
    ids=["missing", "cut", "empty object", "empty", "bad config", "unknown class"],
)
def test_broken_folder_is_a_model_error_naming_it(tmp_path, break_it):
    folder = build_tiny_tokenizer(tmp_path / "Modèle 模型")
    break_it(folder)
    try:
        loaded = Text.load(folder)
    except ModelError as error:
        assert "Modèle 模型" in str(error) and "\n" not in str(error)
    else:  # some versions of transformers can do without the broken part; then it must really work
        assert loaded.decode(loaded.encode("the dog")) == "the dog"


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="no model folder"):
        Text.load(tmp_path / "nowhere")


def test_path_with_other_letters(tmp_path):  # case 49
    assert Text.load(build_tiny_tokenizer(tmp_path / "Modèle 模型")).vocab_size == 512
