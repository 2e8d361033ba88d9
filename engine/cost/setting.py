"""Where a shard runs, and what the parts of its steps are made from: bytes and operations over rates, and sums over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from comm.device_collectives import Capacity
from engine.cost.all_reduce import NORM, PLAIN, ROWS_NORM, AllReduceTable
from engine.cost.constants import Values
from engine.cost.gpus import Gpu
from engine.cost.shard import Shard
from engine.graph.cuda_operators import FUSED_ROWS
from engine.graph.step_shape import tokens_worth_a_graph

US = 1e6  # in a second
GRAPH, KERNELS = "graph", "kernels"  # ways to start a step, as `Engine.prefill_step` names them


@dataclass(frozen=True)
class Setting:
    """Where `shard` runs. `has_peers`: whether the sums over the ranks take place (`--shard-of` goes without).
    `all_reduce` is needed only then. `step`: `GRAPH` or `KERNELS` for all steps that prefill; empty for the engine's own rule."""

    shard: Shard
    gpu: Gpu
    all_reduce: AllReduceTable | None
    has_peers: bool
    step: str = ""

    def step_of(self, num_tokens: int) -> str:
        """How a step that prefills `num_tokens` is started."""
        layer_elems = self.shard.layer_elements // self.shard.num_layers
        return self.step or (GRAPH if num_tokens <= tokens_worth_a_graph(layer_elems, self.shard.blueprint.is_fp8) else KERNELS)

    def is_norm_fused(self, num_tokens: int) -> bool:
        """Whether a sum of so many rows adds the residual and norms as well. Of many rows, as far as that has been measured."""
        if not self.has_peers or num_tokens <= FUSED_ROWS:
            return self.has_peers
        is_measured = self.all_reduce.has(ROWS_NORM, self.shard.case.tp)
        return is_measured and self.shard.message_bytes(num_tokens) <= Capacity().rows_bytes

    def sum_us(self, values: Values, num_tokens: int) -> float:
        """A sum of the rows of `num_tokens` over the ranks, the norm with it where `is_norm_fused`; 0 without peers."""
        if not self.has_peers:
            return 0.0
        if num_tokens <= FUSED_ROWS:
            return self.reduce_us(values, num_tokens, NORM)
        kind = ROWS_NORM if self.is_norm_fused(num_tokens) else PLAIN
        return self.reduce_us(values, num_tokens, kind) + values.rank_wait_us

    def reduce_us(self, values: Values, num_tokens: int, kind: str) -> float:
        """A call of an all-reduce of a `kind`, as the table has it."""
        return self.all_reduce.use(values, self.gpu, self.shard.message_bytes(num_tokens), self.shard.case.tp, kind)


Rules = Mapping[str, Callable[[Values, Setting], float]]  # a part's name to what gives its us


def us_of_bytes(num_bytes: float, tb_s: float) -> float:
    return num_bytes / (tb_s * 1e12) * US


def us_of_operations(operations: float, tflops: float) -> float:
    return operations / (tflops * 1e12) * US
