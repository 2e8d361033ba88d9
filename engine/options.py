"""Sampling options as they come from a JSON row or a Python call: types and ranges checked, names known, nothing
rewritten.

Not here: the effect of an option (`engine.sampling`) and the rows they come in (`engine.rows`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace

from engine.option_names import ALIASES, OPTIONS, refuse_unsupported, suggest
from engine.refused import Refused, show
from engine.sampling_params import SamplingParams

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 100
MAX_SAMPLES = 1024
_INT64 = 2**63
_MAX_TOKENS = 2**31 - 1  # token counts and ids are stored in 32 bits further down


class OptionError(Refused):
    """An option has the wrong type, is out of range, unknown or not supported."""


def parse_options(
    options: Mapping[str, object], base: SamplingParams, *, allow: Collection[str] = ()
) -> SamplingParams:
    """`base` with the given options put over it.

    `options`: names to JSON values; null means "not given". Names in `allow` belong to the caller and are passed
    over. The OpenAI spellings (`max_completion_tokens`, chat `logprobs: true` with `top_logprobs`) are understood
    everywhere.

    *Raises*: OptionError with code `unknown_option` (with a suggestion), `unsupported_option` or `invalid_option`.
    """
    try:
        changes = _changes(options, allow)
        params = replace(base, **changes)
        if params.max_tokens is not None and params.min_tokens > params.max_tokens:
            _invalid(f"min_tokens ({params.min_tokens}) is more than max_tokens ({params.max_tokens})")
    except OptionError:
        raise
    except Refused as error:
        raise OptionError(error.code, error.message) from None
    return params


def check_params(params: SamplingParams) -> SamplingParams:
    """`params` built in Python, held to the same rules as a row of a file.

    *Raises*: OptionError, as `parse_options`.
    """
    values = asdict(params)
    bias = values["logit_bias"]
    if not isinstance(bias, Mapping):
        values["logit_bias"] = dict(bias or ())
    return parse_options(values, SamplingParams())


def check_token_ids(params: SamplingParams, vocab_size: int, prompt_token_ids: Sequence[int] = ()) -> None:
    """Refuse ids outside the vocabulary before they index anything.

    `vocab_size`: number of ids the model has, without the padding of a sharded vocabulary.

    *Raises*: OptionError, code `invalid_option` for `stop_token_ids` and `logit_bias`, `invalid_token_id` for a prompt.
    """
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", [i for i, _ in params.logit_bias])):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                _invalid(f"{name}: token id {show(token_id)} is outside the vocabulary (0 to {vocab_size - 1})")
    for position, token_id in enumerate(prompt_token_ids):
        if not 0 <= token_id < vocab_size:
            place = f"prompt token {position} is {show(token_id)}"
            raise OptionError("invalid_token_id", f"{place}, outside the vocabulary (0 to {vocab_size - 1})")


def _changes(options: Mapping[str, object], allow: Collection[str]) -> dict[str, object]:
    """Checked values by field name; `logprobs` joined from its two OpenAI spellings."""
    changes: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for name, value in options.items():
        if name in allow:
            continue
        if not isinstance(name, str):
            raise OptionError("unknown_option", f"option names are strings, not {show(name)}")
        target = ALIASES.get(name, name)
        if target not in OPTIONS:
            if refuse_unsupported(name, value):
                continue
            known = (*OPTIONS, *ALIASES, *allow)
            raise OptionError("unknown_option", f"unknown option {show(name)}{suggest(name, known)}")
        if value is None:
            continue
        checked = _CHECKS[target](name, value)
        if target in changes and changes[target] != checked:
            _invalid(f"{spelled[target]} and {name} are the same option and differ; give one of them")
        changes[target], spelled[target] = checked, name
    return _join_logprobs(changes)


def _join_logprobs(changes: dict[str, object]) -> dict[str, object]:
    """OpenAI chat: `logprobs` is a bool and `top_logprobs` the number; OpenAI completions: `logprobs` is the number."""
    top = changes.pop("top_logprobs", None)
    asked = changes.get("logprobs")
    if asked is True:
        changes["logprobs"] = top or 0
    elif top and asked is not False and asked is not None:
        if asked != top:
            _invalid(f"logprobs ({asked}) and top_logprobs ({top}) differ; give one of them")
    elif top:
        _invalid("top_logprobs needs logprobs: true")
    if asked is False:
        changes["logprobs"] = None
    return changes


def _invalid(message: str) -> None:
    raise OptionError("invalid_option", message)


def _check_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _invalid(f"{name} must be true or false, not {show(value)}")
    return value


def _integer(low: int, high: int) -> Callable[[str, object], int]:
    def check(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            _invalid(f"{name} must be a whole number, not {show(value)}")
        if not low <= value <= high:
            _invalid(f"{name} must be between {low} and {high}, not {show(value)}")
        return value

    return check


def _number(low: float, high: float, *, above: bool = False) -> Callable[[str, object], float]:
    """A finite number from `low` to `high`; with `above`, `low` itself is refused."""

    def check(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            _invalid(f"{name} must be a number, not {show(value)}")
        # NaN fails every comparison, so it is refused here too.
        if not low <= value <= high or (above and value == low):
            lower = f"above {low:g} and at most" if above else f"between {low:g} and"
            _invalid(f"{name} must be {lower} {high:g}, not {show(value)}")
        return float(value)

    return check


def _check_stop(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)) or not all(isinstance(item, str) for item in strings):
        _invalid(f"{name} must be a string or a list of strings, not {show(value)}")
    if "" in strings:
        _invalid(f"{name} must not hold an empty string: it would stop before the first token")
    if len(strings) > MAX_STOP_STRINGS:
        _invalid(f"{name} holds {len(strings)} strings; at most {MAX_STOP_STRINGS} are possible")
    return tuple(strings)


def _check_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        _invalid(f"{name} must be a list of token ids, not {show(value)}")
    check = _integer(0, _MAX_TOKENS)
    return tuple(check(f"{name}[{position}]", token_id) for position, token_id in enumerate(value))


def _check_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        _invalid(f"{name} must be an object of token id to number, not {show(value)}")
    check_id, check_bias = _integer(0, _MAX_TOKENS), _number(-100, 100)
    bias: dict[int, float] = {}
    for key, number in value.items():
        if isinstance(key, str) and not re.fullmatch(r"[0-9]{1,10}", key):
            _invalid(f"{name}: {show(key)} is not a token id; keys are ids, not texts")
        token_id = check_id(f"{name} key", int(key) if isinstance(key, str) else key)
        if token_id in bias:
            _invalid(f"{name} names token id {token_id} twice")
        bias[token_id] = check_bias(f"{name}[{token_id}]", number)
    return tuple(sorted(bias.items()))


def _check_logprobs(name: str, value: object) -> int | bool:
    return value if isinstance(value, bool) else _integer(0, MAX_LOGPROBS)(name, value)


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": _integer(1, _MAX_TOKENS),
    "min_tokens": _integer(0, _MAX_TOKENS),
    "temperature": _number(0, 100),
    "top_p": _number(0, 1),
    "top_k": _integer(-1, _MAX_TOKENS),
    "min_p": _number(0, 1),
    "repetition_penalty": _number(0, 100, above=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "seed": _integer(-_INT64, _INT64 - 1),
    "stop": _check_stop,
    "stop_token_ids": _check_ids,
    "ignore_eos": _check_bool,
    "n": _integer(1, MAX_SAMPLES),
    "logprobs": _check_logprobs,
    "top_logprobs": _integer(0, MAX_LOGPROBS),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS),
    "logit_bias": _check_bias,
    "include_stop_str": _check_bool,
    "skip_special_tokens": _check_bool,
}
