"""The parts of a prefill: all prompts of a case to their first tokens, in steps of what the benches allow at once."""

from __future__ import annotations

from engine.bench.load import MAX_STEP_TOKENS
from engine.cost.constants import Values
from engine.cost.products import is_scaled, layer_products, library_product_us
from engine.cost.setting import KERNELS, Rules, Setting, us_of_bytes, us_of_operations
from engine.cost.shard import Shard
from kernels.long_attention import HEAD_DIMS, LEAST_TOKENS

# Rows that kernels read and write between the products of a layer, counted: `add_norm` (the sum and the residual, each read and
# written) stands twice in a layer; `silu_mul` reads two halves and writes one.
ADD_NORM_PASSES, SILU_PASSES = 4, 3


def step_tokens(shard: Shard) -> list[int]:
    """Tokens of each step."""
    whole, rest = divmod(shard.case.batch * shard.case.prompt, MAX_STEP_TOKENS)
    return [MAX_STEP_TOKENS] * whole + [rest] * (rest > 0)


def attention_operations(shard: Shard) -> float:
    """Scores and sums of the causal half of every prompt, all layers."""
    case, plan = shard.case, shard.blueprint.plan
    return 2.0 * shard.num_layers * plan.local_q_heads * plan.head_dim * case.batch * case.prompt**2


def _weights(values: Values, setting: Setting) -> float:
    return sum(layer_products(values, setting, num_tokens).at_rates for num_tokens in step_tokens(setting.shard))


def _kv(values: Values, setting: Setting) -> float:
    rate = values.long_attention_tflops if _is_long(setting.shard) else values.prefill_attention_tflops
    return us_of_operations(attention_operations(setting.shard), rate)


def _is_long(shard: Shard) -> bool:
    """Whether cuDNN attends, as `engine/graph/long_prompts.py` chooses from the second such prompt on."""
    case, config = shard.case, shard.blueprint.config
    is_all_seen = all(window is None or window >= case.prompt for window in config.windows)
    is_alone = case.batch == 1 and LEAST_TOKENS <= case.prompt <= MAX_STEP_TOKENS
    return is_alone and is_all_seen and config.head_dim in HEAD_DIMS


def _collectives(values: Values, setting: Setting) -> float:
    shard = setting.shard
    return sum(shard.num_reduces * setting.sum_us(values, num_tokens) for num_tokens in step_tokens(shard))


def _borders(values: Values, setting: Setting) -> float:
    """What kernels cost beyond bytes and operations of the above, and what launching them takes longer than all that they do."""
    us = values.request_us
    share = 1 / len(step_tokens(setting.shard))
    for num_tokens in step_tokens(setting.shard):
        beyond = _beyond_us(values, setting, num_tokens)
        us += beyond
        if setting.step_of(num_tokens) == KERNELS:
            products = layer_products(values, setting, num_tokens).at_rates
            sums = setting.shard.num_reduces * setting.sum_us(values, num_tokens)
            device = beyond + products + sums + share * _kv(values, setting)
            us += max(0.0, _launching_us(values, setting, num_tokens) - device)
    return us


def _beyond_us(values: Values, setting: Setting, num_tokens: int) -> float:
    """Of a step's kernels: products beyond their rates, attention's beginning, norms, and SiLU."""
    shard = setting.shard
    moved = SILU_PASSES * shard.num_layers * shard.blueprint.plan.local_mlp
    if not setting.is_norm_fused(num_tokens):
        moved += ADD_NORM_PASSES * shard.num_reduces * shard.blueprint.config.hidden_size
    passes = us_of_bytes(moved * num_tokens * shard.blueprint.dtype.itemsize, values.copy_tb_s)
    return passes + layer_products(values, setting, num_tokens).beyond + shard.num_layers * values.prefill_attention_us


def _launching_us(values: Values, setting: Setting, num_tokens: int) -> float:
    """By the host, kernel by kernel."""
    shard = setting.shard
    num_launches = values.layer_launches
    if is_scaled(setting, num_tokens):  # each of its products has a kernel before it that quantises
        num_launches += shard.num_products / shard.num_layers
    return shard.num_layers * num_launches * values.launch_us


def _head(values: Values, setting: Setting) -> float:
    shard = setting.shard
    return values.library_us + library_product_us(values, shard.head_bytes, shard.head_elements, shard.case.batch)


PREFILL: Rules = {"weights": _weights, "kv": _kv, "collectives": _collectives, "borders": _borders, "head": _head}
