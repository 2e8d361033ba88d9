"""What may be accepted, where a row ends, and when a row drafts, with scripted models."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine.byte_text import ByteText
from engine.drafts.depth import FixedDepth
from engine.drafts.ngram import LONGEST, NgramDrafter
from engine.drafts.speculation import HISTORY_PROPOSALS, POOR_INTERVAL_STEPS, DraftRow, Speculation
from engine.sampler import SamplerState
from engine.sampling_params import SamplingParams
from engine.text import Text
from engine.token_rules import TokenRules
from tests.cpu.drafters import oracle, scripted_model
from tests.cpu.engine_harness import answer_scripted, request
from tests.cpu.test_generation import prompts
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer
from tests.sampling_law import excess, filtered


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return Text.load(build_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def law(*probabilities: float):
    """A model that says the same at every place."""
    logits = torch.tensor(probabilities, dtype=torch.float64).log().float()
    return lambda token_id, position: logits


# -- case 100: the acceptance rule -----------------------------------------------------------------------------------


def test_a_draft_the_target_likes_more_than_the_draft_did_is_still_not_its_choice():
    """Temperature 0: target a 0.35, b 0.45; draft a 0.25, its best. min(1, p/q) is 1 for a; the answer is b."""
    speculation = scripted_model(law(0.25, 0.2, 0.2, 0.2, 0.15), 5, num_drafts=2)
    run = answer_scripted(law(0.35, 0.45, 0.1, 0.05, 0.05), [request([4], max_tokens=6)], ByteText(5), speculation=speculation)
    assert run.token_ids == [[1] * 6]
    assert run.drafts.num_proposed >= 5 and run.drafts.num_accepted == 0


TARGET = torch.tensor(
    [[0.4, 0.3, 0.2, 0.06, 0.04], [0.1, 0.2, 0.3, 0.15, 0.25], [0.25, 0.3, 0.05, 0.3, 0.1], [0.5, 0.1, 0.2, 0.1, 0.1], [0.2] * 5]
).double()
DRAFT = torch.tensor(
    [[0.3, 0.4, 0.2, 0.06, 0.04], [0.2, 0.1, 0.3, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2, 0.1], [0.4, 0.2, 0.2, 0.1, 0.1], [0.2] * 5]
).double()


def markov(table: torch.Tensor):
    logits = table.log().float()
    return lambda token_id, position: logits[token_id]


FILTERS = [
    {},
    {"temperature": 0.6},
    {"top_k": 3},
    {"top_p": 0.65},
    {"min_p": 0.4},
    {"logit_bias": ((3, 1.5), (0, -1.0))},
    {"temperature": 1.4, "top_k": 4, "top_p": 0.9},
]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_the_law_of_the_text_is_the_targets(options):
    """Two tokens of 800 rows, the second verified behind a draft, against the law computed from the table (5-token toy)."""
    num_rows, options = 800, {"temperature": 1.0, **options}
    items = [request([0], row_key=key, max_tokens=4, **options) for key in range(num_rows)]
    speculation = scripted_model(markov(DRAFT), 5, num_drafts=2)
    run = answer_scripted(markov(TARGET), items, ByteText(5), speculation=speculation)
    assert run.drafts.num_accepted > 200 and run.drafts.num_proposed - run.drafts.num_accepted > 200
    kind = {"temperature": options.pop("temperature"), "rules": TokenRules(**options), "num_output": 0}
    first_law, *laws = (filtered(row.log().tolist(), **kind) for row in (TARGET[0], *TARGET))
    law = {(first, second): first_law[first] * laws[first][second] for first, second in itertools.product(range(5), repeat=2)}
    counts = Counter(tuple(tokens[:2]) for tokens in run.token_ids)
    assert excess(counts, {text: p for text, p in law.items() if p > 0}) < 1


# -- case 101: where a row ends --------------------------------------------------------------------------------------

ENDINGS = {
    "max_tokens_5": {"max_tokens": 5},
    "max_tokens_1": {"max_tokens": 1},
    "end_token": {},
    "ignore_eos": {"ignore_eos": True, "max_tokens": 30},
    "stop_string": {"stop": ["five"]},
    "stop_string_across_tokens": {"stop": ["o three f"], "include_stop_str": True},
    "stop_string_in_the_prompt": {"stop": ["zero"]},
    "two_stops": {"stop": ["seven", "six seven"]},
    "stop_id": {"stop_token_ids": "four"},
    "min_tokens_holds_a_string": {"stop": ["three"], "min_tokens": 8},
    "min_tokens_holds_the_end": {"min_tokens": 40, "max_tokens": 44},
    "full_context": {"max_tokens": 500, "ignore_eos": True, "max_model_len": 32},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 12.0, "max_tokens": 20},
    "bias": {"logit_bias": ((40, 15.0),), "max_tokens": 10},
}


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("num_drafts", (1, 4, 16))
def test_a_row_is_cut_in_an_accepted_run_exactly_as_without(text, name, num_drafts):
    options = {"max_tokens": 100, "logprobs": 1, **ENDINGS[name]}
    content = " one two three four five six seven eight"
    ids = [*text.encode(content), text.token_id("<|im_end|>")]
    prompt = text.encode("zero")
    max_model_len = options.pop("max_model_len", 512)
    stop_ids = () if options.pop("ignore_eos", False) else (ids[-1],)
    if isinstance(options.get("stop_token_ids"), str):
        options["stop_token_ids"] = (text.encode(content)[text.encode(content).index(text.encode(" four")[0])],)
    stops, _ = text.split_stops(options.pop("stop", ()))
    pieces: list[str] = []

    def script(token_id: int, position: int) -> int:
        return ids[min(position - len(prompt) + 1, len(ids) - 1)]

    def item():
        made = request(prompt, stop=stops, stop_ids=(*stop_ids, *options.get("stop_token_ids", ())), **options)
        made.on_text = pieces.append
        return made

    plain = answer_scripted(script, [item()], text, max_model_len=max_model_len)
    expected, pieces[:] = "".join(pieces), []
    # What the row would go on to say if nobody cut it.
    future = [*plain.token_ids[0], *(ids * 9)]
    speculation = oracle([item()], [future], 1.0, num_drafts, text.vocab_size)
    run = answer_scripted(script, [item()], text, max_model_len=max_model_len, speculation=speculation)
    assert run.answers == plain.answers
    assert "".join(pieces) == expected == run.texts[0]
    num_tokens = len(plain.token_ids[0])
    if name == "full_context":
        assert num_tokens == 32 - len(prompt)
    # A token from the prompt's step, then num_drafts + 1 a step.
    assert run.stats.num_steps == 1 + math.ceil((num_tokens - 1) / (num_drafts + 1))


def test_logits_that_are_not_numbers_fail_the_row_where_they_would_have(text):
    nan = torch.full((text.vocab_size,), float("nan"))
    rows = lambda: [request([1], max_tokens=20), request([2], max_tokens=20)]  # noqa: E731
    script = lambda token_id, position: nan if (token_id, position) == (7, 3) else 7 if position < 9 else 8  # noqa: E731
    plain = answer_scripted(script, rows(), text)
    run = answer_scripted(script, rows(), text, speculation=oracle(rows(), [[7] * 8 + [8] * 30] * 2))
    assert run.answers == plain.answers and run.answers[0][0].finish_reason == "error"


# -- when to draft ---------------------------------------------------------------------------------------------------


def test_a_row_whose_drafts_keep_failing_drafts_now_and_then(text):
    wrong = oracle([request([1])], [[9] * 400], p=0.0, num_ids=text.vocab_size)
    run = answer_scripted(lambda token_id, position: 9, [request([1], max_tokens=201)], text, speculation=wrong)
    steps_left = 200 - 1 - HISTORY_PROPOSALS  # the last step has room for one token only, so no draft
    assert run.drafts.num_proposals == HISTORY_PROPOSALS + steps_left // POOR_INTERVAL_STEPS
    assert run.token_ids == [[9] * 201]


def test_a_row_whose_drafts_start_to_hold_drafts_again(text):
    """The first 60 tokens cannot be guessed, the others can."""
    item = lambda: request([1], max_tokens=200)  # noqa: E731
    said = [20 + i % 50 for i in range(60)] + [9] * 140
    speculation = oracle([item()], [[5] * 60 + [9] * 150], num_ids=text.vocab_size)
    speculation.drafter._answers = [[1, *said]]
    right = speculation.drafter._propose
    speculation.drafter._propose = lambda row: right(row) if len(row.token_ids) > 60 else [0] * row.num_wanted
    run = answer_scripted(lambda token_id, position: said[position], [item()], text, speculation=speculation)
    assert run.token_ids == [said]
    assert run.drafts.num_accepted > 90 and run.stats.num_steps < 120


def test_ngram_drafts_follow_a_row_that_copies(text):
    passage = prompts(1, longest=40, seed=3)[0][:30]
    row = lambda: request([*passage, 1, 2], max_tokens=30)  # noqa: E731
    script = lambda token_id, position: passage[max(position - 31, 0) % 30]  # noqa: E731
    run = answer_scripted(script, [row()], text, speculation=Speculation(NgramDrafter(), FixedDepth(8)))
    assert run.token_ids == answer_scripted(script, [row()], text).token_ids
    assert run.drafts.acceptance > 0.6 and run.stats.num_steps < 12


@hypothesis_settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 5), max_size=8), st.integers(1, 6))
def test_the_ngram_index_finds_what_a_scan_finds(tokens, cuts, num_wanted):
    drafter = NgramDrafter()
    row = DraftRow(0, [], SamplerState(SamplingParams(), b"", []), 99, num_wanted)
    ends = [end for end in itertools.accumulate(cuts) if end < len(tokens)] + [len(tokens)]
    for end in ends:
        row.token_ids += tokens[len(row.token_ids) : end]
        assert drafter.propose([row]) == [scan(row.token_ids, num_wanted)]


def scan(tokens: list[int], num_wanted: int) -> list[int]:
    for length in range(LONGEST, 0, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(tokens) > length and tokens[start : start + length] == tokens[-length:]:
                longer = list(tokens)
                for offset in range(num_wanted):
                    longer.append(longer[start + length + offset])
                return longer[len(tokens) :]
    return []
