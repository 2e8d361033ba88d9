"""Time of a decode step and of a prefill, part by part: bytes and operations over the rates of `engine/cost/constants.py`.

Parts follow one another, so their times add up. `weights`: the products of the layers at their rates; `kv`: attention's
reading of keys and values, or its operations in a prefill; `collectives`: sums over the ranks; `borders`: what kernels cost
beyond bytes and operations; `head`: the output head and the choice of the token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.cost.constants import Constant, Values
from engine.cost.decode_parts import DECODE
from engine.cost.prefill_parts import PREFILL, attention_operations
from engine.cost.products import is_scaled
from engine.cost.setting import Rules, Setting, us_of_bytes, us_of_operations


@dataclass(frozen=True)
class Part:
    """`us` of a step; the constants it was made from, by name."""

    us: float
    used: Mapping[str, Constant]

    @property
    def is_measured(self) -> bool:
        return all(constant.is_measured for constant in self.used.values())


@dataclass(frozen=True)
class Prediction:
    """`floor_us`: all bytes at the fastest read measured, or all operations at the matrix rates, whichever is longer;
    `datasheet_floor_us`: the same at the rates that the GPU is sold with."""

    parts: Mapping[str, Part]
    floor_us: float
    datasheet_floor_us: float

    @property
    def us(self) -> float:
        return sum(part.us for part in self.parts.values())

    @property
    def used(self) -> dict[str, Constant]:
        return {name: constant for part in self.parts.values() for name, constant in part.used.items()}


def predict_decode(setting: Setting) -> Prediction:
    """A step of `case.batch` rows at their mean length, in graphs. Its time is the TPOT."""
    return _predict(DECODE, setting, setting.shard.reads.total, setting.shard.case.batch, 0.0)


def predict_prefill(setting: Setting) -> Prediction:
    """All prompts of `case` to their first tokens. Its time is the TTFT."""
    shard = setting.shard
    tokens = shard.case.batch * shard.case.prompt
    return _predict(PREFILL, setting, shard.reads.weight_bytes, tokens, attention_operations(shard))


def _predict(rules: Rules, setting: Setting, num_bytes: int, num_tokens: int, attention: float) -> Prediction:
    """`attention`: its operations, where they count."""
    parts, gpu, shard = {}, setting.gpu, setting.shard
    for name, rule in rules.items():
        values = Values(gpu.constants())
        us = rule(values, setting)
        parts[name] = Part(us, values.used)
    values = Values(gpu.constants())
    layers, others = 2.0 * num_tokens * shard.layer_elements, 2.0 * shard.case.batch * shard.head_elements + attention
    if is_scaled(setting, num_tokens):
        measured = us_of_operations(layers, values.matrix_fp8_tflops) + us_of_operations(others, values.matrix_tflops)
        sold = us_of_operations(layers, gpu.matrix_fp8_tflops) + us_of_operations(others, gpu.matrix_tflops)
    else:
        measured, sold = (us_of_operations(layers + others, rate) for rate in (values.matrix_tflops, gpu.matrix_tflops))
    floor_us = max(us_of_bytes(num_bytes, values.read_tb_s), measured)
    return Prediction(parts, floor_us, max(us_of_bytes(num_bytes, gpu.hbm_tb_s), sold))
