"""Whole generations against transformers, and the promise that only the row decides what it says (fp32)."""

from __future__ import annotations

import random

import pytest
import torch

from tests.cpu.engine_harness import answer, request
from tests.cpu.tiny import make_model, save_model

SIZES = (1, 2, 3, 4, 8)
FAMILIES = ("qwen2", "llama", "qwen3")


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    reference = make_model(request.param, max_position_embeddings=512)
    return reference, save_model(reference, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return save_model(make_model("qwen2", max_position_embeddings=512), tmp_path_factory.mktemp("qwen2"))


def prompts(count: int, longest: int = 40, seed: int = 0, shared: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    head = [rng.randrange(131) for _ in range(shared)]
    return [head + [rng.randrange(131) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def reference_tokens(model, prompt: list[int], num_tokens: int) -> list[int]:
    config = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "pad_token_id": 0}
    output = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), eos_token_id=None, **config)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("size", SIZES)
def test_200_greedy_tokens_equal_transformers(model, size):
    reference, folder = model
    texts = prompts(3)
    run = answer(folder, [request(prompt, max_tokens=200) for prompt in texts], size)
    assert run.token_ids == [reference_tokens(reference, prompt, 200) for prompt in texts]
    assert len(set(run.digests)) == 1, "the ranks took different steps"


def greedy(folder, texts, order=None, num_tokens=24, size=1, **settings):
    order = list(range(len(texts))) if order is None else order
    run = answer(folder, [request(texts[i], max_tokens=num_tokens) for i in order], size, **settings)
    return [tokens for _, tokens in sorted(zip(order, run.token_ids))], run


def test_neither_batch_nor_order_nor_neighbours_change_a_row(qwen2):
    texts = prompts(64)
    alone, _ = greedy(qwen2, texts, max_batch=1)
    for max_batch in (7, 64):
        assert greedy(qwen2, texts, max_batch=max_batch)[0] == alone
    shuffled = random.Random(5).sample(range(64), 64)
    assert greedy(qwen2, texts, shuffled, max_batch=64)[0] == alone
    assert greedy(qwen2, texts, max_batch=16, look_ahead=3)[0] == alone


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("max_step_tokens", (1, 7, 64))
def test_chunked_prefill_changes_nothing(qwen2, max_step_tokens, size):
    texts = prompts(5, longest=100, seed=2)
    whole, _ = greedy(qwen2, texts)
    assert greedy(qwen2, texts, size=size, max_step_tokens=max_step_tokens)[0] == whole


def test_prefix_reuse_is_used_and_changes_nothing(qwen2):
    texts = prompts(6, longest=9, seed=3, shared=70)
    without, run = greedy(qwen2, texts, is_prefix_reuse=False, max_batch=1)
    for max_batch in (1, 3):
        with_reuse, reused = greedy(qwen2, texts, max_batch=max_batch)
        assert with_reuse == without
        assert reused.stats.prefill_tokens < run.stats.prefill_tokens - 64 * (6 - max_batch) + 1


@pytest.mark.parametrize("size", (1, 3))
def test_preemption_changes_nothing(qwen2, size):
    texts = prompts(6, longest=30, seed=4)
    roomy, _ = greedy(qwen2, texts, num_tokens=60)
    # 2 layers, keys and values, 16 tokens a page, heads of 16 floats; ten pages hold two rows, not six.
    page = 2 * 2 * 16 * 16 * 4 * (2 if size == 1 else 1)
    tight, run = greedy(qwen2, texts, num_tokens=60, size=size, kv_memory_bytes=10 * page, max_model_len=128)
    assert tight == roomy
    assert run.num_preemptions > 0


def sampled(folder, texts, keep=None, size=1, **settings):
    options = {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "max_tokens": 20}
    requests = [request(text, row_key=index, **options) for index, text in enumerate(texts)]
    requests = requests if keep is None else [requests[i] for i in keep]
    return answer(folder, requests, size, **settings).token_ids


def test_a_seeded_row_says_the_same_whoever_is_there_and_at_any_degree(qwen2):
    texts = prompts(12, seed=6)
    together = sampled(qwen2, texts)
    assert len(set(map(tuple, together))) == 12
    assert sampled(qwen2, texts, keep=[5, 3, 0]) == [together[i] for i in (5, 3, 0)]
    assert sampled(qwen2, texts, max_batch=1) == together
    for size in (2, 3, 8):
        assert sampled(qwen2, texts, size=size) == together


def test_a_row_without_a_seed_does_not_disturb_one_with_a_seed(qwen2):
    prompt = prompts(1, seed=7)[0]
    alone = answer(qwen2, [request(prompt, row_key=None, seed=42, temperature=1.0)]).token_ids[0]
    for other_seed in range(3):
        mixed = [request(prompt, row_key=9, seed=other_seed, temperature=1.0), request(prompt, None, 42, temperature=1.0)]
        assert answer(qwen2, mixed).token_ids[1] == alone


def test_samples_of_one_row_differ_and_are_reproducible(qwen2):
    item = lambda: request(prompts(1, longest=60, seed=8)[0], n=4, temperature=1.0)  # noqa: E731
    first, second = answer(qwen2, [item()]), answer(qwen2, [item()], size=2)
    samples = [completion.token_ids for completion in first.answers[0]]
    assert len(set(samples)) == 4
    assert samples == [completion.token_ids for completion in second.answers[0]]


def test_repetition_penalty_equals_transformers(model):
    reference, folder = model
    prompt = [5, 9, 5, 9, 5]
    config = {"do_sample": False, "max_new_tokens": 40, "repetition_penalty": 1.7, "pad_token_id": 0, "eos_token_id": None}
    expected = reference.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 5), **config)[0, 5:].tolist()
    assert answer(folder, [request(prompt, repetition_penalty=1.7, max_tokens=40)]).token_ids[0] == expected


@pytest.mark.parametrize("max_step_tokens", (7, 512))
def test_logprobs_are_the_models_own_whatever_the_filters_and_the_cache(qwen2, max_step_tokens, tmp_path):
    reference = make_model("qwen2", max_position_embeddings=512)
    prompt = prompts(1, longest=60, seed=9, shared=40)[0]
    rows = [
        request(prompt, max_tokens=3),
        request(prompt, temperature=1.0, top_k=1, logprobs=3, prompt_logprobs=2, max_tokens=5),
    ]
    completion = answer(qwen2, rows, max_batch=1, max_step_tokens=max_step_tokens).answers[1][0]
    ids = prompt + list(completion.token_ids)
    with torch.no_grad():
        expected = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), -1)
    assert completion.prompt_logprobs[0] is None and len(completion.prompt_logprobs) == len(prompt)
    entries = list(completion.prompt_logprobs[1:]) + list(completion.logprobs)
    for position, entry in enumerate(entries):
        assert entry.token_id == ids[position + 1]
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
        best = expected[position].topk(len(entry.top))
        assert [other.token_id for other in entry.top] == best.indices.tolist()
    assert all(len(entry.top) == 3 for entry in completion.logprobs)


def test_context_that_fills_up_ends_with_length(qwen2):
    for prompt_len in (126, 127):
        run = answer(qwen2, [request([3] * prompt_len, max_tokens=50)], max_model_len=128)
        assert len(run.token_ids[0]) == 128 - prompt_len and run.answers[0][0].finish_reason == "length"


def test_prefill_and_decode_are_counted_apart(qwen2):
    run = answer(qwen2, [request([1, 2, 3, 4, 5], max_tokens=9)])
    assert (run.stats.prefill_tokens, run.stats.decode_tokens) == (5, 8)
