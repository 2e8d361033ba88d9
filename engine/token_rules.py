"""What a row's sampling options ask for beyond a temperature, in the form that every rank gets: plain numbers.

Rank 0 makes it of the row's `SamplingParams` when the row comes; the device applies it in `engine/graph/row_rules.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Ints
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from kernels.filter_logits import MAX_BIASES, MAX_FORBIDDEN

_NUM_HEADER, _NUMBERS = 4, "<5d"


@dataclass(frozen=True)
class TokenRules:
    """As in `SamplingParams`, with the filters off for a greedy row. `forbidden_ids`: never chosen before `min_tokens` are."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    forbidden_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, params: SamplingParams, is_greedy: bool, forbidden_ids: tuple[int, ...]) -> TokenRules:
        is_short = params.min_tokens > 0 and bool(forbidden_ids)
        return cls(
            top_k=0 if is_greedy else max(0, params.top_k),
            top_p=1.0 if is_greedy else params.top_p,
            min_p=0.0 if is_greedy else params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=params.logit_bias,
            min_tokens=params.min_tokens if is_short else 0,
            forbidden_ids=forbidden_ids if is_short else (),
        )

    @property
    def is_penalised(self) -> bool:
        """What was said before matters."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def is_small(self) -> bool:
        """The device has room for its lists."""
        return len(self.logit_bias) <= MAX_BIASES and len(self.forbidden_ids) <= MAX_FORBIDDEN

    def is_active(self, num_output: int) -> bool:
        """Whether anything here bears on the choice of the token behind `num_output` chosen ones, or of those after it."""
        is_filtered = self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0
        return is_filtered or self.is_penalised or bool(self.logit_bias) or num_output < self.min_tokens

    def encode(self) -> list[int]:
        """As signed 64-bit integers; `decode` knows where they end."""
        numbers = (self.top_p, self.min_p, self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        ints = [self.top_k, self.min_tokens, len(self.logit_bias), len(self.forbidden_ids)]
        ints += struct.unpack("<5q", struct.pack(_NUMBERS, *numbers))
        for token_id, bias in self.logit_bias:
            ints += (token_id, *struct.unpack("<q", struct.pack("<d", bias)))
        return [*ints, *self.forbidden_ids]

    @classmethod
    def decode(cls, ints: Ints[int], at: int) -> tuple[TokenRules, int]:
        """The rules that begin at `at`, and where they end."""
        top_k, min_tokens, num_biases, num_forbidden = ints[at : at + _NUM_HEADER]
        at += _NUM_HEADER
        numbers = struct.unpack(_NUMBERS, struct.pack("<5q", *ints[at : at + 5]))
        at += 5
        pairs = [(ints[i], struct.unpack("<d", struct.pack("<q", ints[i + 1]))[0]) for i in range(at, at + 2 * num_biases, 2)]
        at += 2 * num_biases
        end = at + num_forbidden
        return cls(top_k, *numbers, tuple(pairs), min_tokens, tuple(ints[at:end])), end


NO_RULES = TokenRules()
