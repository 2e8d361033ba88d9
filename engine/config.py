"""The model's configuration: a Hugging Face `config.json` turned into one frozen record, or refused by name.

Reads the spellings of transformers 4 and 5. Everything that would change the arithmetic is either honoured or
refused; nothing is silently dropped.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.config_fields import ConfigFields, shown
from engine.families import FAMILIES, Family
from engine.rope import RopeConfig, extended_positions, has_rope_theta, parse_rope
from launch.errors import ModelError

DTYPES = ("float32", "bfloat16", "float16")
MAX_SIDE = 2**24  # rows or columns of one matrix; far above any model, far below an overflow


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of one model, independent of how it is sharded.

    `windows`: per layer, the number of last tokens it attends to (the current one included), or None for all.
    `max_positions`: longest sequence the model covers, scaling included. `torch_dtype`: dtype the weights were
    saved in, as a torch name. `notes`: remarks for the user that change nothing; not part of `fingerprint`.
    """

    family: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    full_heads: int
    full_kv_heads: int
    head_dim: int
    full_vocab: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int
    is_tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str = "float32"
    notes: tuple[str, ...] = ()

    @property
    def is_untied(self) -> bool:
        return not self.is_tied

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.full_heads // self.full_kv_heads

    @property
    def sliding_window(self) -> int | None:
        """The window of the layers that have one, or None."""
        return next((window for window in self.windows if window is not None), None)

    @property
    def num_parameters(self) -> int:
        """Weights of the full model, biases and norms included."""
        attention = 2 * self.hidden_size * self.head_dim * (self.full_heads + self.full_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        small = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        small += self.head_dim * (self.full_heads + 2 * self.full_kv_heads) if self.qkv_bias else 0
        small += self.hidden_size if self.o_bias else 0
        small += 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        vocab = self.full_vocab * self.hidden_size * (1 if self.is_tied else 2)
        return self.num_layers * (attention + mlp + small) + vocab + self.hidden_size

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change when anything that affects the output does."""
        fields = asdict(self)
        del fields["notes"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


def load_config(folder: Path) -> ModelConfig:
    """Read `folder/config.json`. *Raises* `ModelError` naming the file and what is wrong with it."""
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder; give the path of a local Hugging Face model folder "
            "(model names are not downloaded)"
        )
    path = folder / "config.json"
    if not path.exists():
        hint = " (GGUF files must be converted to safetensors first)" if any(folder.glob("*.gguf")) else ""
        raise ModelError(f"{folder} has no config.json, so it is not a Hugging Face model folder{hint}")
    return parse_config(read_json(path), str(path))


def read_json(path: Path) -> Any:
    """The JSON value in a file, a UTF-8 byte order mark allowed. *Raises* `ModelError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {str(error)[:200]}") from None


def parse_config(data: dict[str, Any], where: str) -> ModelConfig:
    """Turn the content of a `config.json` into a `ModelConfig`. `where` names the file in a `ModelError`."""
    fields = ConfigFields(data, where)
    family = _family(fields)
    _refuse_unsupported(fields)
    hidden, heads = fields.whole("hidden_size", high=MAX_SIDE), fields.whole("num_attention_heads", high=4096)
    kv_heads = fields.whole("num_key_value_heads", heads, high=4096)
    if heads % kv_heads:
        fields.fail(f"'num_attention_heads' ({heads}) is not a multiple of 'num_key_value_heads' ({kv_heads})")
    head_dim = _head_dim(fields, hidden, heads)
    layers = fields.whole("num_hidden_layers", high=4096)
    vocab = fields.whole("vocab_size", high=MAX_SIDE)
    rope = parse_rope(fields, family.implied_rope_theta)
    eos, notes = _token_ids(fields, "eos_token_id", vocab)
    bos, _ = _token_ids(fields, "bos_token_id", vocab)
    if not has_rope_theta(fields):
        notes += (f"config.json names no rope_theta; {rope.theta:g} is used, as early {family.name} models imply",)
    return ModelConfig(
        family=family.name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.whole("intermediate_size", high=MAX_SIDE),
        full_heads=heads,
        full_kv_heads=kv_heads,
        head_dim=head_dim,
        full_vocab=vocab,
        rms_norm_eps=fields.number("rms_norm_eps", low=0.0, high=1.0),
        rope=rope,
        max_positions=extended_positions(rope, fields.whole("max_position_embeddings")),
        is_tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=_bias(fields, family.qkv_bias),
        o_bias=_bias(fields, family.o_bias),
        mlp_bias=_bias(fields, family.mlp_bias),
        qk_norm=family.qk_norm,
        windows=_windows(fields, family, layers),
        eos_token_ids=eos,
        bos_token_id=bos[0] if bos else None,
        torch_dtype=_torch_dtype(fields),
        notes=notes,
    )


def _family(fields: ConfigFields) -> Family:
    """The family by architecture name, or by `model_type` where no architecture is given. The two must agree."""
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    names = fields.value("architectures", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        fields.fail(f"'architectures' must be a list of names, not {shown(names)}")
    model_type = fields.text("model_type", None)
    by_name = [family for family in FAMILIES.values() if family.architecture in names]
    if names and not by_name:
        fields.fail(f"the architecture {shown(', '.join(names))} is not supported; supported are {supported}")
    if model_type is not None and model_type not in FAMILIES:
        fields.fail(f"the model type {shown(model_type)} is not supported; supported are {', '.join(FAMILIES)}")
    if not by_name and model_type is None:
        fields.fail(f"neither 'architectures' nor 'model_type' is given; supported architectures are {supported}")
    family = by_name[0] if by_name else FAMILIES[model_type]
    if model_type not in (None, family.name) or len(by_name) > 1:
        fields.fail(f"'architectures' ({shown(', '.join(names))}) and 'model_type' ({shown(model_type)}) disagree")
    return family


def _refuse_unsupported(fields: ConfigFields) -> None:
    if fields.has("quantization_config"):
        block = fields.data["quantization_config"]
        method = block.get("quant_method") if isinstance(block, dict) else block
        fields.fail(f"quantised weights ({shown(method)}) are not supported; use the unquantised model")
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        fields.fail(f"'hidden_act' {shown(activation)} is not supported; supported is 'silu'")


def _head_dim(fields: ConfigFields, hidden: int, heads: int) -> int:
    """Null and absent mean hidden_size / heads; an explicit value is used, and checked against the tensors later."""
    if not fields.has("head_dim") and hidden % heads:
        fields.fail(
            f"'hidden_size' ({hidden}) is not a multiple of 'num_attention_heads' ({heads}), and there is no 'head_dim'"
        )
    head_dim = fields.whole("head_dim", hidden // heads, high=4096)
    if head_dim < 2 or head_dim % 2:
        fields.fail(f"the head dimension is {head_dim}; rotary embedding needs an even one")
    return head_dim


def _bias(fields: ConfigFields, rule: bool | str) -> bool:
    return fields.flag(rule, False) if isinstance(rule, str) else rule


def _windows(fields: ConfigFields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Window of each layer. `use_sliding_window: false` means full attention whatever `sliding_window` says."""
    types = fields.value("layer_types", None)
    if types is not None and (not isinstance(types, list) or len(types) != layers):
        fields.fail(f"'layer_types' must be a list of {layers} entries, one a layer")
    for kind in types or ():
        if kind not in ("full_attention", "sliding_attention"):
            fields.fail(f"layer type {shown(kind)} is not supported, only 'full_attention' and 'sliding_attention' are")
    window = fields.whole("sliding_window", None)
    is_used = fields.flag("use_sliding_window", False)
    if not family.has_windows:
        if is_used or "sliding_attention" in (types or ()) or (window and not fields.has("use_sliding_window")):
            fields.fail(f"sliding-window attention is not supported for the family {family.name!r}")
        return (None,) * layers
    if not is_used or window is None:
        if "sliding_attention" in (types or ()):
            fields.fail("'layer_types' asks for sliding attention, but it is off or has no 'sliding_window'")
        return (None,) * layers
    if types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = fields.whole("max_window_layers", low=0)
    return tuple(window if layer >= first else None for layer in range(layers))


def _token_ids(fields: ConfigFields, key: str, vocab: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Ids of a key that holds one id, a list of ids or null, and a note for each one outside the vocabulary."""
    value = fields.value(key, [])
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        fields.fail(f"{key!r} must be a token id or a list of token ids, not {shown(value)}")
    outside = [i for i in ids if not 0 <= i < vocab]
    notes = tuple(f"{key} {shown(i)} lies outside the vocabulary of {vocab} rows and is ignored" for i in outside)
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab)), notes


def _torch_dtype(fields: ConfigFields) -> str:
    """`dtype` (transformers 5) or `torch_dtype` (4), with or without the `torch.` prefix; by default float32."""
    name = fields.text("dtype", None) or fields.text("torch_dtype", None) or "float32"
    if name.removeprefix("torch.") not in DTYPES:
        fields.fail(f"the dtype {shown(name)} is not supported; supported are {', '.join(DTYPES)}")
    return name.removeprefix("torch.")
