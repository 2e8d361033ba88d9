"""The model and the rows on which tokens of fast steps are compared with the eager step's and transformers'."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import torch

from engine.request import Request
from kernels.split_grid import TILE_KEYS, SplitGrid, split_grid
from tests.cpu.engine_harness import request
from tests.cpu.tiny import make_model, save_model

VOCAB = 1009  # odd, and larger than a CTA takes at once
KV_HEADS = 2
MAX_MODEL_LEN = 4224
BATCHES = (1, 2, 3, 8, 17, 64)
# Prompts that end on both sides of a border between pages of 16 tokens; 40 tokens more meet two or three more.
PAGE_LENGTHS = (15, 16, 17, 31, 32, 33, 1, 2, 47)
PAGE_TOKENS = 40
SPLIT_BORDERS = (128, 512, 1024, 2048, 4096)
BEFORE_A_BORDER, SPLIT_TOKENS = 3, 8  # a prompt ends 3 tokens before a border, the answer 5 behind it


@dataclass(frozen=True)
class Rows:
    """Prompts that are answered together, greedily, with `num_tokens` tokens each."""

    prompts: list[list[int]]
    num_tokens: int

    @property
    def requests(self) -> list[Request]:
        return [request(prompt, idx, max_tokens=self.num_tokens) for idx, prompt in enumerate(self.prompts)]

    @classmethod
    def draw(cls, lengths: Sequence[int], num_tokens: int, seed: int = 0) -> Rows:
        rng = random.Random(seed)
        return cls([[rng.randrange(VOCAB) for _ in range(length)] for length in lengths], num_tokens)


def save_mild_model(folder: Path, num_layers: int = 3, **shape: object) -> Path:
    """A random Qwen2 whose weights are exact in bf16.

    The queries and keys of `make_model` make attention a choice of one token, where a change in the last bit changes everything.
    These spread it over tens of tokens, so that rounding is not blown up, a lost tile of 16 keys among 2000 changes the answer
    within about a dozen tokens, and answers do not fall into a loop.
    """
    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 320, "num_key_value_heads": KV_HEADS,
             "num_hidden_layers": num_layers, "max_position_embeddings": 8192, **shape}  # fmt: skip
    model = make_model("qwen2", **shape)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.7 if ".mlp." in name else 1.5
            if "embed_tokens" in name:
                weight.normal_(0.0, 1.0, generator=generator)
            elif name.endswith("proj.weight"):
                weight.normal_(0.0, scale * weight.shape[1] ** -0.5, generator=generator)
            weight.copy_(weight.bfloat16())
    return save_model(model, folder)


def page_cases() -> Iterator[Rows]:
    """Every batch, with every length of `PAGE_LENGTHS` in it."""
    yield from _cases(PAGE_LENGTHS, PAGE_TOKENS)


def split_cases(num_sms: int, local_kv_heads: int = KV_HEADS) -> Iterator[Rows]:
    """Every batch, with rows that cross every border at which decode attention deals a row out in another way."""
    for batch in BATCHES:
        borders = {*SPLIT_BORDERS, *split_borders(split_grid(batch, local_kv_heads, num_sms, MAX_MODEL_LEN))}
        yield from _cases([border - BEFORE_A_BORDER for border in sorted(borders)], SPLIT_TOKENS, (batch,))


def split_borders(grid: SplitGrid) -> set[int]:
    """Numbers of keys, up to `MAX_MODEL_LEN`, at which a warp, a CTA or a cluster gets its first tile, or its last before a row
    takes one cluster more."""
    cta = TILE_KEYS * grid.num_warps
    cluster = cta * grid.cluster
    shared = {num * grid.shared_tiles * cluster for num in range(2, grid.num_clusters + 1)}
    borders = {TILE_KEYS, cta, cluster, grid.alone_tiles * cluster, *shared}
    return {border for border in borders if border + SPLIT_TOKENS < MAX_MODEL_LEN}


def _cases(lengths: Sequence[int], num_tokens: int, batches: Sequence[int] = BATCHES) -> Iterator[Rows]:
    for batch in batches:
        num_runs = -(-len(lengths) // batch)
        dealt = cycle(lengths)
        for run in range(num_runs):
            yield Rows.draw(list(islice(dealt, batch)), num_tokens, seed=1000 * batch + run)
