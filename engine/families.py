"""What differs between model families, as tables: config rules per family, and the tensors of a checkpoint.

Adding a family whose layers are built from the same parts is a row in `FAMILIES`; a new tensor is a row in
`LAYER_TENSORS` and a field in `engine/weights.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """How one family reads its `config.json`. Where a bias is not fixed, a config key decides (absent: no bias).

    `implied_rope_theta`: the base that early configs of the family leave out, None where it must be written.
    `has_windows`: whether sliding-window keys mean anything in this family.
    """

    name: str
    architecture: str
    qkv_bias: bool | str
    o_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    has_windows: bool
    implied_rope_theta: float | None


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen2", "Qwen2ForCausalLM", True, False, False, False, True, None),
        Family("llama", "LlamaForCausalLM", "attention_bias", "attention_bias", "mlp_bias", False, False, 10000.0),
        Family("qwen3", "Qwen3ForCausalLM", "attention_bias", "attention_bias", False, True, True, None),
    )
}


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a checkpoint and where it goes.

    `dims` are names: `q` and `kv` (heads times head_dim), `mlp`, `vocab` are split over the ranks, `hidden` and
    `head_dim` are not. `field` is the attribute of the weights, `part` the part of it where several tensors are
    fused. `flag` is the boolean attribute of `ModelConfig` that says whether the tensor exists (None: always).
    `is_partial_sum_bias`: added once over all ranks, so rank 0 alone holds it.
    """

    source: str
    dims: tuple[str, ...]
    field: str
    part: str = ""
    flag: str | None = None
    is_partial_sum_bias: bool = False


LAYER_TENSORS = (
    TensorRule("input_layernorm.weight", ("hidden",), "input_norm"),
    TensorRule("self_attn.q_proj.weight", ("q", "hidden"), "qkv", "q"),
    TensorRule("self_attn.k_proj.weight", ("kv", "hidden"), "qkv", "k"),
    TensorRule("self_attn.v_proj.weight", ("kv", "hidden"), "qkv", "v"),
    TensorRule("self_attn.q_proj.bias", ("q",), "qkv_bias", "q", flag="qkv_bias"),
    TensorRule("self_attn.k_proj.bias", ("kv",), "qkv_bias", "k", flag="qkv_bias"),
    TensorRule("self_attn.v_proj.bias", ("kv",), "qkv_bias", "v", flag="qkv_bias"),
    TensorRule("self_attn.q_norm.weight", ("head_dim",), "q_norm", flag="qk_norm"),
    TensorRule("self_attn.k_norm.weight", ("head_dim",), "k_norm", flag="qk_norm"),
    TensorRule("self_attn.o_proj.weight", ("hidden", "q"), "o"),
    TensorRule("self_attn.o_proj.bias", ("hidden",), "o_bias", flag="o_bias", is_partial_sum_bias=True),
    TensorRule("post_attention_layernorm.weight", ("hidden",), "mlp_norm"),
    TensorRule("mlp.gate_proj.weight", ("mlp", "hidden"), "gate_up", "gate"),
    TensorRule("mlp.up_proj.weight", ("mlp", "hidden"), "gate_up", "up"),
    TensorRule("mlp.gate_proj.bias", ("mlp",), "gate_up_bias", "gate", flag="mlp_bias"),
    TensorRule("mlp.up_proj.bias", ("mlp",), "gate_up_bias", "up", flag="mlp_bias"),
    TensorRule("mlp.down_proj.weight", ("hidden", "mlp"), "down"),
    TensorRule("mlp.down_proj.bias", ("hidden",), "down_bias", flag="mlp_bias", is_partial_sum_bias=True),
)

MODEL_TENSORS = (
    TensorRule("model.embed_tokens.weight", ("vocab", "hidden"), "embedding"),
    TensorRule("model.norm.weight", ("hidden",), "final_norm"),
    TensorRule("lm_head.weight", ("vocab", "hidden"), "head", flag="is_untied"),
)
