"""Steps that let rows in or out are launched before the tokens before them are known: when, and that nothing else changes."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from engine.burst_reader import BurstReader, Way
from engine.graph.burst import MAX_BURST_STEPS, Burst
from engine.graph.row_state import RowState
from engine.pages import PagePool
from engine.replica import Replica
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.test_burst import VOCAB, DripSource, compare, prompts
from tests.cpu.tiny import make_model, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(make_model("qwen2", max_position_embeddings=256), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def ways(monkeypatch):
    """How the messages went on, those of every run from here on."""
    seen, message = [], BurstReader.message

    def note(reader, way):
        seen.append(way)
        return message(reader, way)

    monkeypatch.setattr(BurstReader, "message", note)
    return seen


def mixed(count: int, **options) -> list:
    rng = random.Random(5)
    return [request(text, idx, max_tokens=rng.randint(1, 30), **options) for idx, text in enumerate(prompts(count))]


@pytest.mark.parametrize("size", (1, 2, 3))
def test_rows_that_end_for_their_length_are_replaced_without_a_wait(model, size, ways):
    run, plain, recorder = compare(model, lambda: mixed(12), size, max_batch=4)
    assert run.stats.num_waits == 0 < plain.stats.num_waits
    assert recorder.num_chosen > 3 and recorder.num_launched == recorder.num_read
    assert recorder.num_tokens == sum(len(ids) for ids in run.token_ids), "no row took part in a step in vain"
    # The first message finds nothing that runs; the last two let the last rows go and end the run.
    is_plain = [way is Way.ANEW for way in ways]
    plain_run, own = is_plain[: plain.stats.num_steps], ways[plain.stats.num_steps :]
    assert all(plain_run) and own.count(Way.AHEAD) >= recorder.num_bursts - 1 and own.count(Way.ANEW) <= 3


def test_a_long_prompt_in_chunks_beside_rows_that_decode(model, ways):
    rows = lambda: [request([7] * 5, max_tokens=30), request([5] * 90, max_tokens=4)]  # noqa: E731
    run, _, recorder = compare(model, rows, max_step_tokens=16, max_batch=2)
    assert run.stats.num_waits == 0 and recorder.num_chosen >= 6, "one decode token in each step with a chunk"
    assert ways.count(Way.AHEAD) >= 5


def test_rows_that_end_for_another_reason_have_taken_part_in_a_step_too_many(model, ways):
    texts = prompts(6, seed=3)
    free = answer(model, [request(text, max_tokens=40) for text in texts]).token_ids
    ends = [next(idx for idx in range(3 + row, 40) if ids[idx] not in ids[:idx]) for row, ids in enumerate(free)]
    rows = lambda: [  # noqa: E731
        request(text, max_tokens=40, stop_ids=[ids[end]]) for text, ids, end in zip(texts, free, ends)
    ]
    run, _, recorder = compare(model, rows, 2, max_batch=2)
    assert [len(ids) for ids in run.token_ids] == [end + 1 for end in ends]
    assert Way.AHEAD in ways and recorder.num_launched >= recorder.num_read


@pytest.mark.parametrize(
    "options",
    (
        {"repetition_penalty": 1.4},
        {"temperature": 1.0, "frequency_penalty": 0.9, "presence_penalty": 0.3},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "logit_bias": ((5, 2.0),)},
    ),
    ids=lambda options: "-".join(options),
)
def test_what_a_row_has_said_counts_though_only_the_device_knows_it(model, options, ways):
    rows = lambda: mixed(9, **options)[:6] + mixed(9)[6:]  # noqa: E731
    compare(model, rows, 2, max_batch=3)
    assert ways.count(Way.AHEAD) > 3


def test_samples_and_prefixes_are_found(model, ways):
    """The samples behind the first one find its prompt's pages, and a later row those of its answer, though each page was full
    before its last token was known."""
    text = prompts(1, seed=11)[0]
    free = answer(model, [request(text, max_tokens=80)]).token_ids[0]
    num_short = 45
    rows = lambda: [  # noqa: E731
        request(text, max_tokens=80),
        *(request([9 + idx] * 3, 1 + idx, max_tokens=2) for idx in range(num_short)),
        request(text + free[:70], 99, n=3, temperature=0.8, max_tokens=9),
    ]
    run, plain, _ = compare(model, rows, max_batch=2)
    assert run.token_ids[0] == free and ways.count(Way.AHEAD) > 40
    assert run.stats.prefill_tokens == plain.stats.prefill_tokens < len(text) + 3 * num_short + len(text) + 70


def test_no_row_loses_its_pages_while_its_tokens_are_unknown(model, ways, monkeypatch):
    texts = prompts(6, longest=30, seed=4)
    page = 2 * 2 * 16 * 16 * 4 * 2  # two layers, keys and values, 16 tokens, two heads of 16 floats
    preempt, lost = Scheduler._preempt, []

    def note(scheduler, sequence):
        lost.append(sequence.num_ahead)
        preempt(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "_preempt", note)
    for num_pages in (8, 10, 13):
        settings = {"kv_memory_bytes": num_pages * page, "max_model_len": 128}
        compare_any(model, lambda: [request(text, idx, max_tokens=20 + 5 * idx) for idx, text in enumerate(texts)], **settings)
    assert len(lost) > 4 and not any(lost) and Way.AHEAD in ways


def compare_any(model, make_requests, **settings) -> None:
    """As `compare`, where preemptions may fall elsewhere."""
    plain = answer(model, make_requests(), **settings)
    assert answer(model, make_requests(), bursts=twin_bursts, **settings).answers == plain.answers


@pytest.mark.parametrize("after", range(3, 24, 3))
def test_an_interrupt_while_tokens_are_unread(model, after):
    """Everybody leaves with the same code, and all pages come back (`answer` checks that)."""
    calls = iter(range(1000))
    run = answer(
        model, mixed(12), 2, bursts=twin_bursts, interrupt=lambda: 130 if next(calls) == after else None, max_batch=3
    )
    assert run.exit_code == 130


def test_rows_that_arrive_late_join_without_a_wait(model, ways):
    rows = [request(text, idx, max_tokens=25) for idx, text in enumerate(prompts(6, seed=9))]
    plain = answer(model, [request(text, idx, max_tokens=25) for idx, text in enumerate(prompts(6, seed=9))])
    ways.clear()
    run = answer(model, rows, source=DripSource(rows, 3), bursts=twin_bursts, max_batch=6)
    assert run.answers == plain.answers and ways.count(Way.AHEAD) >= 4


def test_a_step_reads_the_device_s_own_tokens_and_the_host_knows_none(model, monkeypatch):
    """Where tokens are not known, what the host holds in their place has no effect: it holds none."""
    begun, begin = [], RowState.begin

    def note(state, sequences, *args):
        begun.extend((s.num_ahead, s.num_tokens - len(s.token_ids)) for s in sequences)
        begin(state, sequences, *args)

    monkeypatch.setattr(RowState, "begin", note)
    compare(model, lambda: mixed(12), max_batch=4)
    ahead = [(count, missing) for count, missing in begun if count]
    assert len(ahead) > 10 and all(count == missing <= MAX_BURST_STEPS for count, missing in ahead)


def test_the_room_for_a_step_counts_all_that_runs():
    """A prompt in chunks has tokens still to compute: its pages are spoken for when the next step is scheduled unread."""
    scheduler = Scheduler(Limits(4, 16, 256), PagePool(4, 16, False))
    decoding, prefilling = Sequence(0, [3] * 15, 15, 256), Sequence(1, [5] * 40, 40, 256)
    for sequence in (decoding, prefilling):
        scheduler.add(sequence)
    rows = scheduler.schedule()
    assert [(row.num_tokens, row.is_sampled) for row in rows] == [(15, True), (1, False)]
    for row in rows:
        scheduler.complete([row], num_open=int(row.is_sampled))
    backend = SimpleNamespace(max_rows=8)
    replica = Replica(scheduler, None, None, VOCAB, None)
    replica.burst_backend, replica.burst = backend, Burst([decoding], 0, num_launched=1)
    # 15 computed and one chosen: the next step needs no page more. The prompt needs three in all: four pages are enough.
    assert replica.can_go_ahead()
    decoding.num_computed, decoding.token_ids = 15, [3] * 16
    assert not replica.can_go_ahead(), "17 tokens of one row and 40 of the other need five pages"
    replica.burst.num_drafts = 1
    assert not replica.can_go_ahead()
