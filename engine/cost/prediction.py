"""Time of a decode step and of a prefill, part by part: bytes and operations over the rates of `engine/cost/constants.py`.

Parts follow one another, so their times add up. `weights`: the products of the layers at their rates; `kv`: attention's
reading of keys and values, or its operations in a prefill; `collectives`: sums over the ranks; `borders`: what kernels cost
beyond bytes and operations; `head`: the output head and the choice of the token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.bench.load import MAX_STEP_TOKENS
from engine.cost.all_reduce import AllReduceTable
from engine.cost.constants import Constant, Values
from engine.cost.gpus import Gpu
from engine.cost.shard import Shard
from engine.graph.cuda_operators import FUSED_ROWS
from kernels.gemv import MAX_ROWS

US = 1e6  # in a second


@dataclass(frozen=True)
class Setting:
    """Where `shard` runs. `has_peers`: whether the sums over the ranks take place (`--shard-of` goes without).
    `all_reduce` is needed only then."""

    shard: Shard
    gpu: Gpu
    all_reduce: AllReduceTable | None
    has_peers: bool


Rules = Mapping[str, Callable[[Values, Setting], float]]  # a part's name to what gives its us


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
    """`floor_us`: all bytes at the fastest read measured, or all operations at the matrix rate, whichever is longer;
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
    reads, gpu = setting.shard.reads, setting.gpu
    elements = setting.shard.layer_elements + setting.shard.head_elements
    return _predict(DECODE, setting, reads.total, 2.0 * setting.shard.case.batch * elements, gpu)


def predict_prefill(setting: Setting) -> Prediction:
    """All prompts of `case` to their first tokens, by eager steps. Its time is the TTFT."""
    shard, gpu = setting.shard, setting.gpu
    operations = _prefill_operations(shard) + 2.0 * shard.case.batch * shard.head_elements
    return _predict(PREFILL, setting, shard.reads.weight_bytes, operations, gpu)


def _predict(rules: Rules, setting: Setting, num_bytes: int, operations: float, gpu: Gpu) -> Prediction:
    parts = {}
    for name, rule in rules.items():
        values = Values(gpu.constants())
        us = rule(values, setting)
        parts[name] = Part(us, values.used)
    values = Values(gpu.constants())
    floor_us = US * max(num_bytes / (values.read_tb_s * 1e12), operations / (values.matrix_tflops * 1e12))
    sold_us = US * max(num_bytes / (gpu.hbm_tb_s * 1e12), operations / (gpu.matrix_tflops * 1e12))
    return Prediction(parts, floor_us, sold_us)


def _us_of_bytes(num_bytes: float, tb_s: float) -> float:
    return num_bytes / (tb_s * 1e12) * US


def _us_of_operations(operations: float, tflops: float) -> float:
    return operations / (tflops * 1e12) * US


def _library_product_us(values: Values, num_bytes: int, elements: int, num_tokens: int, is_fp8: bool) -> float:
    """A product by the library reads bf16: FP8 is first written out wide."""
    widening = _us_of_bytes(3 * elements, values.copy_tb_s) if is_fp8 else 0.0
    wide_bytes = 2 * elements if is_fp8 else num_bytes
    work = _us_of_operations(2.0 * elements * num_tokens, values.matrix_tflops)
    return widening + max(_us_of_bytes(wide_bytes, values.library_tb_s), work)


def _decode_weights(values: Values, setting: Setting) -> float:
    shard, batch, is_fp8 = setting.shard, setting.shard.case.batch, setting.shard.blueprint.is_fp8
    if batch > MAX_ROWS:
        return _library_product_us(values, shard.layer_bytes, shard.layer_elements, batch, is_fp8)
    return _us_of_bytes(shard.layer_bytes, values.product_fp8_tb_s if is_fp8 else values.product_bf16_tb_s)


def _decode_kv(values: Values, setting: Setting) -> float:
    return _us_of_bytes(setting.shard.reads.kv_bytes, values.attention_tb_s)


def _decode_collectives(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    if not setting.has_peers:
        return 0.0
    return shard.num_reduces * _reduce_us(values, setting, batch, is_fused=batch <= FUSED_ROWS)


def _decode_borders(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    us = values.step_us + shard.num_layers * values.attention_us
    if batch > MAX_ROWS:
        us += shard.num_products * values.library_us + shard.num_layers * values.silu_us
    else:
        us += shard.num_products * (values.product_fp8_us if shard.blueprint.is_fp8 else values.product_bf16_us)
    if not setting.has_peers or batch > FUSED_ROWS:  # else the norm comes with the sum
        us += shard.num_reduces * (values.norm_us + (batch - 1) * values.norm_row_us)
    return us


def _decode_head(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    us = values.choose_us + batch * values.choose_row_us
    if setting.has_peers:  # the choice was measured at two ranks
        us += _reduce_us(values, setting, 1, is_fused=False) - setting.all_reduce.us(shard.message_bytes(1), 2, is_fused=False)
    if batch > MAX_ROWS:
        return us + values.library_us + _library_product_us(values, shard.head_bytes, shard.head_elements, batch, False)
    return us + values.product_bf16_us + _us_of_bytes(shard.head_bytes, values.product_bf16_tb_s)


def _reduce_us(values: Values, setting: Setting, num_tokens: int, is_fused: bool) -> float:
    num_bytes = setting.shard.message_bytes(num_tokens)
    return setting.all_reduce.use(values, setting.gpu, num_bytes, setting.shard.case.tp, is_fused)


def _chunks(shard: Shard) -> list[int]:
    """Tokens of each step: what the benches allow at once."""
    whole, rest = divmod(shard.case.batch * shard.case.prompt, MAX_STEP_TOKENS)
    return [MAX_STEP_TOKENS] * whole + [rest] * (rest > 0)


def _attention_operations(shard: Shard) -> float:
    """Scores and sums of the causal half of every prompt, all layers."""
    case, plan = shard.case, shard.blueprint.plan
    return 2.0 * shard.num_layers * plan.local_q_heads * plan.head_dim * case.batch * case.prompt**2


def _prefill_operations(shard: Shard) -> float:
    return 2.0 * shard.case.batch * shard.case.prompt * shard.layer_elements + _attention_operations(shard)


def _prefill_weights(values: Values, setting: Setting) -> float:
    shard = setting.shard
    return sum(
        _library_product_us(values, shard.layer_bytes, shard.layer_elements, num_tokens, shard.blueprint.is_fp8)
        for num_tokens in _chunks(shard)
    )


def _prefill_kv(values: Values, setting: Setting) -> float:
    return _us_of_operations(_attention_operations(setting.shard), values.prefill_attention_tflops)


def _prefill_collectives(values: Values, setting: Setting) -> float:
    if not setting.has_peers:
        return 0.0
    shard = setting.shard
    return sum(shard.num_reduces * _reduce_us(values, setting, num_tokens, is_fused=False) for num_tokens in _chunks(shard))


def _prefill_borders(values: Values, setting: Setting) -> float:
    """The passes over activations, and what the host's launches take longer than all that the device does."""
    shard = setting.shard
    hidden, mlp = shard.blueprint.config.hidden_size, shard.blueprint.plan.local_mlp
    tokens = shard.case.batch * shard.case.prompt
    values_moved = shard.num_layers * tokens * (values.prefill_hidden_passes * hidden + values.prefill_mlp_passes * mlp)
    passes = _us_of_bytes(values_moved * shard.blueprint.dtype.itemsize, values.copy_tb_s)
    products = len(_chunks(shard)) * shard.num_products * values.library_us
    host = len(_chunks(shard)) * shard.num_layers * values.eager_layer_us
    device = passes + products + sum(rule(values, setting) for rule in (_prefill_weights, _prefill_kv, _prefill_collectives))
    return passes + products + max(0.0, host - device)


def _prefill_head(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    return values.library_us + _library_product_us(values, shard.head_bytes, shard.head_elements, batch, False)


DECODE = {
    "weights": _decode_weights, "kv": _decode_kv, "collectives": _decode_collectives, "borders": _decode_borders,
    "head": _decode_head,
}  # fmt: skip
PREFILL = {
    "weights": _prefill_weights, "kv": _prefill_kv, "collectives": _prefill_collectives, "borders": _prefill_borders,
    "head": _prefill_head,
}  # fmt: skip
