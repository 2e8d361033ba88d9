"""What the engine gives back for one sample of one row. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural-log probability; `-inf` and NaN are possible here and become null in the output.

    `token`: its text, U+FFFD where its bytes are part of a character. `token_bytes`: its bytes, when known. `top`:
    the most likely tokens at this place, best first (each without a `top` of its own).
    """

    token: str
    token_id: int
    logprob: float
    token_bytes: bytes | None = None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    `token_ids`: all sampled ids, up to and including the one that completed a stop string. `finish_reason`: `stop`,
    `length`, or `error` with the sentence in `stop_reason`. `stop_reason`: the stop string or token id that matched, None
    otherwise. `logprobs`: one entry per token id. `prompt_logprobs`: one per prompt token, None for the first.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    seed: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
