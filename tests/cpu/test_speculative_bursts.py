"""Guesses made and verified inside of burst steps, fp32: the same tokens as without, whoever guesses, TP 1 to 3."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from functools import partial

import pytest

from engine.burst_reader import BurstReader, Way
from engine.drafts.depth import AdaptiveDepth, FixedDepth, StepCosts
from engine.drafts.speculation import Speculation
from engine.graph.drafters import HandedDrafts, NgramDrafts
from engine.leader import Leader
from engine.settings import EngineSettings
from engine.summary import describe_speculation
from tests.cpu.drafters import DeviceOracle
from tests.cpu.engine_harness import answer, request, twin_bursts, twin_draft_model
from tests.cpu.test_generation import prompts
from tests.cpu.tiny import make_model, save_model

VOCAB = 131
TEXTS = [text * 2 for text in prompts(8, longest=12, seed=20)] + prompts(8, seed=21)
PAGE_BYTES = 2 * 2 * 16 * 16 * 4 * 2  # keys and values, 2 layers, 16 tokens, heads of 16 floats, 2 KV heads
RULES = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p_bias": {"temperature": 1.2, "min_p": 0.05, "logit_bias": ((3, 4.0), (9, -50.0))},
}
FOUR = FixedDepth(4)
PENALTIES = {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4}
PENALISED = (
    PENALTIES,
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5},
    {"temperature": 0.8, "frequency_penalty": -0.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("qwen2"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Its guesses are noise."""
    model = make_model("llama", seed=5, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    return save_model(model, tmp_path_factory.mktemp("draft"))


def rows(count: int, max_tokens: int = 24, **options):
    return [request(text, row_key=index, max_tokens=max_tokens, **options) for index, text in enumerate(TEXTS[:count])]


def ngram(replica):
    return NgramDrafts()


def run_with(folder, make_rows, make_drafter, depth=FOUR, size: int = 1, **settings):
    """Answered with drafts in bursts; and without any; the answers are asserted to be equal."""
    plain = answer(folder, make_rows(), size, **settings)
    speculation = Speculation(None, depth)
    bursts = partial(twin_bursts, make_drafter=make_drafter)
    run = answer(folder, make_rows(), size, speculation=speculation, bursts=bursts, **settings)
    assert run.answers == plain.answers
    assert len(set(run.digests)) == 1, "the ranks took different steps"
    assert run.stats.decode_tokens == plain.stats.decode_tokens
    return run


@pytest.mark.parametrize("num_drafts", (1, 2, 4, 8))
@pytest.mark.parametrize("kind", RULES)
def test_whoever_guesses_the_tokens_are_the_same(folder, other, kind, num_drafts):
    make_rows = partial(rows, 5, **RULES[kind])
    acceptance = {}
    for name, make in (("ngram", ngram), ("itself", twin_draft_model(folder)), ("noise", twin_draft_model(other))):
        run = run_with(folder, make_rows, make, FixedDepth(num_drafts))
        assert run.stats.num_waits == 0 and run.drafts.num_proposals > 0
        acceptance[name] = run.drafts.acceptance
    # A model guesses its own tokens; a row's last step proposes beyond its end.
    assert acceptance["itself"] > 0.7 > 0.6 > acceptance["noise"], acceptance


@pytest.mark.parametrize("size", (2, 3))
def test_on_several_ranks(folder, size):
    for kind in ("greedy", "top_p"):
        run = run_with(folder, partial(rows, 4, **RULES[kind]), twin_draft_model(folder), size=size)
        assert run.drafts.acceptance > 0.6
    run_with(folder, partial(rows, 4), ngram, size=size)


class Mailbox:
    """A channel between two ranks that are threads."""

    def __init__(self):
        self._messages, self.num_taken, self.num_noted = queue.Queue(), 0, {}

    def put(self, payload):
        self._messages.put(payload.clone())

    def take(self, out):
        out.copy_(self._messages.get(timeout=60))
        assert out.shape[1] > 0
        self.num_taken += 1

    def note_launch(self):
        """By either end; what each has taken by then."""
        self.num_noted[threading.current_thread()] = self.num_taken


@pytest.mark.parametrize("size", (2, 3))
def test_drafts_that_rank_0_hands_to_the_others(folder, size):
    for kind in ("greedy", "top_p"):
        mailboxes = [Mailbox() for _ in range(size - 1)]

        def make(replica, mailboxes=mailboxes):
            if replica.comm.rank:
                return HandedDrafts(None, [mailboxes[replica.comm.rank - 1]], "itself")
            return HandedDrafts(twin_draft_model(folder)(replica), mailboxes, "itself")

        def make_rows(kind=kind):
            return [request(text, idx, max_tokens=5 + 7 * idx, **RULES[kind]) for idx, text in enumerate(TEXTS[:5])]

        run = run_with(folder, make_rows, make, size=size, max_batch=3)
        assert run.drafts.acceptance > 0.6
        for mailbox in mailboxes:
            assert mailbox._messages.empty(), "every step's drafts are taken"
            assert len(mailbox.num_noted) == 2 and max(mailbox.num_noted.values()) == mailbox.num_taken > 0, "by noted launches"


@pytest.mark.parametrize("count", (1, 3, 16))
def test_batches_and_rows_that_join_and_end(folder, count):
    def make_rows():
        return [request(text, row_key=idx, max_tokens=3 + 5 * (idx % 6)) for idx, text in enumerate(TEXTS[:count])]

    for settings in ({}, {"max_batch": 2}, {"max_batch": 3, "max_step_tokens": 16}):
        run_with(folder, make_rows, twin_draft_model(folder), **settings)


def test_stops_inside_of_accepted_runs(folder):
    free = answer(folder, rows(3, 40))
    ids, texts = free.token_ids, free.texts
    for place in range(3, 14):
        def make_rows(place=place):
            return [
                request(TEXTS[0], 0, max_tokens=40, stop_ids=[ids[0][place]]),
                request(TEXTS[1], 1, max_tokens=40, stop=[texts[1][place : place + 3]]),
                request(TEXTS[2], 2, max_tokens=place, min_tokens=3, stop_ids=ids[2][2:4]),
            ]  # fmt: skip

        run_with(folder, make_rows, twin_draft_model(folder), FixedDepth(5))


@pytest.mark.parametrize("options", PENALISED, ids=lambda options: "-".join(options))
def test_rows_that_what_they_said_bears_on_are_not_guessed_for(folder, options):
    run = run_with(folder, partial(rows, 3, **options), twin_draft_model(folder))
    assert run.drafts.num_proposals == 0 and run.stats.num_waits == 0


def test_one_row_with_penalties_stops_the_guesses_for_all_until_it_ends(folder):
    def make_rows():
        return [*rows(2, 40), request(TEXTS[5], 9, max_tokens=8, **PENALTIES)]

    run = run_with(folder, make_rows, twin_draft_model(folder))
    assert run.drafts.num_proposals > 0, "those left when the third has ended"


def test_more_rows_than_pay_go_without(folder):
    bursts = partial(twin_bursts, make_drafter=ngram)

    def few(replica):
        backend = bursts(replica)
        backend.speculable = type(backend.speculable)(2, 16, backend.speculable.max_tokens)
        return backend

    speculation = Speculation(None, FixedDepth(4))
    run = answer(folder, rows(4, 20), speculation=speculation, bursts=few)
    assert run.answers == answer(folder, rows(4, 20)).answers and run.drafts.num_proposals == 0


def noting(make_drafter, bursts):
    """Makes backends that note in `bursts`: (rows, drafts, rows that wait) of each burst as it begins."""

    def make(replica):
        backend = twin_bursts(replica, make_drafter)
        begin = backend.begin

        def note(sequences, num_drafts=0):
            bursts.append((len(sequences), num_drafts, len(replica.scheduler.waiting)))
            return begin(sequences, num_drafts)

        backend.begin = note
        return backend

    return make


def mixed(count: int, **options):
    return [request(TEXTS[idx % 16], idx, max_tokens=4 + 7 * (idx % 5), **options) for idx in range(count)]


@pytest.mark.parametrize("size", (1, 2))
def test_rows_that_wait_do_not_count(folder, size):
    """Drafts are made for the two that run, though behind them waits one that wants none."""
    bursts: list = []
    make_rows = lambda: [*mixed(7), request(TEXTS[5], 9, max_tokens=8, **PENALTIES), *mixed(3)]  # noqa: E731
    speculation = Speculation(None, FOUR)
    make = noting(twin_draft_model(folder), bursts)
    run = answer(folder, make_rows(), size, speculation=speculation, bursts=make, max_batch=2)
    assert run.answers == answer(folder, make_rows(), max_batch=2).answers and len(set(run.digests)) == 1
    assert sum(num_drafts > 0 for _, num_drafts, num_waiting in bursts if num_waiting >= 4) > 5


@pytest.mark.parametrize("size", (1, 2))
def test_guesses_step_aside_where_the_batch_is_too_large_and_come_back(folder, size, monkeypatch):
    """A token behind the 16th takes as long as a step: up to 8 rows a guess costs next to nothing, 17 rows and more lose."""
    bursts, ways, message = [], [], BurstReader.message
    monkeypatch.setattr(BurstReader, "message", lambda reader, way: ways.append(way) or message(reader, way))
    depth = AdaptiveDepth(8, StepCosts(draft=0.05, verify=0.1, many=1.0))
    make_rows, make = partial(mixed, 40), noting(twin_draft_model(folder), bursts)
    run = answer(folder, make_rows(), size, speculation=Speculation(None, depth), bursts=make, max_batch=20)
    num_ahead = ways.count(Way.AHEAD)
    assert run.answers == answer(folder, make_rows(), max_batch=20).answers and len(set(run.digests)) == 1
    assert {num_drafts for num_rows, num_drafts, _ in bursts if num_rows > 16} <= {0}
    few = [num_drafts for num_rows, num_drafts, _ in bursts if num_rows <= 8]
    # The first burst of few rows, on each rank, may have been launched before it was known that others have ended.
    assert len(few) > 2 * size and min(few[size:]) > 0 and run.drafts.tokens_per_step > 1.0
    assert num_ahead > 5 and run.stats.num_waits == 0, "nothing is lost where there are no guesses"


def test_drafts_are_not_made_for_a_row_with_penalties_whatever_rank_0_believes(folder, monkeypatch):
    """Which rows run it cannot know for certain."""
    monkeypatch.setattr(Leader, "num_drafts_alone", lambda *asked: 4)
    make_rows = partial(rows, 3, **PENALTIES)
    speculation = Speculation(None, FOUR)
    run = answer(folder, make_rows(), speculation=speculation, bursts=partial(twin_bursts, make_drafter=ngram))
    assert run.answers == answer(folder, make_rows()).answers and run.drafts.num_proposals == 0


def test_few_pages_and_a_full_context(folder):
    for num_pages in (8, 10, 17):
        settings = {"kv_memory_bytes": num_pages * PAGE_BYTES, "max_model_len": 128}
        run = run_with(folder, partial(rows, 6, 60), twin_draft_model(folder), **settings)
        assert num_pages > 10 or run.num_preemptions > 0
    run = run_with(folder, partial(rows, 3, None), twin_draft_model(folder), max_model_len=50)
    assert all(len(text) + len(ids) == 50 for text, ids in zip(TEXTS, run.token_ids))


def oracle_of(rate, answers):
    return lambda replica: DeviceOracle(answers, rate, VOCAB)


@pytest.mark.parametrize("rate", (0.0, 0.3, 0.8, 1.0))
def test_an_oracle_is_right_as_often_as_it_is_told(folder, rate):
    texts = TEXTS[:6]
    plain = answer(folder, rows(6, 200))
    answers = [[*text, *ids] for text, ids in zip(texts, plain.token_ids)]
    run = run_with(folder, partial(rows, 6, 200), oracle_of(rate, answers), FixedDepth(3))
    stats = run.drafts
    tried = stats.num_accepted + stats.num_proposals  # each proposal shows one failure, or none
    expected = 1 + rate + rate**2 + rate**3
    assert abs(stats.tokens_per_step - expected) < 0.12 * expected, (stats.tokens_per_step, expected, tried)


def test_guesses_that_never_hold_are_given_up_and_tried_again(folder):
    make = partial(rows, 1, 300)
    depth = AdaptiveDepth(8, StepCosts(0.1))
    run = run_with(folder, make, oracle_of(0.0, []), depth, max_model_len=400)
    assert 4 <= run.drafts.num_proposals < 60, "of 300 steps"
    plain = answer(folder, make(), max_model_len=400)
    answers = [[*TEXTS[0], *plain.token_ids[0]]]
    run = run_with(folder, make, oracle_of(1.0, answers), depth, max_model_len=400)
    assert run.drafts.tokens_per_step > 4


def test_logits_that_are_not_finite_end_the_row_alone(folder):
    def poisoned(replica):
        backend = twin_bursts(replica, twin_draft_model(folder))
        choose = backend._operators.choose

        def choose_nan(rows, logits):
            is_bad = (rows.positions == len(TEXTS[0]) + 7)[:, None]
            return choose(rows, logits.masked_fill(is_bad, float("nan")))

        backend._operators.choose = choose_nan
        return backend

    speculation = Speculation(None, FixedDepth(3))
    texts = [TEXTS[0], TEXTS[0][:-3] + [5]]
    run = answer(folder, [request(text, max_tokens=20) for text in texts], speculation=speculation, bursts=poisoned)
    plain = answer(folder, [request(text, max_tokens=20) for text in texts])
    for text, found, wanted in zip(texts, run.answers, plain.answers):
        count = len(TEXTS[0]) + 8 - len(text)
        assert found[0].token_ids == wanted[0].token_ids[:count] and found[0].finish_reason != wanted[0].finish_reason


def test_the_summary_says_who_guesses(folder):
    seen = []

    def bursts(replica):
        backend = twin_bursts(replica, twin_draft_model(folder))
        settings = EngineSettings("model", draft_model="small", num_drafts=3)
        seen.append(describe_speculation(settings, backend))
        seen.append(describe_speculation(replace(settings, num_drafts=None), backend))
        return backend

    answer(folder, rows(1, 2), bursts=bursts, max_batch=5)
    assert seen[0] == f"up to 3 drafts a row and step from {folder}, in bursts of up to 5 rows"
    assert seen[1].startswith("up to 8 drafts a row and step, as many as pay, from")
