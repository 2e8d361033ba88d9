"""What a row gets back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenLogprob:
    """One token with its natural log-probability under the unfiltered model, and the likeliest alternatives, best first.

    `token` is the token's own text; a byte-level token that is not whole UTF-8 shows U+FFFD there. `logprob` may be -inf.
    """

    token: str
    token_id: int
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One sampled continuation.

    `token_ids` run up to and include the token that completed a stop string or was a stop id; `text` ends before it.
    `finish_reason`: `stop`, `length` or `error`. `stop_reason`: the string or id that matched, else None.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None = None
    seed: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
