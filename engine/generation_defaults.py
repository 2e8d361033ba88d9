"""What generation_config.json says about sampling, under one rule.

1. `do_sample: true`: the file's temperature (1.0 if it gives none), top_p, top_k, min_p and repetition_penalty are
   used. A field that the file does not give is off; transformers would put top_k at 50, which no file asks for.
2. `do_sample` false or absent: greedy (temperature 0). Only repetition_penalty is used, as transformers does.
3. The user's own values replace these field by field. A temperature of 0 is greedy: top_p, top_k and min_p change
   nothing then and are off unless the user gave them; repetition_penalty stays, and the notes say so.
4. Without the file, or when told to ignore it: temperature 0, everything off, and no EOS ids from here.

Null means absent. The length fields of the file are not used: how long an answer may be is the user's choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.sampling_params import SamplingParams
from launch.errors import ModelError

FILE_NAME = "generation_config.json"

# field: (what it must be, test); used only when sampling, but checked always
_SAMPLING_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("a number from 0 up", lambda value: _is_number(value) and value >= 0),
    "top_p": ("a number above 0 and at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number from -1 up", lambda value: _is_whole(value) and value >= -1),
    "min_p": ("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1),
}
_PENALTY = ("a number above 0", lambda value: _is_number(value) and value > 0)

# Fields that change which tokens transformers would choose, with the values that leave them off. Not supported: noted.
_UNSUPPORTED = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "penalty_alpha": (0, 0.0),
    "typical_p": (1, 1.0),
    "top_h": (),
    "epsilon_cutoff": (0, 0.0),
    "eta_cutoff": (0, 0.0),
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "bad_words_ids": ([],),
    "force_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1, 1.0),
}


@dataclass(frozen=True)
class GenerationDefaults:
    """`params`: what a row uses where it says nothing itself. `eos_token_ids`: the file's, in its order. `source`:
    where the values come from, for the start summary. `notes`: one sentence each about what a user might not
    expect."""

    params: SamplingParams
    eos_token_ids: tuple[int, ...]
    source: str
    notes: tuple[str, ...] = ()


def load_generation_defaults(
    folder: str | Path, overrides: Mapping[str, Any] | None = None, use_file: bool = True
) -> GenerationDefaults:
    """Sampling defaults for the model in `folder`, by the rule above.

    `overrides`: fields of SamplingParams, already checked; None values count as not given. `use_file` False: the file
    is not even opened. *Raises* ModelError naming the file if it is not readable JSON or a field that matters has a
    wrong value.
    """
    path = Path(folder) / FILE_NAME
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    if not use_file:
        return GenerationDefaults(SamplingParams(**given), (), f"built-in ({FILE_NAME} ignored)")
    if not path.exists():
        return GenerationDefaults(SamplingParams(**given), (), f"built-in (no {FILE_NAME})")
    content = _read(path)
    params, notes = _from_file(content, path)
    params = replace(params, **given)
    if params.temperature == 0:
        off = {name: getattr(SamplingParams(), name) for name in ("top_p", "top_k", "min_p") if name not in given}
        params = replace(params, **off)
    if params.temperature == 0 and params.repetition_penalty != 1 and "repetition_penalty" not in given:
        notes.append(
            f"repetition_penalty {params.repetition_penalty:g} from {FILE_NAME} applies: greedy is not the plain argmax"
        )
    return GenerationDefaults(params, _eos_ids(content.get("eos_token_id"), path), FILE_NAME, tuple(notes))


def _from_file(content: Mapping[str, Any], path: Path) -> tuple[SamplingParams, list[str]]:
    """The file's own defaults and notes, before any override."""
    do_sample = content.get("do_sample")
    if do_sample not in (None, True, False) or not isinstance(do_sample, (bool, type(None))):
        raise _wrong(path, "do_sample", do_sample, "true or false")
    fields = {name: _checked(content, name, rule, path) for name, rule in _SAMPLING_FIELDS.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    penalty = _checked(content, "repetition_penalty", _PENALTY, path)
    notes = [
        f"{FILE_NAME} sets {name} to {content[name]!r}, which is not supported and is ignored"
        for name, off in _UNSUPPORTED.items()
        if content.get(name) is not None and content[name] not in off
    ]
    if do_sample:
        fields.setdefault("temperature", 1.0)
    elif fields:
        notes.append(
            f"{', '.join(fields)} in {FILE_NAME} not used: it does not say do_sample true, so decoding is greedy"
        )
        fields = {}
    return SamplingParams(**fields, repetition_penalty=1.0 if penalty is None else penalty), notes


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not UTF-8
        raise ModelError(
            f"{path} cannot be read ({error}); repair it or ignore it with --no-generation-config"
        ) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object; repair it or ignore it with --no-generation-config")
    return content


def _checked(content: Mapping[str, Any], name: str, rule: tuple[str, Callable[[Any], bool]], path: Path) -> Any:
    value = content.get(name)
    wanted, is_good = rule
    if value is not None and not is_good(value):
        raise _wrong(path, name, value, wanted)
    return value


def _eos_ids(value: Any, path: Path) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_whole(item) and item >= 0 for item in ids):
        raise _wrong(path, "eos_token_id", value, "a token id or a list of them")
    return tuple(dict.fromkeys(ids))


def _wrong(path: Path, name: str, value: Any, wanted: str) -> ModelError:
    return ModelError(
        f"{path}: {name} must be {wanted}, not {value!r}; repair it or ignore the file with --no-generation-config"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
