"""Any JSON as `config.json`: a `ModelConfig` with sane numbers or a `ModelError`, never another exception."""

from __future__ import annotations

import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.config import parse_config
from engine.rope import inverse_frequencies
from launch.errors import ModelError
from tests.cpu.test_config import BASE

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 200),
    st.integers(),
    st.sampled_from([2**31, 2**63, 10**400]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["yarn", "llama3", "linear", "default", "qwen2", "llama", "qwen3", "silu", "sliding_attention"]),
)
ROPE_KEYS = [
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor", "partial_rotary_factor",
]  # fmt: skip
GOOD_ROPE = {
    "factor": 4.0, "original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
ROPE = st.builds(
    lambda kind, changes: {**GOOD_ROPE, "rope_type": kind, **changes},
    st.sampled_from(["yarn", "llama3", "linear", "default"]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, max_size=3),
)
VALUES = st.one_of(
    SCALARS, ROPE, st.lists(SCALARS, max_size=4), st.dictionaries(st.text(max_size=4), SCALARS, max_size=3)
)
EXTRA_KEYS = [
    "head_dim", "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers",
    "layer_types", "eos_token_id", "bos_token_id", "torch_dtype", "dtype", "attention_bias", "mlp_bias",
    "quantization_config", "partial_rotary_factor", "original_max_position_embeddings",
]  # fmt: skip
CHANGES = st.dictionaries(st.sampled_from([*BASE, *EXTRA_KEYS]), VALUES, max_size=4)


def check(data) -> None:
    try:
        config = parse_config(data, "config.json")
    except ModelError as error:
        assert len(str(error)) < 600
        return
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    assert frequencies.shape == (config.head_dim // 2,) and bool(frequencies.isfinite().all())
    assert math.isfinite(config.rope.attention_factor) and config.rope.attention_factor > 0
    assert config.full_heads % config.full_kv_heads == 0 and config.head_dim % 2 == 0
    assert 0 < config.max_positions < 2**31 and len(config.windows) == config.num_layers
    assert config.fingerprint


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(CHANGES)
def test_changed_keys(changes):
    check({**BASE, **changes})


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)))
def test_any_json(value):
    check(value)
