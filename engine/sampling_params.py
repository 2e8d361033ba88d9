"""How one row wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Options of one row. `None` means "not asked for"; `max_tokens=None` means the rest of the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as transformers does
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # number of alternatives beside the chosen token
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
