"""Drafters that know too much or nothing, for tests of speculation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from engine.drafts.depth import FixedDepth
from engine.drafts.model import ModelDrafter
from engine.drafts.speculation import DraftRow, Speculation
from engine.graph.row_state import SpeculativeRows
from engine.pages import PagePool
from engine.scheduler import Limits
from tests.cpu.engine_harness import CPU, ScriptedBackend


class OracleDrafter:
    """Knows the answers: proposes the right token with probability `p`, else a wrong one and noise after it.

    `answers`: prompt and output of every row; rows are recognised by what they begin with. `log` keeps what was proposed.
    """

    def __init__(self, answers: Sequence[Sequence[int]], p: float = 1.0, num_ids: int = 131):
        self._answers, self._p, self._num_ids = [list(answer) for answer in answers], p, num_ids
        self._rng = random.Random(7)
        self.log: list[tuple[list[int], list[int]]] = []
        self.dropped: list[int] = []

    def propose(self, rows: list[DraftRow]) -> list[list[int]]:
        return [self._propose(row) for row in rows]

    def drop(self, seq_id: int) -> None:
        self.dropped.append(seq_id)

    def _propose(self, row: DraftRow) -> list[int]:
        known = len(row.token_ids)
        answer = next(answer for answer in self._answers if answer[:known] == row.token_ids)
        ids = []
        for offset in range(row.num_wanted):
            right = answer[known + offset] if known + offset < len(answer) else 0
            ids.append(right if self._rng.random() < self._p else (right + self._rng.randrange(1, 9)) % self._num_ids)
        self.log.append((list(row.token_ids), ids))
        return ids


class DeviceOracle:
    """`DeviceDrafter` that proposes the right token with probability `p`, else another one. `answers`: prompt and output of every
    row; rows are recognised by what they begin with, and behind the end of an answer nothing is right."""

    description = "an oracle"

    def __init__(self, answers: Sequence[Sequence[int]], p: float, num_ids: int = 131):
        self._answers, self._p, self._num_ids = [list(answer) for answer in answers], p, num_ids
        self._rng, self._rows = random.Random(7), []

    def catch_up(self, sequences) -> None:
        self._rows = [
            next((answer for answer in self._answers if answer[: len(row.token_ids)] == row.token_ids), []) for row in sequences
        ]

    def note_end(self, sequences) -> None:
        pass

    def note_launch(self) -> None:
        pass

    def propose(self, rows: SpeculativeRows, num_drafts: int) -> torch.Tensor:
        return torch.tensor([
            [self._guess(answer, position + 1 + place) for place in range(num_drafts)]
            for answer, position in zip(self._rows, rows.rows.positions.tolist())
        ])  # fmt: skip

    def _guess(self, answer: list[int], place: int) -> int:
        is_right = place < len(answer) and self._rng.random() < self._p
        return answer[place] if is_right else (answer[place] + 1 if place < len(answer) else 0) % self._num_ids


def oracle(requests, token_ids, p: float = 1.0, num_drafts: int = 4, num_ids: int = 131) -> Speculation:
    """Speculation that knows that `requests` will say `token_ids`."""
    answers = [[*request.prompt_ids, *tokens] for request, tokens in zip(requests, token_ids)]
    return Speculation(OracleDrafter(answers, p, num_ids), FixedDepth(num_drafts))


def scripted_model(script: Callable, vocab: int, num_drafts: int, num_pages: int = 64, page_size: int = 4) -> Speculation:
    """A draft model whose logits are a script's (see `ScriptedBackend`)."""
    limits = Limits(8, 64, num_pages * page_size)
    drafter = ModelDrafter(ScriptedBackend(script, vocab), PagePool(num_pages, page_size), limits, vocab, vocab, CPU)
    return Speculation(drafter, FixedDepth(num_drafts))
