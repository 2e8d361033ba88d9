"""Shapes of the public Qwen2.5 models, for runs with random weights (`--load-format dummy`) that need no files.

*Source*: the `config.json` of each Qwen/Qwen2.5-*-Instruct model.
"""

from __future__ import annotations

from engine.config import ModelConfig
from engine.rope import RopeConfig
from launch.errors import ModelError

# layers, hidden, MLP, query heads, KV heads, vocabulary rows, tied head
SHAPES = {
    "qwen2.5-0.5b": (24, 896, 4864, 14, 2, 151936, True),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151936, True),
    "qwen2.5-3b": (36, 2048, 11008, 16, 2, 151936, True),
    "qwen2.5-7b": (28, 3584, 18944, 28, 4, 152064, False),
    "qwen2.5-14b": (48, 5120, 13824, 40, 8, 152064, False),
    "qwen2.5-32b": (64, 5120, 27648, 40, 8, 152064, False),
    "qwen2.5-72b": (80, 8192, 29568, 64, 8, 152064, False),
}


def named_config(name: str) -> ModelConfig:
    """The configuration of a public Qwen2.5 size, such as `qwen2.5-72b`. *Raises* `ModelError` listing the names."""
    if name not in SHAPES:
        raise ModelError(f"there is no built-in shape named {name!r}; there are {', '.join(SHAPES)}")
    layers, hidden, mlp, heads, kv_heads, vocab, is_tied = SHAPES[name]
    return ModelConfig(
        family="qwen2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=mlp,
        full_heads=heads,
        full_kv_heads=kv_heads,
        head_dim=hidden // heads,
        full_vocab=vocab,
        rms_norm_eps=1e-6,
        rope=RopeConfig("default", 1e6),
        max_positions=32768,
        is_tied=is_tied,
        qkv_bias=True,
        windows=(None,) * layers,
        eos_token_ids=(151645, 151643),
        bos_token_id=151643,
        torch_dtype="bfloat16",
    )
