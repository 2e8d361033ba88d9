"""Bursts of rows with filters and penalties say what the one-step path says (fp32, TP 1 to 3)."""

from __future__ import annotations

import random

import pytest
import torch

from engine.graph.row_rules import NOBODY, RowRules
from engine.sequence import Sequence
from engine.token_rules import TokenRules
from kernels.filter_logits import FREE_FROM, SEEN_SLOT, TOP_K
from tests.cpu.engine_harness import CPU, answer, request, twin_bursts
from tests.cpu.test_burst import VOCAB, compare, model, prompts  # noqa: F401

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
SINGLE = (
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"logit_bias": ((5, 2.0), (77, -100.0))},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "repetition_penalty": 0.8, "frequency_penalty": -0.5},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "presence_penalty": 0.3, "logit_bias": ((3, 1.0),)},
    QWEN,
)


@pytest.mark.parametrize("options", SINGLE, ids=lambda options: "-".join(options))
def test_each_option_alone(model, options):  # noqa: F811
    run, plain, recorder = compare(model, lambda: [request(text, idx, **options) for idx, text in enumerate(prompts(2))])
    assert recorder.num_bursts > 0 and run.stats.num_waits == 0 < plain.stats.num_waits
    without = {name: value for name, value in options.items() if name == "temperature"}
    assert run.token_ids != answer(model, [request(text, idx, **without) for idx, text in enumerate(prompts(2))]).token_ids


@pytest.mark.parametrize("size", (1, 2, 3))
def test_rows_of_all_kinds_that_come_and_end(model, size):  # noqa: F811
    """More rows than fit at once, so that rows move, leave, and join in mid-course; some have no rules at all."""
    rng = random.Random(size)
    kinds = [{}, {"temperature": 1.0}, *SINGLE]
    plan = [(text, rng.choice(kinds), rng.randint(1, 30)) for text in prompts(14, seed=size)]
    rows = lambda: [request(text, idx, max_tokens=count, **kind) for idx, (text, kind, count) in enumerate(plan)]  # noqa: E731
    run, _, recorder = compare(model, rows, size, max_batch=4)
    assert recorder.num_bursts > 3 and recorder.num_launched > 30


@pytest.mark.parametrize("size", (1, 2))
def test_minimum_lengths_samples_and_stops(model, size):  # noqa: F811
    texts = prompts(3, seed=7)
    free = answer(model, [request(text, idx, max_tokens=40, **QWEN) for idx, text in enumerate(texts)]).token_ids

    def rows():
        return [
            request(texts[0], 0, max_tokens=40, min_tokens=10, stop_ids=free[0][3:5], **QWEN),
            request(texts[1], 1, max_tokens=30, min_tokens=12, stop_ids=range(0, VOCAB, 3)),
            request(texts[2], 2, n=3, max_tokens=25, **QWEN),
        ]

    run, _, recorder = compare(model, rows, size)
    assert all(len(ids) >= 10 for ids in run.token_ids[:2]) and recorder.num_launched > 20
    assert not set(run.token_ids[1][:11]) & set(range(0, VOCAB, 3)), "a stop id came before the minimum length"
    assert len({completion.token_ids for completion in run.answers[2]}) == 3


def test_counts_survive_a_row_that_needs_rank_0_and_a_page_shortage(model):  # noqa: F811
    penalised = {"repetition_penalty": 1.2, "frequency_penalty": 0.4}
    text = prompts(4, seed=5)
    rows = lambda: [  # noqa: E731
        request(text[0], max_tokens=50, **penalised),
        request(text[1], max_tokens=9, logprobs=0),
        request(text[2], max_tokens=50, temperature=1.0, **penalised),
        request(text[3], max_tokens=50, **QWEN),
    ]
    page = 2 * 2 * 16 * 16 * 4 * 2
    for settings in ({"max_batch": 2}, {"kv_memory_bytes": 10 * page, "max_model_len": 128}):
        run, _, recorder = compare(model, rows, **settings)
        assert recorder.num_bursts > 1 and run.stats.num_waits >= 8
    assert run.num_preemptions > 0


def sequence(seq_id: int, prompt: list[int], output: list[int], **rules) -> Sequence:
    return Sequence(seq_id, prompt + output, len(prompt), 99, rules=TokenRules(**rules))


def test_slots_hold_what_rows_have_said():
    rules = RowRules(3, 10, CPU)
    said = sequence(0, [1, 1, 2], [5, 5, 2, 7], presence_penalty=1.0)
    silent = sequence(1, [4], [6], top_k=3, min_tokens=4, forbidden_ids=(9,))
    rules.begin([silent, said])
    options = rules.options(3)
    slot = int(options.rules[1, SEEN_SLOT])
    assert int(options.rules[0, SEEN_SLOT]) == int(options.rules[2, SEEN_SLOT]) == NOBODY != slot
    assert options.rules[:, TOP_K].tolist() == [3, 0, 0] and int(options.rules[0, FREE_FROM]) == 4
    assert options.seen[slot].tolist() == [0, 1, 3, 0, 0, 4, 0, 0, 0, 0], "the last token is for the next step to count"
    options.seen[slot, 7] += 2  # by that step
    rules.advance(1)
    said.token_ids += [8, 3, 3]  # chosen by that step, and two more by rank 0
    rules.begin([said])
    assert int(options.rules[0, SEEN_SLOT]) == slot
    assert options.seen[slot].tolist() == [0, 1, 3, 2, 0, 4, 0, 2, 2, 0]
    assert options.forbidden_ids.max() == -1
    others = [sequence(idx, [idx], [0], presence_penalty=1.0) for idx in (2, 3, 4)]
    rules.begin(others)  # three slots for three rows: the first one's is free again, and empty
    slots = options.rules[:, SEEN_SLOT].tolist()
    assert sorted(slots) == [1, 2, 3]
    assert [options.seen[slot].nonzero().flatten().tolist() for slot in slots] == [[2], [3], [4]]


def test_a_plain_burst_makes_no_room_for_rules(model):  # noqa: F811
    backends = []

    def bursts(replica):
        backends.append(twin_bursts(replica))
        return backends[-1]

    answer(model, [request([1, 2, 3], temperature=1.0)], bursts=bursts)
    assert backends[0].state._rules is None
    answer(model, [request([1, 2, 3], temperature=1.0, top_k=5)], bursts=bursts)
    assert torch.is_tensor(backends[1].state._rules.options(1).seen)
