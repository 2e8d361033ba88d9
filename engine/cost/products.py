"""What the products of all layers take for so many rows: by our kernels, by the library, and with FP8 matrices as FP8."""

from __future__ import annotations

from dataclasses import dataclass

from engine.cost.constants import Values
from engine.cost.setting import Setting, us_of_bytes, us_of_operations
from kernels.fp8_linear import ALIGNMENT, MIN_ROWS
from kernels.gemv import MAX_ROWS


@dataclass(frozen=True)
class Products:
    """us of a step. `at_rates`: bytes or operations, whichever takes longer; `beyond`: what the kernels take besides."""

    at_rates: float
    beyond: float


def layer_products(values: Values, setting: Setting, num_tokens: int) -> Products:
    """Of all layers, for the rows of `num_tokens`."""
    shard = setting.shard
    if num_tokens <= MAX_ROWS:
        is_fp8 = shard.blueprint.is_fp8
        tb_s, us = (
            (values.product_fp8_tb_s, values.product_fp8_us) if is_fp8 else (values.product_bf16_tb_s, values.product_bf16_us)
        )
        return Products(us_of_bytes(shard.layer_bytes, tb_s), shard.num_products * us)
    if is_scaled(setting, num_tokens):
        operations = us_of_operations(2.0 * shard.layer_elements * num_tokens, values.matrix_fp8_tflops)
        quantizing = us_of_bytes(_quantized_bytes(setting) * num_tokens, values.copy_tb_s)
        at_rates = max(us_of_bytes(shard.layer_bytes, values.library_tb_s), operations)
        return Products(at_rates, shard.num_products * values.scaled_us + quantizing)
    widening, num_bytes = 0.0, shard.layer_bytes
    if shard.blueprint.is_fp8:  # written out wide, then read
        widening, num_bytes = us_of_bytes(3 * shard.layer_elements, values.copy_tb_s), 2 * shard.layer_elements
    at_rates = library_product_us(values, num_bytes, shard.layer_elements, num_tokens)
    return Products(widening + at_rates, shard.num_products * values.library_us)


def is_scaled(setting: Setting, num_tokens: int) -> bool:
    """Whether FP8 matrices are multiplied as FP8, rows quantised as they come (`kernels/fp8_linear.py`)."""
    shard = setting.shard
    local = shard.blueprint.plan.local_sizes
    is_aligned = not any(local[name] % ALIGNMENT for name in ("q", "kv", "mlp"))
    return shard.blueprint.is_fp8 and setting.gpu.matrix_fp8_tflops is not None and num_tokens >= MIN_ROWS and is_aligned


def library_product_us(values: Values, num_bytes: int, elements: int, num_tokens: int) -> float:
    """At the rates for a bf16 matrix."""
    return max(us_of_bytes(num_bytes, values.library_tb_s), us_of_operations(2.0 * elements * num_tokens, values.matrix_tflops))


def _quantized_bytes(setting: Setting) -> int:
    """Read and written a token to quantise what the four products of each layer take: two times the hidden row, the heads, the
    MLP's columns."""
    shard, local = setting.shard, setting.shard.blueprint.plan.local_sizes
    width = 2 * shard.blueprint.config.hidden_size + local["q"] + local["mlp"]
    return shard.num_layers * width * (shard.blueprint.dtype.itemsize + 1)
