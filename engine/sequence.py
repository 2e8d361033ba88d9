"""One sampled continuation of one row, as every rank sees it: token ids and where their keys and values lie."""

from __future__ import annotations

from collections.abc import Sequence as Ints
from dataclasses import dataclass, field

from engine.token_rules import NO_RULES, TokenRules

NO_KEY = bytes(16)
NO_LIMIT = 1 << 31


@dataclass(eq=False)
class Sequence:
    """`token_ids` is prompt and output; `num_computed` of them have keys and values in `pages`.

    `max_tokens_total` bounds prompt and output together, `max_output` is how much output is asked for. `wants_prompt_logits`
    asks for logits at every prompt position and therefore never skips computed ones. `after` is a sequence with the same prompt
    that must be prefilled first, so that this one finds the prompt's pages. `drafted` are guesses at the tokens that come next:
    their keys and values follow those of the `num_computed` tokens in the cache, but nobody has chosen them yet. `temperature`
    and `stream_key` are what the device needs to choose a token itself: 0 takes the likeliest, anything else draws with the
    noise of that stream (`engine.sampler`); `rules` is what else bears on the choice. `num_draft_computed`: of how many tokens a
    draft model on the device has keys and values, in the same pages of its own cache. `num_ahead`: tokens behind `token_ids` that
    steps choose which have been launched and not been read: they count as tokens, and only the device knows them.
    """

    seq_id: int
    token_ids: list[int]
    num_prompt: int
    max_tokens_total: int
    wants_prompt_logits: bool = False
    after: int | None = None
    num_computed: int = 0
    num_prefix_reused: int = 0
    num_remembered_pages: int = 0
    pages: list[int] = field(default_factory=list)
    drafted: tuple[int, ...] = ()
    temperature: float = 0.0
    stream_key: bytes = NO_KEY
    rules: TokenRules = NO_RULES
    num_draft_computed: int = 0
    max_output: int = NO_LIMIT
    num_ahead: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_ahead

    @property
    def num_pending(self) -> int:
        """Tokens chosen but not computed: 1 in steady decode, more during prefill or after a preemption."""
        return self.num_tokens - self.num_computed

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= self.num_prompt

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    def read_ahead(self, token_ids: Ints[int]) -> Ints[int]:
        """Take in those of `token_ids` that `num_ahead` counts already. Returns the others."""
        count = min(len(token_ids), self.num_ahead)
        self.token_ids += token_ids[:count]
        self.num_ahead -= count
        return token_ids[count:]

    def append(self, token_ids: Ints[int]) -> None:
        """Take in chosen tokens, at least one, in order.

        As far as they are what was drafted they are computed already; all else that was drafted is forgotten, by length only:
        what the cache holds of it is written over. The last token stays pending, since its logits are what comes next.
        """
        for token_id, drafted_id in zip(token_ids[:-1], self.drafted):
            if token_id != drafted_id:
                break
            self.num_computed += 1
        self.drafted = ()
        self.token_ids += token_ids
