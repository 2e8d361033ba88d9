"""The parts of a decode step."""

from __future__ import annotations

from engine.cost.all_reduce import PLAIN
from engine.cost.constants import Values
from engine.cost.products import layer_products, library_product_us
from engine.cost.setting import Rules, Setting, us_of_bytes
from kernels.gemv import MAX_ROWS


def _weights(values: Values, setting: Setting) -> float:
    return layer_products(values, setting, setting.shard.case.batch).at_rates


def _kv(values: Values, setting: Setting) -> float:
    return us_of_bytes(setting.shard.reads.kv_bytes, values.attention_tb_s)


def _collectives(values: Values, setting: Setting) -> float:
    return setting.shard.num_reduces * setting.sum_us(values, setting.shard.case.batch)


def _borders(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    us = values.step_us + shard.num_layers * values.attention_us + layer_products(values, setting, batch).beyond
    if batch > MAX_ROWS:
        us += shard.num_layers * values.silu_us
    if not setting.is_norm_fused(batch):
        us += shard.num_reduces * (values.norm_us + (batch - 1) * values.norm_row_us)
    return us


def _head(values: Values, setting: Setting) -> float:
    shard, batch = setting.shard, setting.shard.case.batch
    us = values.choose_us + batch * values.choose_row_us
    if setting.has_peers:  # the choice was measured at two ranks
        us += setting.reduce_us(values, 1, PLAIN) - setting.all_reduce.us(shard.message_bytes(1), 2, PLAIN)
    if batch > MAX_ROWS:
        return us + values.library_us + library_product_us(values, shard.head_bytes, shard.head_elements, batch)
    return us + values.product_bf16_us + us_of_bytes(shard.head_bytes, values.product_bf16_tb_s)


DECODE: Rules = {"weights": _weights, "kv": _kv, "collectives": _collectives, "borders": _borders, "head": _head}
