"""Sampling options of a row: cases F 74 to 89 as far as they are decided before the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from engine.options import OptionError, check_params, check_token_ids, parse_options
from engine.sampling_params import SamplingParams

BASE = SamplingParams()


def refused(options: dict, base: SamplingParams = BASE) -> OptionError:
    with pytest.raises(OptionError) as caught:
        parse_options(options, base)
    return caught.value


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
        ({"temperature": 1e-6}, {"temperature": 1e-6}),
        ({"top_p": 0}, {"top_p": 0.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": -1}, {"top_k": -1}),
        ({"top_k": 10**6}, {"top_k": 10**6}),
        ({"min_p": 0.5}, {"min_p": 0.5}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"presence_penalty": -2, "frequency_penalty": 2}, {"presence_penalty": -2.0, "frequency_penalty": 2.0}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"seed": 2**63 - 1}, {"seed": 2**63 - 1}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["a", "\n\nUser:"]}, {"stop": ("a", "\n\nUser:")}),
        ({"stop": []}, {"stop": ()}),
        ({"stop_token_ids": [0, 5]}, {"stop_token_ids": (0, 5)}),
        ({"n": 3}, {"n": 3}),
        ({"logit_bias": {"7": -100, "3": 1}}, {"logit_bias": ((3, 1.0), (7, -100.0))}),
        ({"logit_bias": {7: 2}}, {"logit_bias": ((7, 2.0),)}),
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_new_tokens": 5, "min_tokens": 5}, {"max_tokens": 5, "min_tokens": 5}),
        ({"include_stop_str_in_output": True}, {"include_stop_str": True}),
        ({"ignore_eos": True, "skip_special_tokens": False}, {"ignore_eos": True, "skip_special_tokens": False}),
        ({"logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": 0}, {"logprobs": 0}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"logprobs": False, "top_logprobs": 0}, {"logprobs": None}),
        ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ],
)
def test_values_are_taken_as_given(options, expected):
    assert parse_options(options, BASE) == replace(BASE, **expected)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": ["0", True, -0.1, 100.1, math.nan, math.inf, [], {}, 10**400],
        "top_p": [1.5, -0.1, math.nan, "1", False],
        "top_k": [-2, 1.0, "5", True, 10**12],
        "min_p": [-0.1, 1.1, math.nan],
        "repetition_penalty": [0, -1, math.inf, math.nan, "1.1", 10**400],
        "presence_penalty": [-2.1, 2.1],
        "frequency_penalty": [-2.1, 2.1],
        "seed": [1.5, "7", True, 2**63, -(2**63) - 1],
        "stop": ["", ["a", ""], [1], 5, {"a": 1}, ["a"] * 65],
        "stop_token_ids": [[-1], [1.0], [True], 5, "5", [2**40]],
        "n": [0, 1025, "1", True, 1.0],
        "logprobs": [-1, 101, "5", 1.0],
        "top_logprobs": [-1, 101, True],
        "prompt_logprobs": [-1, 101, True],
        "logit_bias": [[], {"a": 1}, {"1": 101}, {"1": "1"}, {"1": True}, {"-1": 1}, {"1": 1, "01": 1}, {"٣": 1}],
        "max_tokens": [0, -1, "5", 1.0, True, 10**400],
        "max_completion_tokens": [0, True],
        "min_tokens": [-1, "1", True],
        "ignore_eos": [0, 1, "true"],
        "include_stop_str": ["yes"],
        "skip_special_tokens": [1],
    }.items(),
)
def test_wrong_types_and_ranges_are_refused_by_name(name, values):
    for value in values:
        error = refused({name: value})
        assert error.code == "invalid_option" and name in error.message, value
        error.message.encode("utf-8")


def test_message_of_a_huge_number_stays_short():
    assert len(refused({"max_tokens": 10**6000}).message) < 200


def test_null_means_not_given():
    base = replace(BASE, temperature=0.7, stop=("x",), max_tokens=9)
    assert parse_options({"temperature": None, "stop": None, "max_tokens": None, "tools": None}, base) == base


def test_false_logprobs_switch_the_default_off():
    assert parse_options({"logprobs": False}, replace(BASE, logprobs=3)).logprobs is None


def test_two_spellings_that_differ_are_refused():
    assert "max_completion_tokens" in refused({"max_tokens": 5, "max_completion_tokens": 6}).message
    assert refused({"top_logprobs": 3}).code == "invalid_option"
    assert refused({"logprobs": False, "top_logprobs": 3}).code == "invalid_option"
    assert refused({"logprobs": 2, "top_logprobs": 3}).code == "invalid_option"


def test_min_tokens_above_max_tokens_is_refused_also_against_the_defaults():
    assert "min_tokens" in refused({"min_tokens": 6, "max_tokens": 5}).message
    assert "min_tokens" in refused({"max_tokens": 5}, replace(BASE, min_tokens=6)).message
    assert parse_options({"min_tokens": 6}, BASE).min_tokens == 6


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topP", "top_p"),
        ("Seed", "seed"),
        ("stops", "stop"),
    ],
)
def test_unknown_option_names_the_one_meant(name, meant):
    error = refused({name: 1})
    assert error.code == "unknown_option" and f"did you mean '{meant}'" in error.message


def test_unknown_option_without_likeness_has_no_suggestion():
    error = refused({"zzzz": 1})
    assert error.code == "unknown_option" and "did you mean" not in error.message
    assert "temperature" in refused({"do_sample": False}).message


@pytest.mark.parametrize(
    ("name", "asks", "off"),
    [
        ("best_of", 4, [1, None]),
        ("use_beam_search", True, [False, None]),
        ("num_beams", 4, [1]),
        ("tools", [{"type": "function"}], [[], None]),
        ("tool_choice", "required", ["none", "auto", None]),
        ("response_format", {"type": "json_object"}, [{"type": "text"}, None]),
        ("guided_json", {"type": "object"}, [None, {}]),
        ("guided_regex", "a+", [None, ""]),
        ("grammar", "root ::= x", [None]),
        ("structured_outputs", {"json": {}}, [None]),
        ("suffix", "x", [None, ""]),
        ("echo", True, [False]),
        ("audio", {"voice": "x"}, [None]),
        ("best_of", True, []),
        ("length_penalty", 2.0, [1.0, 0]),
    ],
)
def test_unsupported_options_are_refused_by_name_unless_they_are_off(name, asks, off):
    error = refused({name: asks})
    assert error.code == "unsupported_option" and name in error.message
    for value in off:
        assert parse_options({name: value}, BASE) == BASE


def test_names_of_the_caller_are_passed_over():
    assert parse_options({"model": "m", "temperature": 1}, BASE, allow=("model",)).temperature == 1.0
    assert refused({"model": "m"}).code == "unknown_option"


def test_check_params_holds_hand_made_params_to_the_same_rules():
    good = SamplingParams(stop=("a",), stop_token_ids=(1,), logit_bias=((3, 1.0),), logprobs=2, seed=-5, max_tokens=3)
    assert check_params(good) == good
    for bad in (replace(good, temperature=-1), replace(good, top_p=math.nan), replace(good, max_tokens=0)):
        with pytest.raises(OptionError):
            check_params(bad)


def test_ids_outside_the_vocabulary_are_refused():
    check_token_ids(SamplingParams(stop_token_ids=(99,), logit_bias=((99, 1.0),)), 100, [0, 99])
    for params, ids in (
        (SamplingParams(stop_token_ids=(100,)), ()),
        (SamplingParams(logit_bias=((100, 1.0),)), ()),
        (BASE, (5, 100)),
        (BASE, (-1,)),
    ):
        with pytest.raises(OptionError, match="outside the vocabulary"):
            check_token_ids(params, 100, ids)
