"""Random tiny models, written by transformers the way real ones are, and the reference forward pass over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

FAMILY_CONFIGS = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make_model(family: str = "qwen2", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random fp32 model: 2 layers, 8 query and 2 KV heads of dimension 16, vocabulary 131, no trivial bias."""
    options: dict[str, Any] = {
        "vocab_size": 131,
        "hidden_size": 64,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = FAMILY_CONFIGS[family](**{**options, **overrides})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = "norm" in name
            weight.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.15, generator=generator)
    return model


def save_model(model: PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Write `model` as a Hugging Face folder; a small `max_shard_size` (`50KB`) makes several files and an index."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of `folder/config.json` in place."""
    path = folder / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data.update(changes)
    for key in remove:
        data.pop(key, None)
    path.write_text(json.dumps(data), encoding="utf-8")


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    """fp32 logits `[len(token_ids), vocab]` of transformers' forward pass over one sequence."""
    return model(torch.tensor([token_ids])).logits[0]
