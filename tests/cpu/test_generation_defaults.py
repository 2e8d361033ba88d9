"""generation_config.json under its one rule."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation_defaults import FILE_NAME, GenerationDefaults, load_generation_defaults
from engine.sampling_params import SamplingParams
from launch.errors import ModelError

QWEN = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def load(folder, content, overrides=None, **options):
    (folder / FILE_NAME).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return load_generation_defaults(folder, overrides, **options)


def test_sampling_file_is_used(tmp_path):  # case 32
    found = load(tmp_path, QWEN)
    assert found.params == SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)
    assert found.eos_token_ids == (151645, 151643)
    assert found.source == FILE_NAME and found.notes == ()


def test_missing_temperature_is_one(tmp_path):
    assert load(tmp_path, {"do_sample": True, "top_p": 0.9}).params == SamplingParams(temperature=1.0, top_p=0.9)


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": False}, {"do_sample": None}])
def test_without_do_sample_greedy(tmp_path, do_sample):
    content = {key: value for key, value in QWEN.items() if key != "do_sample"} | do_sample
    found = load(tmp_path, content)
    assert found.params == SamplingParams(repetition_penalty=1.05)
    assert any("temperature, top_p, top_k" in note for note in found.notes)
    assert any("repetition_penalty 1.05" in note for note in found.notes)  # greedy is not the plain argmax: said


def test_overrides_go_field_by_field(tmp_path):
    found = load(tmp_path, QWEN, {"top_p": 0.5, "temperature": None, "max_tokens": 9, "repetition_penalty": 1.0})
    assert found.params == SamplingParams(temperature=0.7, top_p=0.5, top_k=20, max_tokens=9)


def test_explicit_zero_is_greedy(tmp_path):
    found = load(tmp_path, QWEN, {"temperature": 0.0})
    assert found.params == SamplingParams(repetition_penalty=1.05)
    assert "repetition_penalty 1.05" in found.notes[0]
    assert load(tmp_path, QWEN, {"temperature": 0.0, "repetition_penalty": 1.0}).params == SamplingParams()
    assert load(tmp_path, QWEN, {"temperature": 0.0, "top_k": 5}).params.top_k == 5  # asked for, so shown


def test_file_ignored(tmp_path):
    found = load(tmp_path, "{broken", {"top_k": 3}, use_file=False)
    assert found == GenerationDefaults(SamplingParams(top_k=3), (), "built-in (generation_config.json ignored)")


def test_no_file(tmp_path):
    found = load_generation_defaults(tmp_path, {"temperature": 0.5})
    assert found.params == SamplingParams(temperature=0.5)
    assert found.eos_token_ids == () and "no generation_config.json" in found.source


def test_null_fields_are_absent(tmp_path):
    content = dict.fromkeys(QWEN) | {"min_p": None, "num_beams": None}
    assert load(tmp_path, content).params == SamplingParams()
    assert load(tmp_path, content).notes == () and load(tmp_path, content).eos_token_ids == ()


@pytest.mark.parametrize(("eos", "ids"), [(0, (0,)), ([7, 3, 7], (7, 3)), ([], ())])
def test_eos_spellings(tmp_path, eos, ids):
    assert load(tmp_path, {"eos_token_id": eos}).eos_token_ids == ids


def test_unsupported_settings_are_noted(tmp_path):
    found = load(tmp_path, {"num_beams": 4, "no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": [[3]]})
    assert [note.split()[2] for note in found.notes] == ["num_beams", "bad_words_ids"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "3",
        "[" * 100_000,
        {"do_sample": "yes"},
        {"do_sample": 1},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": -0.1},
        '{"temperature": NaN}',
        '{"repetition_penalty": Infinity}',
        {"repetition_penalty": 0},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 2.5},
        {"top_k": -2},
        {"min_p": 1.1},
        {"eos_token_id": "</s>"},
        {"eos_token_id": [1, None]},
        {"eos_token_id": -1},
        {"eos_token_id": {"a": 1}},
    ],
)
def test_broken_file_is_named(tmp_path, content):
    with pytest.raises(ModelError, match=r"generation_config\.json.*--no-generation-config"):
        load(tmp_path, content)


def test_not_utf8_and_a_folder(tmp_path):
    (tmp_path / FILE_NAME).write_bytes(b"\xff\xfe{}")
    with pytest.raises(ModelError, match=FILE_NAME):
        load_generation_defaults(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ModelError, match=FILE_NAME):
        load_generation_defaults(tmp_path)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_KEYS = st.sampled_from([*QWEN, "min_p", "num_beams", "sequence_bias", "other"])


@settings(max_examples=300, deadline=None)
@given(content=st.dictionaries(_KEYS, _JSON, max_size=8))
def test_any_file_gives_usable_defaults_or_a_model_error(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    try:
        found = load(folder, content)
    except ModelError as error:
        assert "\n" not in str(error)
        return
    params = found.params
    assert 0 <= params.temperature < float("inf") and 0 < params.top_p <= 1 and 0 <= params.min_p <= 1
    assert params.top_k >= -1 and params.repetition_penalty > 0
    assert params.temperature == 0 or content.get("do_sample") is True
