"""Speculation with real models, fp32: the same tokens with and without, whoever guesses, at any degree, whatever else goes on."""

from __future__ import annotations

import pytest

from engine.drafts.loading import build_speculation
from engine.loading import draw_blueprint
from engine.settings import EngineSettings
from launch.errors import OutputError
from launch.world import World
from tests.cpu.drafters import oracle
from tests.cpu.engine_harness import answer, request
from tests.cpu.test_generation import prompts
from tests.cpu.tiny import make_model, save_model

SAMPLING = {
    "greedy": {},
    "plain": {"temperature": 1.0},
    "top_k": {"temperature": 0.8, "top_k": 20},
    "top_p_penalties": {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "min_p_bias": {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 0.5, "logit_bias": ((3, 4.0), (9, -50.0))},
    "greedy_penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3},
}
# Copies of one passage, so that n-grams have something to find.
TEXTS = [text * 2 for text in prompts(8, longest=12, seed=20)] + prompts(8, seed=21)
PAGE_BYTES = 2 * 2 * 16 * 16 * 4 * 2  # keys and values, 2 layers, 16 tokens, heads of 16 floats, 2 KV heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("qwen2"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    model = make_model("llama", seed=5, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1)
    return save_model(model, tmp_path_factory.mktemp("draft"))


def rows(kind: str, count: int = 8, max_tokens: int = 24, **more):
    options = {"max_tokens": max_tokens, **SAMPLING[kind], **more}
    return [request(text, row_key=index, **options) for index, text in enumerate(TEXTS[-count:])]


def mixed(count: int):
    kinds = list(SAMPLING)
    return [
        request(text, row_key=index, max_tokens=20 + index, **SAMPLING[kinds[index % len(kinds)]])
        for index, text in enumerate(TEXTS[:count])
    ]


@pytest.mark.parametrize("kind", SAMPLING)
def test_whoever_guesses_the_tokens_are_the_same(folder, other, kind):
    count = len(TEXTS)
    plain = answer(folder, rows(kind, count))
    sources = {
        "ngram": {"is_ngram": True},
        "itself": {"draft_model": str(folder)},
        "another": {"draft_model": str(other)},
        "oracle": {"speculation": oracle(rows(kind, count), plain.token_ids, p=0.7)},
    }
    for name, source in sources.items():
        run = answer(folder, rows(kind, count), max_batch=16, **source)
        assert run.token_ids == plain.token_ids, name
        assert run.drafts.num_proposed > 0, name
        assert run.stats.decode_tokens == plain.stats.decode_tokens == run.drafts.num_decoded, name


@pytest.mark.parametrize(
    "size, num_drafts, count",
    [(1, 1, 16), (1, 2, 5), (1, 4, 1), (1, 8, 16), (2, 1, 5), (2, 2, 16), (2, 4, 7), (2, 8, 1), (3, 4, 16), (3, 8, 4)],
)
def test_neither_the_number_of_drafts_nor_batch_nor_degree_matters(folder, size, num_drafts, count):
    plain = answer(folder, mixed(count))
    run = answer(folder, mixed(count), size, speculation=oracle(mixed(count), plain.token_ids, 0.8, num_drafts))
    assert run.token_ids == plain.token_ids
    assert len(set(run.digests)) == 1, "the ranks took different steps"
    assert 0.1 < run.drafts.acceptance < 1.0 and run.stats.num_steps < plain.stats.num_steps


@pytest.mark.parametrize("kind", SAMPLING)
@pytest.mark.parametrize("size", (1, 2))
def test_a_draft_that_is_the_target_is_always_right(folder, kind, size):
    """Sampling included: the draft draws with the same numbers."""
    run = answer(folder, rows(kind), size, draft_model=str(folder), num_drafts=4)
    assert run.drafts.acceptance == 1.0 and run.drafts.tokens_per_step > 4.5
    # 1 token from the prompt, then 23 at 5 a step.
    assert run.stats.num_steps == 6


def test_a_random_draft_costs_tokens_but_no_text(folder, other):
    run = answer(folder, rows("plain"), draft_model=str(other), num_drafts=8)
    assert run.drafts.acceptance < 0.1 and run.token_ids == answer(folder, rows("plain")).token_ids


@pytest.mark.parametrize("kind", ("greedy", "top_p_penalties"))
def test_every_accepted_token_has_its_own_logprobs(folder, kind):
    options = {"logprobs": 3, "prompt_logprobs": 1}
    plain = answer(folder, rows(kind, **options))
    run = answer(folder, rows(kind, **options), speculation=oracle(rows(kind), plain.token_ids, 0.8))
    assert run.drafts.mean_accepted > 1
    for (ours,), (theirs,) in zip(run.answers, plain.answers):
        assert len(ours.logprobs) == len(ours.token_ids) and ours.token_ids == theirs.token_ids
        for mine, other in zip(ours.logprobs + ours.prompt_logprobs[1:], theirs.logprobs + theirs.prompt_logprobs[1:]):
            assert (mine.token_id, mine.token) == (other.token_id, other.token)
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [top.token_id for top in mine.top] == [top.token_id for top in other.top]


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("source", ("oracle", "model"))
def test_chunked_prefill_and_preemption_go_with_speculation(folder, size, source):
    texts = prompts(6, longest=60, seed=22)
    make = lambda: [request(text, row_key=i, max_tokens=50, temperature=1.0) for i, text in enumerate(texts)]  # noqa: E731
    roomy = answer(folder, make())
    tight = {"kv_memory_bytes": 11 * PAGE_BYTES // size, "max_model_len": 128, "max_step_tokens": 13}
    if source == "model":
        tight |= {"draft_model": str(folder), "draft_kv_memory_bytes": 40 * PAGE_BYTES}
    speculation = oracle(make(), roomy.token_ids, 0.8) if source == "oracle" else None
    run = answer(folder, make(), size, speculation=speculation, **tight)
    assert run.token_ids == roomy.token_ids
    assert run.num_preemptions > 0 and run.drafts.num_accepted > 20 and len(set(run.digests)) == 1


def test_drafts_that_fail_preempt_nobody(folder):
    texts = prompts(6, longest=30, seed=4)
    tight = {"kv_memory_bytes": 10 * PAGE_BYTES, "max_model_len": 128}
    make = lambda: [request(text, max_tokens=60) for text in texts]  # noqa: E731
    plain = answer(folder, make(), **tight)
    speculation = oracle(make(), plain.token_ids, 0.0, num_drafts=8)
    run = answer(folder, make(), speculation=speculation, **tight)
    assert run.token_ids == plain.token_ids and run.drafts.num_proposed > 0 == run.drafts.num_accepted
    assert plain.num_preemptions > 0
    assert (run.num_preemptions, run.stats.num_steps) == (plain.num_preemptions, plain.stats.num_steps)


@pytest.mark.parametrize("num_drafts", (2, 3, 8))
def test_a_later_row_never_reads_what_was_rejected(folder, num_drafts):
    """Later rows begin like an earlier one, up to and past the places where its drafts were wrong, and with the drafts."""
    first = lambda: request(TEXTS[0], max_tokens=41)  # noqa: E731
    settings = {"page_size": 4, "max_batch": 1}
    said = answer(folder, [first()]).token_ids[0]
    later = [[*TEXTS[0], *said[:end]] for end in range(3, 41, 4)]
    for row in range(2, 30, 3):
        base = [*TEXTS[0], *said[:row]]
        later.append([*base, (said[row] + 1) % 131, *said[row + 1 : row + 6]])
    make = lambda: [first(), *(request(text, max_tokens=6) for text in later)]  # noqa: E731
    alone = answer(folder, make(), is_prefix_reuse=False, **settings)
    run = answer(folder, make(), speculation=oracle(make(), alone.token_ids, 0.6, num_drafts), **settings)
    assert run.token_ids == alone.token_ids
    assert run.stats.prefill_tokens < alone.stats.prefill_tokens - 4 * len(later), "the prefix cache was not used"
    assert 0 < run.drafts.acceptance < 1


def test_rows_beyond_the_drafts_cache_get_no_drafts(folder):
    """Room for two of eight rows at a time: all are answered, some with drafts, and the draft's pages are given back."""
    settings = {"draft_model": str(folder), "draft_kv_memory_bytes": 10 * PAGE_BYTES}
    blueprint = draw_blueprint(EngineSettings(str(folder), **settings), World())
    speculation = build_speculation(blueprint, 131)
    pool = speculation.drafter.pool
    assert pool.num_pages == 10
    plain = answer(folder, rows("plain", max_tokens=40))
    run = answer(folder, rows("plain", max_tokens=40), speculation=speculation)
    assert run.token_ids == plain.token_ids
    assert run.drafts.acceptance == 1.0 and 1.2 < run.drafts.tokens_per_step < 4.0
    assert pool.num_available == pool.num_pages and not speculation._rows and not speculation.drafter._sequences


def test_a_run_that_breaks_off_leaves_nothing_in_the_drafter(folder):
    """The next run of the same engine starts clean."""

    def full_disk(text: str) -> None:
        raise OutputError("no space left")

    settings = {"draft_model": str(folder)}
    speculation = build_speculation(draw_blueprint(EngineSettings(str(folder), **settings), World()), 131)
    items = rows("plain", max_tokens=40)
    items[0].on_text = lambda text: full_disk(text) if speculation.stats.num_proposals > 9 else None
    with pytest.raises(OutputError):
        answer(folder, items, speculation=speculation)
    pool = speculation.drafter.pool
    assert speculation.stats.num_proposals > 9 and pool.num_available == pool.num_pages and not speculation._rows


def test_samples_of_one_row_draft_apart(folder):
    item = lambda: request(TEXTS[3], n=3, temperature=1.0, max_tokens=30)  # noqa: E731
    plain, run = answer(folder, [item()]), answer(folder, [item()], draft_model=str(folder))
    assert [done.token_ids for done in run.answers[0]] == [done.token_ids for done in plain.answers[0]]
    assert run.drafts.acceptance == 1.0


def test_a_draft_with_a_shorter_context_stops_drafting(folder, tmp_path):
    short = save_model(make_model("qwen2", max_position_embeddings=40), tmp_path)
    make = lambda: [request(TEXTS[0][:10], max_tokens=60)]  # noqa: E731
    run = answer(folder, make(), draft_model=str(short), num_drafts=4)
    assert run.token_ids == answer(folder, make()).token_ids
    assert 20 <= run.drafts.num_accepted <= 40 and run.drafts.acceptance == 1.0
