"""Which prompts cuDNN attends (`kernels/long_attention.py`) and which FlashAttention does, said once a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels.long_attention import LEAST_TOKENS, padded_length, takes_long


class LongPrompts:
    """The choice for the steps of one model, made by its `PrefillStep`. `is_usable`: whether cuDNN's attention is to be had.

    A plan for a padded length takes the host 65 ms, far more than it saves one prompt, and all rows wait meanwhile. So the first
    prompt of a padded length is attended by FlashAttention, and those of later steps by cuDNN, of which the first plans. What is
    counted are steps, not calls: all layers of a step go the same way. All ranks run the same steps, so they choose alike, and
    plan at the same time instead of one after the other. A captured step does not count and is not counted: what is captured is
    to be replayed often, so it takes cuDNN whenever it is long enough. That depends on its shape alone, so the plain run before
    a capture goes the same way, and is what plans.
    """

    def __init__(self, is_usable: bool):
        self._is_usable = is_usable
        self._known: set[int] = set()  # padded lengths of which a step has come

    @property
    def description(self) -> str:
        """In a clause; empty if there is nothing to say."""
        return f"prompts of {LEAST_TOKENS} tokens or more by cuDNN's attention" if self._is_usable else ""

    def takes(self, num_tokens: int) -> bool:
        """Whether cuDNN may attend a prompt of `num_tokens` that is alone."""
        return self._is_usable and num_tokens >= LEAST_TOKENS

    def choose(self, lengths: Iterable[int]) -> frozenset[int]:
        """Those of `lengths` that cuDNN attends in this step; of prompts, or first chunks of prompts, each attended by itself.
        *Order*: to be asked once a step, of all of its lengths."""
        found = {length: padded_length(length) for length in lengths if self.takes(length)}
        chosen = frozenset(length for length, padded in found.items() if padded in self._known)
        self._known.update(found.values())
        return chosen


def open_long_prompts(keys: torch.Tensor, ranks_per_gpu: int) -> LongPrompts:
    """For a model with `keys` `[..., head_dim]` in its cache. Ranks that share a GPU do without: cuDNN asks for memory when it
    plans, which waits for the peers' kernels, and these may wait for this rank."""
    return LongPrompts(takes_long(keys) and ranks_per_gpu == 1)
