"""How one row wants its tokens chosen. Plain data; `engine.options` checks the values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingParams:
    """Options of one row. `None` means "not asked for"; `max_tokens=None` means the rest of the context.

    Values built by hand are not checked here: `engine.options.check_params` applies the ranges that rows of a file get.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0  # 0 keeps only the most likely token
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as transformers does
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0  # over the output only
    seed: int | None = None  # signed 64 bits; negative values are seeds like any other
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None  # number of alternatives beside the chosen token
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias), by rising id
    include_stop_str: bool = False
    skip_special_tokens: bool = True
