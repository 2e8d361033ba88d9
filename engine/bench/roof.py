"""The least that a load can cost on H200s: bytes over the memory's rate, multiplications over the matrix units' rate.

Rates are those of the datasheet, so no engine can be faster; what is measured is given beside them where it is used. FP8
matrices could be multiplied with FP8 activations at twice the rate of bf16: that is their roof, although this engine widens them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench.load import Case
from engine.config import ModelConfig
from engine.loading import Blueprint
from engine.memory import page_bytes
from engine.weights import shard_bytes

DATASHEET_TB_S, READ_TB_S = 4.8, 4.59  # H200's HBM as sold, and the fastest read measured on it (bulk copies)
DATASHEET_TFLOP_S = {"bf16": 989.0, "fp8": 1979.0, "fp32": 67.0}  # dense, one H200; torch does not round fp32 to TF32


@dataclass(frozen=True)
class Reads:
    """Bytes that one decode step reads on one GPU: all weights but the embedding (a few rows of it), and keys and values at the
    mean length of the run."""

    weight_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, case: Case, blueprint: Blueprint) -> Reads:
        mean_tokens = case.batch * (case.prompt + case.output / 2)
        return cls(weight_bytes(case, blueprint), int(mean_tokens * token_bytes(case, blueprint)))

    @property
    def total(self) -> int:
        return self.weight_bytes + self.kv_bytes


def weight_bytes(case: Case, blueprint: Blueprint) -> int:
    """Of all weights but the embedding on one GPU."""
    config, plan, dtype = blueprint.config, blueprint.plan, blueprint.dtype
    weights = shard_bytes(config, plan, dtype, blueprint.is_fp8)
    if not config.is_tied:
        weights -= plan.local_vocab * config.hidden_size * dtype.itemsize
    return case.ranks_per_gpu * weights


def token_bytes(case: Case, blueprint: Blueprint) -> int:
    """Of the keys and values of one token on one GPU."""
    return case.ranks_per_gpu * page_bytes(blueprint.config, blueprint.plan, blueprint.dtype, page_size=1)


def num_operations(config: ModelConfig, lengths: Sequence[int], num_logits: int) -> int:
    """Multiplications and additions of all ranks for rows of `lengths` computed tokens, `num_logits` of which need the head."""
    layer = 2 * config.hidden_size * config.head_dim * (config.full_heads + config.full_kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    products = 2 * (config.num_layers * layer * sum(lengths) + config.full_vocab * config.hidden_size * num_logits)
    pairs = sum(num_pairs(length, window) for window in config.windows for length in lengths)
    return products + 4 * config.full_heads * config.head_dim * pairs


def num_pairs(length: int, window: int | None) -> int:
    """Pairs of a query and a key that it attends to, in one row of one layer."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def floor_s(case: Case, operations: int, num_bytes: int) -> float:
    """Seconds that `operations`, dealt to the case's GPUs, and `num_bytes` of one GPU take at least, done side by side."""
    own = operations * case.ranks_per_gpu / case.tp
    return max(own / (DATASHEET_TFLOP_S[case.dtype] * 1e12), num_bytes / (DATASHEET_TB_S * 1e12))
