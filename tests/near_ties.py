"""Whether two answers part at a near-tie: judged by transformers in fp32, at the very prefix where they part.

A step in another order of operations rounds differently, so the likeliest two tokens may change places where their logits
differ by less than rounding moves them. What rounding moves: a logit is the end of a chain of roundings, each of which adds an
error of at most one unit (2**-9 in bf16, 2**-24 in fp32) of what is rounded, uniform, so of unit / sqrt(3) at the root of the
mean square. Taken as independent, K of them add up to unit * sqrt(K / 3) of the spread of the logits, and the difference of two
logits to sqrt(2) times that; what later layers make of an early error is a factor. Four such standard deviations are the bound.
In bf16 that is a twelfth of the spread for the random models of 3 layers, and an eighth for SmolLM2 with its 30.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
# Roundings a layer: two norms, the products qkv, o, gate and up, down, rotation, weights of the attention and their sum, silu
# times up, two residuals. At the end: the norm and the head.
ROUNDINGS_A_LAYER, ROUNDINGS_AT_THE_END = 12, 2
STANDARD_DEVIATIONS = 4.0
# Of errors on their way, by transformers in bf16 against itself in fp32: 1.0 to 1.9 in the random models of the tests.
AMPLIFICATION = 2.0
# Of tokens in bf16: more would say that something but rounding is at work. For transformers in bf16 against fp32 it is 2 to 4 %.
MOST_TIES = 0.07


@dataclass(frozen=True)
class Difference:
    """Token number `at` of an answer: `wanted` and `found` are ids, `gap` that between their logits in fp32, at most `bound` for
    a near-tie."""

    at: int
    wanted: int
    found: int
    gap: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= self.bound


@dataclass
class Tally:
    """How answers compare, row by row: `near_ties` are the first differences of the rows that are not identical."""

    num_rows: int = 0
    num_tokens: int = 0
    near_ties: list[Difference] = field(default_factory=list)

    @property
    def tie_rate(self) -> float:
        """Near-ties at which rows part, a token compared."""
        return len(self.near_ties) / max(1, self.num_tokens + len(self.near_ties))

    @property
    def num_identical(self) -> int:
        return self.num_rows - len(self.near_ties)

    def __iadd__(self, other: Tally) -> Tally:
        self.num_rows += other.num_rows
        self.num_tokens += other.num_tokens
        self.near_ties += other.near_ties
        return self

    def __str__(self) -> str:
        worst = max(self.near_ties, key=lambda each: each.gap, default=None)
        text = f"{self.num_rows} rows, {self.num_identical} identical, {len(self.near_ties)} part at near-ties"
        text += f"; {self.num_tokens} tokens up to there"
        return text if worst is None else f"{text}; widest gap {worst.gap:.2g} of {worst.bound:.2g}"


class Reference:
    """transformers' forward pass in fp32 over the model in `folder`, whose weights must be exact in every dtype judged.

    `amplification`: what its layers make of errors on their way.
    """

    def __init__(self, folder: Path, device: str | torch.device = "cpu", amplification: float = AMPLIFICATION):
        self.amplification = amplification
        self.model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").float().eval().to(device)

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """fp32 `[len(answer), vocab]`: row i is what token i of `answer` is chosen from, after the tokens before it."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self.model.device)
        return self.model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0]

    def greedy(self, prompt: Sequence[int], answer: Sequence[int]) -> list[int]:
        """The likeliest token at each place of `answer`, after the tokens before it. If these are the answer's own, it is what
        the reference would answer itself; and if not, the two agree up to the first that differs."""
        return self.logits(prompt, answer).argmax(-1).tolist()

    def bound(self, logits: torch.Tensor, dtype: torch.dtype) -> float:
        """The widest near-tie in `logits` `[vocab]` for steps in `dtype`."""
        num_roundings = ROUNDINGS_A_LAYER * self.model.config.num_hidden_layers + ROUNDINGS_AT_THE_END
        deviation = self.amplification * UNIT[dtype] * math.sqrt(2 * num_roundings / 3) * float(logits.std())
        return STANDARD_DEVIATIONS * deviation

    def first_difference(
        self, prompt: Sequence[int], wanted: Sequence[int], found: Sequence[int], dtype: torch.dtype
    ) -> Difference | None:
        """Where two answers to `prompt` part, in steps of `dtype`; None if they are equal. *Raises* `AssertionError` if one is
        longer than the other."""
        assert len(wanted) == len(found), f"{len(found)} tokens instead of {len(wanted)}"
        at = next((i for i, (one, other) in enumerate(zip(wanted, found)) if one != other), None)
        if at is None:
            return None
        last = self.logits(prompt, found[: at + 1])[-1]
        gap = abs(float(last[wanted[at]] - last[found[at]]))
        return Difference(at, wanted[at], found[at], gap, self.bound(last, dtype))

    def compare(
        self,
        prompts: Sequence[Sequence[int]],
        wanted: Sequence[Sequence[int]] | None,
        found: Sequence[Sequence[int]],
        dtype: torch.dtype,
    ) -> Tally:
        """Judge answers row by row. `wanted`: None for the reference's own.

        *Raises* `AssertionError` naming the first row that parts at anything but a near-tie.
        """
        assert len(found) == len(prompts) and (wanted is None or len(wanted) == len(prompts))
        tally = Tally()
        for row, (prompt, ids) in enumerate(zip(prompts, found)):
            right = self.greedy(prompt, ids) if wanted is None else wanted[row]
            difference = self.first_difference(prompt, right, ids, dtype)
            assert difference is None or difference.is_near_tie, f"row {row} of {len(prompt)} tokens: {difference}"
            tally.num_rows += 1
            tally.num_tokens += len(ids) if difference is None else difference.at
            tally.near_ties += [] if difference is None else [difference]
        return tally
