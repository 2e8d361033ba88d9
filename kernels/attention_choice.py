"""Which decode attention is the faster one, by a measured table: ours, or FlashInfer's with the kernel that must run before it.

`attention_choices.json` is made from a run where FlashInfer is installed: `python -m engine.bench.attention --choices
kernels/attention_choices.json`. Its keys are those of `Heads.key`, its values us a layer by backend.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

TABLE = Path(__file__).parent / "attention_choices.json"
OWN, FLASHINFER = "own", "flashinfer"
# Rows and cached tokens that are measured; a number counts as the next of these.
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_BUCKETS = (128, 512, 2048, 8192, 32768)


@dataclass(frozen=True)
class Heads:
    """Of one shard, in bf16."""

    head_dim: int
    num_q: int
    num_kv: int
    page_size: int

    def key(self, rows: int, context: int) -> str:
        """Of `rows` rows of `context` cached tokens, both of them buckets."""
        return f"bf16 {self.num_q}/{self.num_kv} of {self.head_dim}, pages of {self.page_size}, {rows} x {context}"


@cache
def _table() -> dict[str, dict[str, float]]:
    return json.loads(TABLE.read_text())["us"] if TABLE.exists() else {}


def bucket_of(number: int, buckets: tuple[int, ...]) -> int | None:
    """The bucket that `number` counts as; None if it is larger than all."""
    return next((bucket for bucket in buckets if bucket >= number), None)


def is_flashinfer_faster(heads: Heads, rows: int, max_context: int) -> bool:
    """Whether FlashInfer is to attend in steps of `rows` rows.

    A captured step serves whatever lengths its rows come to have, up to `max_context` tokens, so FlashInfer must have been the
    faster one at every length up to that. What was not measured is ours.
    """
    row_bucket, last = bucket_of(rows, ROW_BUCKETS), bucket_of(max_context, CONTEXT_BUCKETS)
    if row_bucket is None or last is None:
        return False
    cases = [_table().get(heads.key(row_bucket, context)) for context in CONTEXT_BUCKETS if context <= last]
    return all(us is not None and us[FLASHINFER] < us[OWN] for us in cases)
