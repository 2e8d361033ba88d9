"""The weights one rank holds, in the layout the step backends want, and how they get there.

Every matrix is a plain contiguous `[out, in]` tensor, or FP8 (`kernels/quantize.py`). Query, key and value
projections are fused into one, and so are gate and up. Padding is zeros, laid down once when the tensor is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from engine.checkpoint import Checkpoint, layer_tensor_name, model_rules
from engine.config import ModelConfig
from engine.families import TensorRule
from engine.shard_plan import ShardPlan
from engine.staging import Staging
from kernels.linear import Matrix, pack_linear
from kernels.quantize import NUM_SCALES, Fp8Weight, quantize

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
    qkv: Matrix
    o: Matrix
    mlp_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
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
        """Bytes of all distinct tensors; the workspace of FP8 matrices is not among them."""
        tensors = [self.embedding, self.final_norm, self.head]
        for layer in self.layers:
            tensors += [t for t in (getattr(layer, f.name) for f in fields(layer)) if t is not None]
        return sum({id(t): _num_bytes(t) for t in tensors}.values())

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
    is_fp8: bool = False,
) -> ModelWeights:
    """Read the slices of `checkpoint` that `plan`'s rank holds. Not collective.

    `is_fp8`: the `MATRICES` are quantised as they come, from `dtype`; the scales are those of this rank's slice of each row.
    `progress(done_bytes, total_bytes)` is called after each field, in bytes of this rank's shard. *Cost*: peak
    host memory is the shard (on the CPU) or 128 MiB of pinned buffers (for a GPU), plus the touched pages of one tensor and a
    block of it, whatever dtype is converted to; device memory is the shard, and with `is_fp8` its largest matrix in `dtype`.
    *Raises* `ModelError` when a file turns out to be unreadable.
    """
    config = checkpoint.config
    if plan.rank == 0:
        checkpoint.check_ignored_head()
    put = Staging(device).put if device.type == "cuda" else torch.Tensor.copy_

    def fill(name: str, rule: TensorRule, out: torch.Tensor) -> None:
        axis, pieces = _placement(rule, out, plan)
        checkpoint.read_pieces(name, axis, pieces, out, put)

    return _build(config, plan, dtype, device, fill, NUM_SCALES if is_fp8 else 0, progress)


def dummy_weights(
    config: ModelConfig, plan: ShardPlan, dtype: torch.dtype, device: torch.device, seed: int = 0, is_fp8: bool = False
) -> ModelWeights:
    """Random weights of the right shapes: normal with deviation 0.02, norms 1, padding 0. No files are read.

    Made on `device`. The values depend on `seed`, the rank and the kind of device, so a different world size is a
    different model; for measuring speed and memory. `is_fp8`: as for `load_weights`, with the first scale that will do.
    """
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + plan.rank)

    def fill(name: str, rule: TensorRule, out: torch.Tensor) -> None:
        if rule.dims in (("hidden",), ("head_dim",)) and not rule.is_partial_sum_bias:
            out.fill_(1.0)
            return
        axis, pieces = _placement(rule, out, plan)
        for start, _, length in pieces:
            out.narrow(axis, start, length).normal_(0.0, DUMMY_STD, generator=generator)

    return _build(config, plan, dtype, device, fill, 1 if is_fp8 else 0)


def shard_bytes(config: ModelConfig, plan: ShardPlan, dtype: torch.dtype, is_fp8: bool = False) -> int:
    """Bytes of weights on `plan`'s rank, padding included."""
    layer_rules, outer_rules = model_rules(config)

    def num_bytes(rule: TensorRule) -> int:
        if rule.is_partial_sum_bias and plan.rank != 0:
            return 0
        shape = torch.Size(_local_shape(rule, config, plan))
        if is_fp8 and rule.field in MATRICES:
            return shape.numel() + 4 * shape[0]
        return shape.numel() * dtype.itemsize

    return sum(map(num_bytes, outer_rules)) + config.num_layers * sum(map(num_bytes, layer_rules))


def _build(
    config: ModelConfig,
    plan: ShardPlan,
    dtype: torch.dtype,
    device: torch.device,
    fill: Callable[[str, TensorRule, torch.Tensor], None],
    num_scales: int = 0,
    progress: Progress | None = None,
) -> ModelWeights:
    """Allocate every field as zeros and let `fill(tensor name, rule, its part of the field)` write the real values.

    `num_scales`: of `quantize`; 0 leaves the matrices as they are.
    """
    layer_rules, outer_rules = model_rules(config)
    workspace = _fp8_workspace(config, plan, dtype, device) if num_scales else None
    total, done = shard_bytes(config, plan, dtype, num_scales > 0), 0

    def build_fields(rules: list[TensorRule], tensor_name: Callable[[TensorRule], str]) -> dict[str, Matrix]:
        nonlocal done
        built: dict[str, Matrix] = {}
        for field_name in dict.fromkeys(rule.field for rule in rules):
            parts = [rule for rule in rules if rule.field == field_name]
            if parts[0].is_partial_sum_bias and plan.rank != 0:
                continue
            shapes = [_local_shape(rule, config, plan) for rule in parts]
            shape = torch.Size((sum(s[0] for s in shapes), *shapes[0][1:]))
            is_quantized = workspace is not None and field_name in MATRICES
            if is_quantized:
                # The matrix is put together where it will later be widened: no second copy, and no holes where the copies were.
                whole = workspace[: shape.numel()].view(shape).zero_()
            else:
                whole = torch.zeros(shape, dtype=dtype, device=device)
            begin = 0
            for rule, shape in zip(parts, shapes):
                fill(tensor_name(rule), rule, whole[begin : begin + shape[0]])
                begin += shape[0]
            built[field_name] = quantize(whole, workspace, num_scales) if is_quantized else whole
            done += _num_bytes(built[field_name])
            if progress is not None:
                progress(done, total)
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


def _fp8_workspace(config: ModelConfig, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Flat memory for the largest of the `MATRICES`."""
    sizes = dict.fromkeys(MATRICES, 0)
    for rule in model_rules(config)[0]:
        if rule.field in sizes:
            sizes[rule.field] += torch.Size(_local_shape(rule, config, plan)).numel()
    return torch.empty(max(sizes.values()), dtype=dtype, device=device)


def _num_bytes(tensor: Matrix) -> int:
    return tensor.num_bytes if isinstance(tensor, Fp8Weight) else tensor.numel() * tensor.element_size()


def _placement(rule: TensorRule, out: torch.Tensor, plan: ShardPlan) -> tuple[int, list[tuple[int, int, int]]]:
    """Axis and pieces of the split dimension of `rule`, or the whole of axis 0 where nothing is split."""
    for axis, dim in enumerate(rule.dims):
        if dim in plan.local_sizes:
            return axis, plan.pieces(dim)
    return 0, [(0, 0, out.shape[0])]
