"""The shapes of steps that prefill: what is captured, and where a graph pays."""

from __future__ import annotations

from dataclasses import dataclass

# New tokens of a captured step. Denser from 128 on, where multiplications begin to outweigh the reading of the weights, so that
# padding costs time.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
MAX_SQUARE_TOKENS = 512  # where attention of packed rows takes a square of them
# To launch a layer of such a step takes the host so long, and the device reaches this rate meanwhile (7B, prompts of 512 and 2048
# tokens): steps that are shorter than their launches gain by a graph, longer ones only lose by padding.
LAYER_LAUNCHES_S, PREFILL_FLOP_S = 0.38e-3, 650e12
FP8_SPEED = 2.0  # of products of FP8 with FP8, at least; with as many launches, so that longer steps gain
# Rows that decode beside them. Few, for there is a graph of each with each bucket, and such a row costs little.
SINGLE_BUCKETS = (4, 16, 64, 256)
TOKENS_A_PROMPT, LEAST_PROMPTS = 16, 4  # prompts that a bucket has room for: one in so many tokens, and a few at the least
# A captured shape of up to so many times the tokens stands in for one that is not captured, for as many steps.
MOST_STRETCH, MANY_STEPS = 1.5, 32


def buckets_up_to(num_tokens: int) -> tuple[int, ...]:
    """The buckets for up to `num_tokens` new tokens; more than those of the last bucket take none."""
    return tuple(bucket for idx, bucket in enumerate(BUCKETS) if num_tokens > (BUCKETS[idx - 1] if idx else 0))


def tokens_worth_a_graph(layer_elems: int, is_fp8: bool = False) -> int:
    """The most new tokens of a step that a graph makes faster. `layer_elems`: of a layer's matrices, on this rank; `is_fp8`:
    which are multiplied as FP8."""
    border = LAYER_LAUNCHES_S * PREFILL_FLOP_S * (FP8_SPEED if is_fp8 else 1.0) / (2 * layer_elems)
    return max((bucket for bucket in BUCKETS if bucket <= border), default=0)


@dataclass(frozen=True)
class StepShape:
    """A captured step: `num_single` rows of one token that decode, padding included, and behind them `num_tokens` tokens of up to
    `num_prompts` prompts of which nothing is cached, the rest padding. Each row gives the logits of its last token."""

    num_single: int
    num_tokens: int
    num_prompts: int

    @property
    def num_logits(self) -> int:
        return self.num_single + self.num_prompts

    def holds(self, other: StepShape) -> bool:
        """Whether steps of `other` can be padded to this one."""
        is_wide = self.num_single >= other.num_single and self.num_prompts >= other.num_prompts
        return is_wide and self.num_tokens >= other.num_tokens


def prompts_in(bucket: int) -> int:
    return max(LEAST_PROMPTS, bucket // TOKENS_A_PROMPT)
