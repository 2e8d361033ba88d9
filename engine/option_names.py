"""The names of options: ours, those we take under another name, those of other engines that we refuse by name.

Tables only, and the two questions asked of them: "is this an option we do not do?" and "was this a typing slip?".
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields

from engine.refused import Refused
from engine.sampling_params import SamplingParams

OPTIONS = tuple(field.name for field in fields(SamplingParams)) + ("top_logprobs",)

# Same meaning, other spelling: OpenAI, transformers and vLLM users bring these.
ALIASES = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "include_stop_str_in_output": "include_stop_str",
}

# Options of other engines that stand for one of ours but not value for value, so they are explained and not translated.
RENAMED = {
    "do_sample": "temperature (0 is greedy)",
    "random_seed": "seed",
    "max_length": "max_tokens (new tokens only)",
    "stop_words": "stop",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "no_stop_trim": "include_stop_str",
    "num_return_sequences": "n",
    "eos_token_id": "stop_token_ids",
}

# Options we do not do, each with the values (beside null, false, "", [] and {}) that ask for nothing.
UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": (),
    "diversity_penalty": (0,),
    "early_stopping": (),
    "echo": (),
    "encoder_repetition_penalty": (1,),
    "function_call": ("none", "auto"),
    "functions": (),
    "grammar": (),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "ebnf": (),
    "json_schema": (),
    "length_penalty": (0, 1),
    "logits_processors": (),
    "lora_request": (),
    "modalities": (["text"],),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "parallel_tool_calls": (True,),
    "reasoning_effort": ("none",),
    "regex": (),
    "response_format": ({"type": "text"},),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (),
    "web_search_options": (),
}

# Refused inside an OpenAI body only: at the top level of a plain row these words are far more often data than options.
UNSUPPORTED_IN_BODY: dict[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "detokenize": (True,),
    "prediction": (),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    "verbosity": ("medium",),
}

# Below this ratio two names are taken for different words. Column names of a data set must not be refused for a faint
# likeness ("speed" and "seed" are 0.89 alike), so at the top level short names count only when they are equal but for
# case, dashes and underscores.
_TOP_LEVEL_RATIO = 0.85
_TOP_LEVEL_LENGTH = 6
_OPTIONS_RATIO = 0.6


def refuse_unsupported(name: str, value: object, *, in_body: bool = True) -> bool:
    """True when `name` is an option we do not do and `value` asks for nothing.

    *Raises*: Refused with code `unsupported_option`, or `unknown_option` when we have it under another name.
    """
    if name in RENAMED:
        if value is None:
            return True
        raise Refused("unknown_option", f"unknown option '{name}': here it is {RENAMED[name]}")
    table = {**UNSUPPORTED_IN_BODY, **UNSUPPORTED} if in_body else UNSUPPORTED
    if name not in table:
        return False
    if value is None or value is False or value in ("", [], {}) or _is_any(value, table[name]):
        return True
    raise Refused("unsupported_option", f"option '{name}' is not supported; remove it from the row")


def suggest(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing. For places where every name must be an option."""
    by_plain = {_plain(option): option for option in known}
    close = difflib.get_close_matches(_plain(name), list(by_plain), n=1, cutoff=_OPTIONS_RATIO)
    return f" (did you mean '{by_plain[close[0]]}'?)" if close else ""


def mistyped_option(name: str) -> str | None:
    """The option that a free key at the top level of a row was most likely meant to be, if any."""
    plain = _plain(name)
    for option in (*OPTIONS, *ALIASES, *RENAMED):
        target = _plain(option)
        if plain == target and len(plain) > 1:
            return option
        if min(len(plain), len(target)) < _TOP_LEVEL_LENGTH or abs(len(plain) - len(target)) > 2:
            continue
        if difflib.SequenceMatcher(None, plain, target).ratio() >= _TOP_LEVEL_RATIO:
            return option
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _is_any(value: object, values: tuple[object, ...]) -> bool:
    """Equality that keeps `1` and `true` apart, as JSON does."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)
