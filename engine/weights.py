"""The weights one rank holds, in the layout the step backends want, and how they get there.

Every matrix is a plain contiguous `[out, in]` tensor. Query, key and value projections are fused into one, and
so are gate and up. Padding is zeros, laid down once when the tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from engine.checkpoint import Checkpoint, layer_tensor_name, model_rules
from engine.config import ModelConfig
from engine.families import TensorRule
from engine.shard_plan import ShardPlan
from kernels.linear import pack_linear

MATRICES = ("qkv", "o", "gate_up", "down")
Progress = Callable[[int, int], None]
DUMMY_STD = 0.02  # the initializer range of Qwen2; keeps activations and logits finite at any depth


@dataclass
class LayerWeights:
    """One layer's shard. Biases and q/k norms are None where the family has none.

    `qkv` `[(local_q_heads + 2 * local_kv_heads) * head_dim, hidden]`, rows in the order q, k, v; `o` `[hidden,
    local_q_heads * head_dim]`; `gate_up` `[2 * local_mlp, hidden]`, gate first; `down` `[hidden, local_mlp]`;
    norms `[hidden]`; `q_norm`, `k_norm` `[head_dim]`. `o_bias`, `down_bias` `[hidden]` are on rank 0 only: they
    are added before the sum over ranks.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass
class ModelWeights:
    """A rank's shard. `embedding` and `head` are `[local_vocab, hidden]`, one tensor where they are tied."""

    embedding: torch.Tensor
    layers: list[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all distinct tensors."""
        tensors = [self.embedding, self.final_norm, self.head]
        for layer in self.layers:
            tensors += [t for t in (getattr(layer, f.name) for f in fields(layer)) if t is not None]
        return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())

    def pack(self) -> None:
        """Repack the matrices for speed where that helps (`kernels/linear.py`), one at a time, dropping the plain ones.

        Idempotent. *Cost*: no memory but one matrix, and the head a second time where it is tied, because the
        embedding is looked up by rows and stays plain.
        """
        for layer in self.layers:
            for name in MATRICES:
                setattr(layer, name, pack_linear(getattr(layer, name)))
        self.head = pack_linear(self.head)


def load_weights(
    checkpoint: Checkpoint,
    plan: ShardPlan,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> ModelWeights:
    """Read the slices of `checkpoint` that `plan`'s rank holds. Not collective.

    `progress(done_bytes, total_bytes)` is called after each tensor, in bytes of this rank's shard. *Cost*: peak
    host memory is the shard (on the CPU) plus the touched pages of one tensor, whatever dtype is converted to.
    *Raises* `ModelError` when a file turns out to be unreadable.
    """
    config = checkpoint.config
    if plan.rank == 0:
        checkpoint.check_ignored_head()
    total = shard_bytes(config, plan, dtype)
    done = 0

    def fill(name: str, rule: TensorRule, out: torch.Tensor) -> None:
        nonlocal done
        axis, pieces = _placement(rule, out, plan)
        checkpoint.read_pieces(name, axis, pieces, out)
        done += out.numel() * out.element_size()
        if progress is not None:
            progress(done, total)

    return _build(config, plan, dtype, device, fill)


def dummy_weights(
    config: ModelConfig, plan: ShardPlan, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> ModelWeights:
    """Random weights of the right shapes: normal with deviation 0.02, norms 1, padding 0. No files are read.

    The values depend on `seed` and the rank, so a different world size is a different model; for measuring
    speed and memory.
    """
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + plan.rank)

    def fill(name: str, rule: TensorRule, out: torch.Tensor) -> None:
        if rule.dims in (("hidden",), ("head_dim",)) and not rule.is_partial_sum_bias:
            out.fill_(1.0)
            return
        axis, pieces = _placement(rule, out, plan)
        for start, _, length in pieces:
            out.narrow(axis, start, length).normal_(0.0, DUMMY_STD, generator=generator)

    return _build(config, plan, dtype, device, fill)


def shard_bytes(config: ModelConfig, plan: ShardPlan, dtype: torch.dtype) -> int:
    """Bytes of weights on `plan`'s rank, padding included."""
    layer_rules, outer_rules = model_rules(config)
    elements = sum(_num_elements(rule, config, plan) for rule in outer_rules)
    elements += config.num_layers * sum(_num_elements(rule, config, plan) for rule in layer_rules)
    return elements * dtype.itemsize


def _build(
    config: ModelConfig,
    plan: ShardPlan,
    dtype: torch.dtype,
    device: torch.device,
    fill: Callable[[str, TensorRule, torch.Tensor], None],
) -> ModelWeights:
    """Allocate every field as zeros and let `fill(tensor name, rule, its part of the field)` write the real values."""
    layer_rules, outer_rules = model_rules(config)

    def build_fields(rules: list[TensorRule], tensor_name: Callable[[TensorRule], str]) -> dict[str, torch.Tensor]:
        built: dict[str, torch.Tensor] = {}
        for field_name in dict.fromkeys(rule.field for rule in rules):
            parts = [rule for rule in rules if rule.field == field_name]
            if parts[0].is_partial_sum_bias and plan.rank != 0:
                continue
            shapes = [_local_shape(rule, config, plan) for rule in parts]
            whole = torch.zeros(sum(s[0] for s in shapes), *shapes[0][1:], dtype=dtype, device=device)
            begin = 0
            for rule, shape in zip(parts, shapes):
                fill(tensor_name(rule), rule, whole[begin : begin + shape[0]])
                begin += shape[0]
            built[field_name] = whole
        return built

    outer = build_fields(outer_rules, lambda rule: rule.source)
    layers = [
        LayerWeights(**build_fields(layer_rules, lambda rule, layer=layer: layer_tensor_name(layer, rule)))
        for layer in range(config.num_layers)
    ]
    return ModelWeights(
        embedding=outer["embedding"],
        layers=layers,
        final_norm=outer["final_norm"],
        head=outer["embedding"] if config.is_tied else outer["head"],
    )


def _local_shape(rule: TensorRule, config: ModelConfig, plan: ShardPlan) -> tuple[int, ...]:
    sizes = {"hidden": config.hidden_size, "head_dim": config.head_dim, **plan.local_sizes}
    return tuple(sizes[dim] for dim in rule.dims)


def _num_elements(rule: TensorRule, config: ModelConfig, plan: ShardPlan) -> int:
    if rule.is_partial_sum_bias and plan.rank != 0:
        return 0
    return torch.Size(_local_shape(rule, config, plan)).numel()


def _placement(rule: TensorRule, out: torch.Tensor, plan: ShardPlan) -> tuple[int, list[tuple[int, int, int]]]:
    """Axis and pieces of the split dimension of `rule`, or the whole of axis 0 where nothing is split."""
    for axis, dim in enumerate(rule.dims):
        if dim in plan.local_sizes:
            return axis, plan.pieces(dim)
    return 0, [(0, 0, out.shape[0])]
