"""One sampled continuation of one row, as every rank sees it: token ids and where their keys and values lie."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sequence:
    """`token_ids` is prompt and output; `num_computed` of them have keys and values in `pages`.

    `max_tokens_total` bounds prompt and output together. `wants_prompt_logits` asks for logits at every prompt position and
    therefore never skips computed ones. `after` is a sequence with the same prompt that must be prefilled first, so that this
    one finds the prompt's pages.
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

    @property
    def num_pending(self) -> int:
        """Tokens known but not computed: 1 in steady decode, more during prefill or after a preemption."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= self.num_prompt

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt
