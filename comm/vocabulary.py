"""Arg-max and draw over a vocabulary split over ranks, plainly: the torch twin of `comm/cuda/argmax_lamport.cu`.

Works on one rank's part and on the candidates of all ranks in turn, the way the kernels do, and on any device. It has no peers:
who holds all parts can compute what the ranks together would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.gumbel import gumbel_noise


@dataclass(frozen=True)
class Best:
    """One candidate a row: `scores` fp64, `ids` int64, `values` fp32 (the ids' logits), each `[rows]`.

    A rank without valid columns has ids -1, and scores below every number's.
    """

    scores: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class DrawOptions:
    """How each row draws; equal on all ranks.

    `temperatures` fp64 `[rows]`, 0 for the highest logit; `starts` int64 `[rows, window]`, where the noise of a row begins, by
    position modulo `window` (so a host that knows the next positions can fill them in ahead, and the positions advance on the
    GPU); `positions` int64 `[rows]`, None for zeros.
    """

    temperatures: torch.Tensor
    starts: torch.Tensor
    positions: torch.Tensor | None = None

    def starts_now(self) -> torch.Tensor:
        """`[rows]`"""
        if self.positions is None:
            return self.starts[:, 0]
        return self.starts.gather(1, (self.positions % self.starts.shape[1])[:, None])[:, 0]


def local_best(logits: torch.Tensor, first_id: int, num_valid: int, options: DrawOptions | None = None) -> Best:
    """The best of one rank's `logits` `[rows, local_vocab]`: columns [0, num_valid), of which column 0 is id `first_id`.

    Without `options`, the highest logit. With them, the highest logit / temperature + Gumbel noise, in fp64.
    """
    values = logits[:, :num_valid].float()
    rows = values.shape[0]
    if num_valid == 0:
        nothing = torch.full((rows,), -1, dtype=torch.int64, device=logits.device)
        return Best(torch.full_like(nothing, -torch.inf, dtype=torch.float64), nothing, torch.zeros_like(nothing).float())
    scores = values.double()
    if options is not None:
        ids = torch.arange(first_id, first_id + num_valid, device=logits.device)
        temperatures = options.temperatures[:, None]
        drawn = scores / temperatures + gumbel_noise(options.starts_now()[:, None], ids)
        scores = torch.where(temperatures > 0, drawn, scores)
    columns = _first_highest(scores)
    pick = columns[:, None]
    return Best(scores.gather(1, pick)[:, 0], columns + first_id, values.gather(1, pick)[:, 0])


def best_of_ranks(parts: Sequence[Best]) -> Best:
    """What every rank ends with: the highest score, the lowest id among equals, NaN above everything."""
    scores = torch.stack([part.scores for part in parts], 1)
    ids = torch.stack([part.ids for part in parts], 1)
    # A rank that has no id loses even to an infinity below zero.
    scores = torch.where(ids < 0, -torch.inf, scores)
    order = torch.where(ids < 0, torch.iinfo(torch.int64).max, ids).argsort(1)
    pick = order.gather(1, _first_highest(scores.gather(1, order))[:, None])
    values = torch.stack([part.values for part in parts], 1)
    return Best(scores.gather(1, pick)[:, 0], ids.gather(1, pick)[:, 0], values.gather(1, pick)[:, 0])


def _first_highest(scores: torch.Tensor) -> torch.Tensor:
    """Column of the first maximum of each row; of the first NaN, if there is one. Not left to a library's tie-breaking."""
    is_nan = scores.isnan()
    highest = torch.where(is_nan, -torch.inf, scores).amax(1, keepdim=True)
    is_best = torch.where(is_nan.any(1, keepdim=True), is_nan, scores == highest)
    columns = torch.arange(scores.shape[1], device=scores.device)
    return torch.where(is_best, columns, scores.shape[1]).amin(1)
