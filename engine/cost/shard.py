"""What one rank reads and computes, padding and replicated KV heads included. Counted by the code that lays the weights out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bench.load import DTYPES, Case
from engine.bench.roof import Reads
from engine.loading import Blueprint, draw_blueprint
from engine.memory import page_bytes
from engine.settings import EngineSettings
from engine.weights import MATRICES, shard_bytes
from launch.errors import UsageError
from launch.world import World


@dataclass(frozen=True)
class Shard:
    """Rank 0's part of `case`. `reads`: bytes of a decode step, as the decode bench counts them.

    `layer_elements`: weights of the matrices of all layers; `head_bytes`: of the output head, which is never FP8.
    """

    case: Case
    blueprint: Blueprint
    reads: Reads
    layer_elements: int
    head_bytes: int

    @classmethod
    def of(cls, case: Case, model: str) -> Shard:
        """`model`: the name of a shape or a model folder, as `case.model` says it shortly. No weights are read.

        *Raises* `ModelError` or `UsageError` where the engine would refuse, or the context is past the model's limit.
        """
        if case.dtype not in ("bf16", "fp8"):
            raise UsageError(f"the cost model knows bf16 and fp8, not {case.dtype!r}")
        settings = EngineSettings(model, load_format="dummy", dtype=DTYPES[case.dtype], shard_of=case.tp)
        blueprint = draw_blueprint(settings, World(device=torch.device("cuda")))
        config, local = blueprint.config, blueprint.plan.local_sizes
        if case.prompt + case.output > config.max_positions:
            raise UsageError(
                f"a prompt of {case.prompt} and an answer of {case.output} tokens are past {case.model}'s limit of "
                f"{config.max_positions} positions"
            )
        rows = (local["q"] + 2 * local["kv"]) + local["q"] + 3 * local["mlp"]
        head_bytes = local["vocab"] * config.hidden_size * blueprint.dtype.itemsize
        return cls(case, blueprint, Reads.of(case, blueprint), config.num_layers * config.hidden_size * rows, head_bytes)

    @property
    def num_layers(self) -> int:
        return self.blueprint.config.num_layers

    @property
    def num_products(self) -> int:
        return len(MATRICES) * self.num_layers

    @property
    def layer_bytes(self) -> int:
        """Of the weights of all layers, in the dtype they are kept in."""
        return self.reads.weight_bytes - self.head_bytes

    @property
    def head_elements(self) -> int:
        return self.head_bytes // self.blueprint.dtype.itemsize

    @property
    def num_reduces(self) -> int:
        """Sums over the ranks in a step: after the embedding, o and down."""
        return 1 + 2 * self.num_layers

    def message_bytes(self, num_tokens: int) -> int:
        """Of one such sum."""
        return num_tokens * self.blueprint.config.hidden_size * self.blueprint.dtype.itemsize

    @property
    def needed_gb(self) -> float:
        """Memory of a GPU for the weights and all keys and values, 1e9 bytes; nothing else is counted."""
        case, blueprint = self.case, self.blueprint
        weights = shard_bytes(blueprint.config, blueprint.plan, blueprint.dtype, blueprint.is_fp8)
        token = page_bytes(blueprint.config, blueprint.plan, blueprint.dtype, page_size=1)
        return (weights + token * case.batch * (case.prompt + case.output)) / 1e9
