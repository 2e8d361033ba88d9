"""Real processes, real collectives: the same logits and the same tokens as transformers at 2 and 3 ranks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.cpu.tiny import make_model, reference_logits, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer
from tests.ranks_harness import run_ranks

FAMILIES = ("qwen2", "llama", "qwen3")
MODEL = Path("models/smollm2-135m")
TOLERANCE = 1e-4  # fp32, other order of sums

QUESTIONS = ("What is the capital of France?", "Name three fruits.", "Why is the sky blue? Answer briefly.")


def answer_all_on_rank(rank: int, size: int, folders: list[str], comm: str, prompts: list, options: dict) -> list:
    """One model after the other in the same processes: starting them is what takes the time."""
    return [answer_on_rank(rank, size, folder, comm, prompts, options) for folder in folders]


def answer_on_rank(rank: int, size: int, folder: str, comm: str, prompts: list, options: dict) -> list[tuple]:
    """One rank's view of `Engine.generate`: ids of prompt and answer, and the answer's log-probabilities."""
    from engine.api import Engine

    with Engine(folder, comm="auto" if size == 1 else comm, kv_memory_bytes=1 << 26) as engine:
        assert engine.comm.name == comm
        ended: list[int] = []
        results = engine.generate(prompts, options, seed=5, on_done=ended.append)
        assert sorted(ended) == ([] if rank else [*range(len(prompts))])
    answers = []
    for result in results:
        done = result.completions[0]
        answers.append((result.prompt_token_ids, done.token_ids, [entry.logprob for entry in done.logprobs or ()], done.text))
    return answers


@pytest.mark.parametrize("size, comm", [(2, "one_shot"), (3, "one_shot"), (2, "gloo")])
def test_logprobs_equal_transformers_in_real_processes(size, comm, tmp_path):
    references = {family: make_model(family) for family in FAMILIES}
    for family, reference in references.items():
        build_tiny_tokenizer(save_model(reference, tmp_path / family))
    rng = random.Random(1)
    prompts = [[rng.randrange(131) for _ in range(length)] for length in (1, 17, 60)]
    options = {"max_tokens": 30, "logprobs": 0, "ignore_eos": True, "temperature": 1.0}
    folders = [str(tmp_path / family) for family in FAMILIES]
    ranks = run_ranks(size, answer_all_on_rank, folders, comm, prompts, options, timeout_s=180)
    assert all(rank == ranks[0] for rank in ranks), "every rank gets the same results"
    for reference, answers in zip(references.values(), ranks[0]):
        check_against(reference, prompts, answers)


def check_against(reference, prompts: list[list[int]], answers: list[tuple]) -> None:
    for prompt, (prompt_ids, token_ids, logprobs, _) in zip(prompts, answers):
        assert list(prompt_ids) == prompt and len(token_ids) == 30
        logits = reference_logits(reference, [*prompt, *token_ids])[len(prompt) - 1 : -1].double()
        expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        assert (torch.tensor(logprobs).double() - expected).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def reference_answers():
    if not (MODEL / "config.json").is_file():
        pytest.fail("the default model is not there; run 'make model'")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    answers = []
    for question in QUESTIONS:
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=48)
        answers.append((tuple(ids[0].tolist()), tuple(output[0, ids.shape[1] :].tolist())))
    return answers


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("size", (1, 2, 3))
def test_the_default_model_answers_as_transformers_does(reference_answers, size):
    comm = "none" if size == 1 else "one_shot"
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    options = {"max_tokens": 48, "temperature": 0}
    ranks = run_ranks(size, answer_on_rank, str(MODEL), comm, chats, options, timeout_s=240)
    assert [(prompt_ids, token_ids) for prompt_ids, token_ids, _, _ in ranks[0]] == reference_answers
    assert "Paris" in ranks[0][0][3]
    assert all(rank == ranks[0] for rank in ranks)
