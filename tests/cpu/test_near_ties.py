"""The judge of near-ties, and the rows it is asked about, before a GPU sees them: twins of captured steps in fp32 and bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from kernels.split_grid import SplitGrid, split_grid
from tests.cpu.engine_harness import answer, twin_bursts
from tests.near_ties import AMPLIFICATION, MOST_TIES, Reference, Tally
from tests.token_cases import BATCHES, MAX_MODEL_LEN, PAGE_LENGTHS, Rows, page_cases, save_mild_model, split_borders, split_cases


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_mild_model(tmp_path_factory.mktemp("mild"))


@pytest.fixture(scope="module")
def reference(folder):
    return Reference(folder)


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows.draw(PAGE_LENGTHS, 40)


@pytest.fixture(scope="module")
def tokens(folder, rows) -> list[list[int]]:
    return answer(folder, rows.requests).token_ids


def test_fp32_steps_choose_the_references_tokens(folder, reference, rows, tokens):
    found = answer(folder, rows.requests, bursts=twin_bursts).token_ids
    tally = reference.compare(rows.prompts, None, found, torch.float32)
    assert found == tokens and tally == Tally(len(rows.prompts), 40 * len(rows.prompts)), tally
    assert sum(len(set(ids)) > 20 for ids in found) > len(found) // 2, "answers that loop compare little"


def test_bf16_steps_part_at_near_ties(folder, reference):
    rows = Rows.draw(PAGE_LENGTHS[2:8], 30)
    runs = [answer(folder, rows.requests, dtype="bfloat16", bursts=bursts).token_ids for bursts in (None, twin_bursts)]
    for wanted, found in ((None, runs[0]), (None, runs[1]), runs):
        tally = reference.compare(rows.prompts, wanted, found, torch.bfloat16)
        assert 0 < tally.tie_rate < MOST_TIES and f"{len(tally.near_ties)} part at near-ties" in str(tally)


def test_another_token_is_no_near_tie(reference, rows, tokens):
    """At every place the next likeliest token, where it is far enough behind, and any other one almost everywhere."""
    prompt, ids = rows.prompts[0], tokens[0]
    logits = reference.logits(prompt, ids)
    bounds = torch.tensor([reference.bound(row, torch.bfloat16) for row in logits])
    assert ((bounds / logits.std(-1) > 0.05) & (bounds / logits.std(-1) < 0.2)).all()
    best, second = logits.topk(2).values.T
    is_far = best - second > bounds
    assert is_far.float().mean() > 0.7
    for at, other in enumerate(logits.topk(2).indices[:, 1].tolist()):
        changed = [*ids[:at], other, *ids[at + 1 :]]
        difference = reference.first_difference(prompt, ids, changed, torch.bfloat16)
        assert (difference.at, difference.wanted, difference.found) == (at, ids[at], other)
        assert difference.is_near_tie != bool(is_far[at])
        if is_far[at]:
            with pytest.raises(AssertionError, match=f"row 0 of {len(prompt)} tokens: Difference.at={at}"):
                reference.compare([prompt], [ids], [changed], torch.bfloat16)
        assert not replace(difference, bound=reference.bound(logits[at], torch.float32)).is_near_tie
    with pytest.raises(AssertionError, match="39 tokens instead of 40"):
        reference.compare([prompt], [ids], [ids[:-1]], torch.bfloat16)


@torch.no_grad()
def test_the_bound_is_what_rounding_does(folder, reference):
    """transformers in bf16 against itself: the error of a difference of logits is what the bound takes it for."""
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    (ids,) = Rows.draw([600], 1).prompts
    right = reference.model(torch.tensor([ids])).logits[0]
    error = half(torch.tensor([ids])).logits[0].float() - right
    deviations = torch.tensor([reference.bound(row, torch.bfloat16) for row in right]) / (4.0 * AMPLIFICATION)
    amplification = 2**0.5 * error.std(-1) / deviations
    assert AMPLIFICATION / 4 < amplification.mean() < AMPLIFICATION, amplification.mean()


def test_cases_meet_every_border():
    grids = [split_grid(batch, 2, 132, MAX_MODEL_LEN) for batch in BATCHES]
    assert len(set(grids)) > 3, "the batches are to differ in how rows are dealt out"
    assert split_borders(SplitGrid(4, 3, num_warps=8, alone_tiles=4, shared_tiles=2)) == {16, 128, 512, 2048, 3072}
    assert split_borders(SplitGrid(2, 1, num_warps=4)) == {16, 64, 128, 512}
    for cases, batches in ((list(split_cases(132)), BATCHES), (list(page_cases()), BATCHES)):
        assert {len(rows.prompts) for rows in cases} == set(batches)
        for rows in cases:
            assert all(len(prompt) + rows.num_tokens <= MAX_MODEL_LEN for prompt in rows.prompts)
    for batch, grid in zip(BATCHES, grids):
        spans = [(len(prompt), len(prompt) + rows.num_tokens) for rows in split_cases(132) if len(rows.prompts) == batch
                 for prompt in rows.prompts]  # fmt: skip
        for border in split_borders(grid) | {128, 512, 1024, 2048, 4096}:
            assert any(first < border - 1 and border + 2 < last for first, last in spans), (batch, border)
