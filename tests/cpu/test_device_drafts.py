"""The kernels of steps with drafts, as torch twins and from their own source, against plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from engine.drafts.ngram import NgramDrafter
from engine.drafts.speculation import DraftRow
from engine.graph.token_ring import NO_TOKEN
from kernels.accept_drafts import NOT_TAKEN, accept_drafts
from kernels.advance_rows import ID_BITS
from kernels.ngram_drafts import ngram_drafts

NAN = float("nan")


def taken(ids: list[int], values: list[float], drafts: list[int]) -> list[int]:
    """What a row takes, token by token."""
    found = []
    for place, (token_id, value) in enumerate(zip(ids, values)):
        found.append(token_id if value == value else NO_TOKEN)
        if value != value or place == len(drafts) or token_id != drafts[place]:
            return found
    raise AssertionError("a row takes no more tokens than it has drafts, and one")


def draw_case(rng: random.Random, rows: int, num_drafts: int) -> tuple[list[list[int]], list[list[float]], list[list[int]]]:
    """Ids of two kinds, so that drafts often hold; now and then nothing to choose from."""
    ids = [[rng.randrange(1, 3) for _ in range(num_drafts + 1)] for _ in range(rows)]
    values = [[NAN if rng.random() < 0.05 else 1.0 for _ in row] for row in ids]
    drafts = [[token_id if rng.random() < 0.8 else 9 for token_id in row[:-1]] for row in ids]
    return ids, values, drafts


@pytest.mark.parametrize("rows, num_drafts", [(1, 1), (5, 4), (16, 8)])
def test_a_row_takes_the_drafts_that_hold_and_one_token_more(rows, num_drafts):
    rng = random.Random(rows)
    for step_number in range(20):
        ids, values, drafts = draw_case(rng, rows, num_drafts)
        positions = [rng.randrange(3, 20) if rng.random() < 0.8 else -1 for _ in range(rows)]
        history = torch.full((rows + 1, 40), 7, dtype=torch.int32)
        step, ring = torch.tensor([step_number]), torch.zeros(4, rows * (num_drafts + 1) + 3, dtype=torch.int64)
        token_ids, device_positions = torch.full((rows,), 5), torch.tensor(positions)
        accept_drafts(
            torch.tensor(ids).flatten(), torch.tensor(values).flatten(), torch.tensor(drafts), token_ids, device_positions,
            history, step, ring,
        )  # fmt: skip
        assert step.item() == step_number + 1 and not ring[torch.arange(4) != step_number % 4].any()
        words = ring[step_number % 4, : rows * (num_drafts + 1)].view(rows, -1)
        assert (words >> ID_BITS == step_number + 1).all()
        assert (history[rows] == 7).all(), "of a row that is not in the step"
        for row in range(rows):
            wanted = taken(ids[row], values[row], drafts[row])
            fields = [int(word) & NOT_TAKEN for word in words[row]]
            assert fields == [token_id + 1 for token_id in wanted] + [NOT_TAKEN] * (num_drafts + 1 - len(wanted))
            if positions[row] < 0:
                assert device_positions[row] == positions[row] and (history[row] == 7).all()
                continue
            first = positions[row] + 1
            assert device_positions[row] == positions[row] + len(wanted)
            assert history[row, first : first + len(wanted)].tolist() == ids[row][: len(wanted)]
            assert (history[row, :first] == 7).all() and (history[row, first + len(wanted) :] == 7).all()
            assert token_ids[row] == ids[row][len(wanted) - 1]


def on_the_host(token_ids: list[int], num_drafts: int) -> list[int]:
    row = DraftRow(0, token_ids, state=None, max_tokens=999, num_wanted=num_drafts)
    return NgramDrafter().propose([row])[0] or [token_ids[-1]] * num_drafts


def test_n_grams_of_the_device_are_those_of_the_host():
    rng = random.Random(1)
    for _ in range(60):
        rows, num_drafts, longest = rng.randint(1, 4), rng.randint(1, 8), rng.choice((2, 9, 60))
        texts = [[rng.randrange(rng.choice((2, 6, 50))) for _ in range(rng.randint(1, longest))] for _ in range(rows)]
        history = torch.full((rows, 64), -1, dtype=torch.int32)
        for row, text in enumerate(texts):
            history[row, : len(text)] = torch.tensor(text)
        positions = torch.tensor([len(text) - 1 for text in texts])
        positions[0] = -1 if rows > 1 and rng.random() < 0.3 else positions[0]
        found = ngram_drafts(history, positions, torch.full((rows, num_drafts), -5)).tolist()
        for row, text in enumerate(texts):
            assert found[row] == ([0] * num_drafts if positions[row] < 0 else on_the_host(text, num_drafts)), (text, row)
