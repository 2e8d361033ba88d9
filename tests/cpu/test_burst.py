"""Bursts change when tokens are computed, never which: every case is answered with and without them (fp32, TP 1 to 3)."""

from __future__ import annotations

import gc
import random

import pytest

from engine.drafts.depth import FixedDepth
from engine.drafts.ngram import NgramDrafter
from engine.drafts.speculation import Speculation
from engine.graph.burst import MAX_BURST_STEPS, NUM_STEPS_BEHIND
from engine.request import Request, Sample
from kernels.filter_logits import MAX_BIASES, MAX_FORBIDDEN
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.tiny import make_model, save_model

VOCAB = 131


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(make_model("qwen2", max_position_embeddings=256), tmp_path_factory.mktemp("qwen2"))


def prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


class Recorder:
    """A burst backend that notes what passes through it."""

    def __init__(self, backend):
        self._backend, self.max_rows, self.speculable = backend, backend.max_rows, backend.speculable
        self.num_begun = self.num_continued = self.num_launched = self.num_read = self.num_chosen = self.most_ahead = 0
        self.num_tokens = 0  # that were chosen, wanted or not

    @property
    def num_bursts(self):
        """Those that steps beside bursts began, too, even if they went no further."""
        return self.num_begun + self.num_chosen

    @property
    def last_tokens(self):
        return self._backend.last_tokens

    def begin(self, sequences, num_drafts=0):
        self.num_begun += 1
        return self._backend.begin(sequences, num_drafts)

    def end(self, burst):
        self._backend.end(burst)

    def launch(self, burst, num_steps):
        assert 1 <= num_steps <= MAX_BURST_STEPS
        self.num_continued += burst.num_launched > 0
        self.num_launched += num_steps
        self.num_tokens += num_steps * len(burst.sequences)
        for sequence, length in burst.lengths.items():
            assert len(sequence.pages) * 16 >= length + num_steps, "a step has no page to write to"
        self._backend.launch(burst, num_steps)
        self.most_ahead = max(self.most_ahead, burst.num_unread)

    def read(self, burst):
        self.num_read += 1
        return self._backend.read(burst)

    def choose(self, sequences, logits):
        self.num_chosen += 1
        self.num_launched += 1
        self.num_tokens += len(sequences)
        return self._backend.choose(sequences, logits)


def compare(model, make_requests, size=1, **settings):
    """Run without and with bursts; assert equal answers. Returns the run with bursts, the plain one, and rank 0's recorder."""
    recorders = {}

    def bursts(replica):
        recorders[replica.comm.rank] = Recorder(twin_bursts(replica))
        return recorders[replica.comm.rank]

    plain = answer(model, make_requests(), size, **settings)
    run = answer(model, make_requests(), size, bursts=bursts, **settings)
    assert run.answers == plain.answers
    assert len(set(run.digests)) == 1, "the ranks took different steps"
    assert (run.stats.prefill_tokens, run.stats.decode_tokens) == (plain.stats.prefill_tokens, plain.stats.decode_tokens)
    assert len({recorder.num_launched for recorder in recorders.values()}) == 1
    return run, plain, recorders[0]


@pytest.mark.parametrize("size", (1, 2, 3))
def test_greedy_and_seeded_rows_say_the_same(model, size):
    texts = prompts(5)

    def rows():
        greedy = [request(text, row_key=idx, max_tokens=40) for idx, text in enumerate(texts[:2])]
        return greedy + [request(text, row_key=idx, temperature=1.0, max_tokens=40) for idx, text in enumerate(texts[2:])]

    run, _, recorder = compare(model, rows, size)
    assert len({tuple(ids) for ids in run.token_ids}) == 5
    assert run.stats.num_waits == 0, "a decode step went the long way"
    assert (recorder.num_begun, recorder.num_chosen) == (0, 1), "the burst goes on from the prefill"
    assert recorder.num_continued >= 39 // MAX_BURST_STEPS
    assert recorder.num_launched == recorder.num_read == 40, "the first token of each row comes out of its prefill"
    assert recorder.most_ahead <= MAX_BURST_STEPS + NUM_STEPS_BEHIND


def test_the_collector_keeps_out_of_runs_and_comes_back(model, monkeypatch):
    seen, accept = [], Sample.accept
    monkeypatch.setattr(Sample, "accept", lambda *args: seen.append(gc.get_freeze_count()) or accept(*args))
    compare(model, lambda: [request(text, max_tokens=3) for text in prompts(2)])
    assert seen and min(seen) > 10_000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize("size", (1, 2))
def test_first_tokens_that_only_rank_0_can_choose(model, size):
    """A row that wants log-probabilities: while it is open, rank 0 chooses after steps that let rows in."""
    texts = prompts(4)
    options = ({"logprobs": 2, "max_tokens": 3}, {"max_tokens": 9}, {"max_tokens": 12}, {"prompt_logprobs": 1, "max_tokens": 5})
    rows = lambda: [request(text, idx, **own) for idx, (text, own) in enumerate(zip(texts, options))]  # noqa: E731
    _, _, recorder = compare(model, rows, size, max_batch=2)
    assert recorder.num_chosen == 0
    late = lambda: rows()[:3] + [request(text, max_tokens=4) for text in texts]  # noqa: E731
    _, _, recorder = compare(model, late, size, max_batch=1)
    assert recorder.num_chosen > 0, "the row has gone"


def test_a_prefill_is_gone_on_from_only_if_nobody_could_join_and_all_need_more(model):
    long = [[idx + 3] * 20 for idx in range(3)]
    # Two prompts fill the first step. The third is not kept waiting for a burst of the two.
    _, _, recorder = compare(model, lambda: [request(text, max_tokens=10) for text in long], max_step_tokens=40, max_batch=3)
    assert recorder.num_chosen == 2 and recorder.num_launched == 11
    _, _, recorder = compare(model, lambda: [request(text, max_tokens=1) for text in long])
    assert recorder.num_chosen == recorder.num_launched == 1, "a row that has its only token needs no steps"


def test_the_first_token_of_a_penalised_row(model):
    """Its prompt counts once, the output not at all: what is chosen first on the device is what rank 0 would have chosen. The
    prompt's last token is the likeliest with one of the biases, and no more if it were taken for a token of the output."""
    texts = [[5, 6, 7, 5], [9] * 20, [3, 8, 3, 8, 8]]
    for own in ({"repetition_penalty": 1.5}, {"presence_penalty": 1.9, "frequency_penalty": 1.3}):
        rows = lambda: [  # noqa: E731
            request(text, idx, max_tokens=3, logit_bias=((text[-1], bias / 2),), **own)  # noqa: B023
            for bias in range(13)
            for idx, text in enumerate(texts)
        ]
        for settings in ({}, {"max_batch": 2}):
            _, _, recorder = compare(model, rows, **settings)
            assert recorder.num_chosen > 0


@pytest.mark.parametrize("family", ("llama", "qwen3"))
def test_other_families(family, tmp_path):
    folder = save_model(make_model(family, max_position_embeddings=256), tmp_path)
    compare(folder, lambda: [request(text, max_tokens=20) for text in prompts(3)], size=2)


def test_a_sliding_window(tmp_path):
    options = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    folder = save_model(make_model("qwen2", max_position_embeddings=256, **options), tmp_path)
    compare(folder, lambda: [request(text, max_tokens=20) for text in prompts(3)])


@pytest.mark.parametrize("size", (1, 2))
def test_rows_of_many_lengths_with_more_than_fit_at_once(model, size):
    texts, rng = prompts(12), random.Random(5)
    lengths = [rng.randint(1, 30) for _ in texts]

    def rows():
        return [request(text, max_tokens=count) for text, count in zip(texts, lengths)]

    run, _, recorder = compare(model, rows, size, max_batch=4)
    assert [len(ids) for ids in run.token_ids] == lengths
    assert recorder.num_bursts > 3


@pytest.mark.parametrize("size", (1, 2))
def test_a_row_that_ends_in_mid_burst_leaves_nothing_behind(model, size):
    text = prompts(3, seed=3)
    free = answer(model, [request(item, max_tokens=40) for item in text]).token_ids
    # Each row ends at its 4th new token or so: in the middle of a burst, and early enough for steps beyond its end to run.
    rows = lambda: [  # noqa: E731
        request(text[0], max_tokens=40, stop_ids=[free[0][3]]),
        request(text[1], max_tokens=40, stop_ids=[free[1][11]]),
        request(text[2], max_tokens=40),
    ]
    run, _, recorder = compare(model, rows, size)
    assert [answers[0].finish_reason for answers in run.answers] == ["stop", "stop", "length"]
    assert recorder.num_launched == recorder.num_read, "other rows had a use for every step"
    assert len(run.token_ids[2]) == 40


def test_steps_beyond_the_last_rows_end_are_not_waited_for(model):
    text = prompts(1, seed=3)[0]
    free = answer(model, [request(text, max_tokens=40)]).token_ids[0]
    stop = next(token_id for idx, token_id in enumerate(free) if idx > 2 and token_id not in free[:idx])
    rows = lambda: [request(text, max_tokens=40, stop_ids=[stop]), request(text, max_tokens=9)]  # noqa: E731
    run, _, recorder = compare(model, rows, max_batch=1)
    assert run.token_ids[0] == free[: free.index(stop) + 1] and run.token_ids[1] == free[:9]
    assert recorder.num_launched > recorder.num_read


def test_stop_strings_minimum_lengths_and_samples(model):
    texts = prompts(3, seed=7)
    free = answer(model, [request(text, max_tokens=40) for text in texts])
    stop = free.texts[0][5:7]

    def rows():
        return [
            request(texts[0], max_tokens=40, stop=[stop]),
            request(texts[1], max_tokens=30, min_tokens=10, stop_ids=free.token_ids[1][4:6]),
            request(texts[2], row_key=2, n=3, temperature=0.8, max_tokens=25),
        ]

    run, _, recorder = compare(model, rows)
    assert run.answers[0][0].stop_reason == stop and len(run.token_ids[1]) >= 10
    assert len({completion.token_ids for completion in run.answers[2]}) == 3
    assert recorder.num_launched > 0 and run.stats.num_waits <= 1, "only the samples that join when the first has its prompt"


@pytest.mark.parametrize(
    "options",
    (
        {"logprobs": 2},
        {"logit_bias": tuple((idx % VOCAB, 0.1) for idx in range(MAX_BIASES + 1))},
        {"min_tokens": 3, "stop_ids": range(MAX_FORBIDDEN + 1)},
    ),
    ids=lambda options: "-".join(options),
)
def test_what_needs_rank_0_takes_no_part_in_bursts(model, options):
    _, _, recorder = compare(model, lambda: [request(text, max_tokens=12, **options) for text in prompts(2)])
    assert recorder.num_begun == 0


def test_no_bursts_beside_drafts(model):
    speculation = lambda: Speculation(NgramDrafter(), FixedDepth(3))  # noqa: E731
    rows = lambda: [request(text * 3, max_tokens=20) for text in prompts(2)]  # noqa: E731
    plain = answer(model, rows())
    run = answer(model, rows(), speculation=speculation(), bursts=twin_bursts)
    assert run.answers == plain.answers and run.stats.num_waits > 0


class DripSource:
    """Hands out one request every `interval` polls."""

    def __init__(self, requests: list[Request], interval: int):
        self._requests, self._interval, self._polls = list(reversed(requests)), interval, 0

    @property
    def is_exhausted(self) -> bool:
        return not self._requests

    def poll(self, wait_s: float) -> Request | None:
        self._polls += 1
        return self._requests.pop() if self._polls % self._interval == 1 or wait_s else None


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("interval", (1, 2, 5))
def test_rows_that_arrive_while_others_run(model, size, interval):
    texts = prompts(6, seed=9)
    plain = answer(model, [request(text, max_tokens=25) for text in texts])
    rows = [request(text, max_tokens=25) for text in texts]
    run = answer(model, rows, size, source=DripSource(rows, interval), bursts=twin_bursts, max_batch=3)
    assert run.answers == plain.answers


@pytest.mark.parametrize("size", (1, 3))
def test_page_shortage(model, size):
    texts = prompts(6, longest=30, seed=4)
    page = 2 * 2 * 16 * 16 * 4 * 2  # two layers, keys and values, 16 tokens, two heads of 16 floats
    for num_pages in (8, 10, 17):
        settings = {"kv_memory_bytes": num_pages * page, "max_model_len": 128}
        rows = lambda: [request(text, max_tokens=60) for text in texts]  # noqa: E731
        plain = answer(model, rows(), size, **settings)
        run = answer(model, rows(), size, bursts=twin_bursts, **settings)
        assert run.answers == plain.answers
        assert len(run.token_ids[0]) == 60 and run.stats.num_waits < plain.stats.num_waits
        assert num_pages > 10 or run.num_preemptions > 0


def test_a_context_that_is_full_ends_the_row(model):
    run, _, _ = compare(model, lambda: [request(text, max_tokens=None) for text in prompts(2)], max_model_len=50)
    assert all(len(ids) + len(text) == 50 for ids, text in zip(run.token_ids, prompts(2)))


def test_pages_of_a_burst_are_found_by_later_rows(model):
    text = prompts(1, seed=11)[0]
    first = answer(model, [request(text, max_tokens=60)]).token_ids[0]
    rows = lambda: [request(text, max_tokens=60), request(text + first, max_tokens=20)]  # noqa: E731
    run, plain, _ = compare(model, rows, max_batch=1)
    assert run.stats.prefill_tokens == plain.stats.prefill_tokens < len(text) + len(text) + 60


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("after", (3, 7, 14))
def test_an_interrupt_in_mid_burst(model, size, after):
    """Everybody leaves with the same code, and all pages come back (`answer` checks that)."""
    calls = iter(range(1000))
    rows = [request(text, max_tokens=60) for text in prompts(3)]
    run = answer(model, rows, size, bursts=twin_bursts, interrupt=lambda: 130 if next(calls) == after else None)
    assert run.exit_code == 130 and run.answers == [[], [], []]


def test_logits_that_are_not_finite_fail_the_row_alone(model):
    def poisoned(replica):
        backend = twin_bursts(replica)
        choose = backend._operators.choose

        def choose_nan(rows, logits):
            logits[0] = logits[0].masked_fill(rows.positions[:1, None][0] == 12, float("nan"))
            return choose(rows, logits)

        backend._operators.choose = choose_nan
        return backend

    texts = [[5] * 4, [7] * 4]
    plain = answer(model, [request(text, max_tokens=30) for text in texts])
    run = answer(model, [request(text, max_tokens=30) for text in texts], bursts=poisoned)
    (failed,), (fine,) = run.answers
    assert failed.finish_reason == "error" and len(failed.token_ids) == 9
    assert fine == plain.answers[1][0]
