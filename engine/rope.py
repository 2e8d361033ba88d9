"""Rotary position embedding: what a config says about it, and the frequencies that follow.

The only place that knows the rope base. Every attention implementation gets its frequencies from
`inverse_frequencies`, so none can keep a base of its own. Kinds: `default`, `linear`, `yarn`, `llama3`.
`dynamic` is refused: its base changes with the length of the sequence, which contradicts keys that are already
rotated in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.config_fields import ConfigFields, shown

KINDS = ("default", "linear", "yarn", "llama3")
MAX_POSITIONS = 2**31 - 1  # positions travel as int32 on devices


@dataclass(frozen=True)
class RopeConfig:
    """Rotary parameters after both spellings and all defaults are resolved.

    `original_max_positions`: length of pre-training, the base of the yarn and llama3 correction ranges.
    `attention_factor` multiplies cos and sin. The last group is read by the kind it is named after and is
    neutral elsewhere.
    """

    kind: str
    theta: float
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_truncate: bool = True
    llama3_low_freq_factor: float = 1.0
    llama3_high_freq_factor: float = 4.0


def parse_rope(fields: ConfigFields, implied_theta: float | None) -> RopeConfig:
    """Read `rope_theta`, `rope_scaling` and `rope_parameters` of a config, in the spellings of transformers 4 and 5.

    `implied_theta`: the base of families whose early configs leave it out, else None. *Raises* `ModelError`,
    also when the base is nowhere: a wrong base still gives fluent text at short length, so guessing is not an
    option.
    """
    scaling = _scaling(fields)
    kind = scaling.text("rope_type", None) or scaling.text("type", None) or "default"
    if kind not in KINDS:
        scaling.fail(f"rope type {shown(kind)} is not supported; supported are {', '.join(KINDS)}")
    for place in (fields, scaling):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            place.fail("'partial_rotary_factor' other than 1 is not supported")
    theta = _theta(fields, scaling, implied_theta)
    if kind == "default":
        return RopeConfig(kind, theta)
    max_positions = fields.whole("max_position_embeddings")
    if kind == "linear":
        return RopeConfig(kind, theta, scaling.number("factor", low=1.0, high=1e4), max_positions)
    original = fields.whole("original_max_position_embeddings", None)
    original = original or scaling.whole("original_max_position_embeddings", max_positions)
    if kind == "llama3":
        low = scaling.number("low_freq_factor", low=1e-3, high=1e4)
        high = scaling.number("high_freq_factor", low=1e-3, high=1e4)
        if high <= low:
            scaling.fail(f"'high_freq_factor' ({high:g}) must be larger than 'low_freq_factor' ({low:g})")
        return RopeConfig(
            kind,
            theta,
            scaling.number("factor", low=1.0, high=1e4),
            original,
            llama3_low_freq_factor=low,
            llama3_high_freq_factor=high,
        )
    return _parse_yarn(scaling, theta, original, max_positions)


def _scaling(fields: ConfigFields) -> ConfigFields:
    """The scaling block: `rope_scaling` (transformers 4) or `rope_parameters` (5). Two that disagree are an error."""
    keys = [key for key in ("rope_scaling", "rope_parameters") if fields.data.get(key) not in (None, {})]
    parsed = [ConfigFields(fields.data[key], f"{fields.where}: {key!r}") for key in keys]
    for block in parsed:
        if any(isinstance(value, Mapping) for value in block.data.values()):
            block.fail("rotary parameters that differ by layer type are not supported")
    if len(parsed) == 2:
        first, second = ({k: v for k, v in _normalised(block.data).items() if k != "rope_theta"} for block in parsed)
        if second and first != second:
            fields.fail("'rope_scaling' and 'rope_parameters' disagree; remove one of them")
    return parsed[0] if parsed else ConfigFields({}, fields.where)


def _normalised(block: Mapping[str, Any]) -> dict[str, Any]:
    items = {("rope_type" if key == "type" else key): value for key, value in block.items() if value is not None}
    if items.get("rope_type") == "default":
        del items["rope_type"]
    return items


def has_rope_theta(fields: ConfigFields) -> bool:
    """Whether the config names its rope base, in any of the places where it may stand."""
    return any(place.has("rope_theta") for place in _theta_places(fields, _scaling(fields)))


def _theta_places(fields: ConfigFields, scaling: ConfigFields) -> list[ConfigFields]:
    places = [fields, scaling]
    if isinstance(fields.data.get("rope_parameters"), Mapping):
        places.append(ConfigFields(fields.data["rope_parameters"], f"{fields.where}: 'rope_parameters'"))
    return places


def _theta(fields: ConfigFields, scaling: ConfigFields, implied: float | None) -> float:
    """The one rope base of the config. Two places that disagree are an error."""
    places = _theta_places(fields, scaling)
    found = {place.number("rope_theta", low=1.0, high=1e12) for place in places if place.has("rope_theta")}
    if len(found) > 1:
        fields.fail(f"'rope_theta' is given twice with different values ({', '.join(f'{v:g}' for v in sorted(found))})")
    if not found and implied is None:
        fields.fail(
            "'rope_theta' is neither at the top level nor in 'rope_parameters'; add the base used in training "
            "(1000000.0 for Qwen2.5), because a wrong one gives wrong text without an error"
        )
    theta = found.pop() if found else implied
    if theta <= 1.0:
        fields.fail("'rope_theta' must be larger than 1")
    return theta


def _parse_yarn(scaling: ConfigFields, theta: float, original: int, max_positions: int) -> RopeConfig:
    factor = scaling.number("factor", None, low=1.0, high=1e4)
    if factor is None:  # some exporters give the two lengths and leave their ratio out
        factor = max_positions / original
        if factor < 1.0:
            scaling.fail("'factor' is missing and 'max_position_embeddings' is below the original length")
    attention = scaling.number("attention_factor", None, low=1e-6, high=1e6)
    mscale = scaling.number("mscale", 0.0, high=1e3)
    mscale_all = scaling.number("mscale_all_dim", 0.0, high=1e3)
    if attention is None and mscale and mscale_all:
        attention = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    elif attention is None:
        attention = _yarn_scale(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor,
        original,
        attention,
        yarn_beta_fast=scaling.number("beta_fast", 32.0, low=0.0, high=1e6) or 32.0,
        yarn_beta_slow=scaling.number("beta_slow", 1.0, low=0.0, high=1e6) or 1.0,
        yarn_truncate=scaling.flag("truncate", True),
    )


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def extended_positions(rope: RopeConfig, max_positions: int) -> int:
    """The longest sequence the scaled rope covers, given `max_position_embeddings` of the config.

    yarn stretches the *original* length by `factor`, whether or not the config's own maximum was raised too;
    linear stretches the config's maximum; llama3 configs already state the extended length.
    """
    if rope.kind == "yarn":
        return min(int(rope.original_max_positions * rope.factor), MAX_POSITIONS)
    if rope.kind == "linear":
        return min(int(max_positions * rope.factor), MAX_POSITIONS)
    return max_positions


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angular frequency of each pair of dimensions: fp32 `[head_dim / 2]`, on the CPU.

    *Numbers*: fp32 throughout, as transformers computes them. *Source*: YaRN (arXiv 2309.00071); Llama 3.1
    model card.
    """
    powers = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    plain = 1.0 / powers
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "yarn":
        return _yarn_frequencies(rope, head_dim, powers)
    if rope.kind == "llama3":
        return _llama3_frequencies(rope, plain)
    return plain


def _yarn_frequencies(rope: RopeConfig, head_dim: int, powers: torch.Tensor) -> torch.Tensor:
    """Interpolate slow dimensions by `factor`, keep fast ones, and blend linearly between the two borders."""

    def dimension(rotations: float) -> float:
        """The (fractional) dimension that turns `rotations` times within the original length."""
        return head_dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.yarn_beta_fast), dimension(rope.yarn_beta_slow)
    if rope.yarn_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; avoids 0 / 0
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return (1.0 / (rope.factor * powers)) * ramp + (1.0 / powers) * (1 - ramp)


def _llama3_frequencies(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by `factor`, and blend smoothly in between."""
    low, high = rope.llama3_low_freq_factor, rope.llama3_high_freq_factor
    rotations = rope.original_max_positions / (2 * math.pi / plain)
    blend = ((rotations - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / rope.factor + blend * plain
