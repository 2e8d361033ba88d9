"""The eager step against transformers: every family, every TP degree, one shot, chunked, decode, scattered pages."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from comm.communicator import Communicator
from comm.threads import run_ranks
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.eager import EagerStep
from engine.kv_cache import KvCache
from engine.shard_plan import ShardPlan
from engine.step_batch import RowSpan, StepBatch
from engine.weights import load_weights
from tests.cpu.tiny import LLAMA3, YARN, make_model, reference_logits, save_model

TOLERANCE = 1e-4  # fp32, logits of magnitude about 10: sums in another order, two layers deep
PAGE_SIZE, NUM_PAGES = 4, 96
CPU = torch.device("cpu")


class Rows:
    """Feeds token sequences through a step, each row on its own pages, and collects logits by (row, position)."""

    def __init__(self, step: EagerStep, tables: list[list[int]]):
        self.step, self.tables = step, tables
        self.done = [0] * len(tables)

    def feed(self, parts: dict[int, list[int]]) -> dict[int, torch.Tensor]:
        """One step: `parts[row]` are the row's next tokens. Returns full-vocabulary logits of each (rank 0 only)."""
        ids, positions, slots, spans = [], [], [], []
        for row, tokens in parts.items():
            begin = self.done[row]
            pages = tuple(self.tables[row][: -(-(begin + len(tokens)) // PAGE_SIZE)])
            spans.append(RowSpan(len(ids), len(tokens), begin, pages))
            for position, token in enumerate(tokens, begin):
                ids.append(token)
                positions.append(position)
                slots.append(pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE)
            self.done[row] += len(tokens)
        numbers = [torch.tensor(values) for values in (ids, positions, slots, range(len(ids)))]
        local = self.step.run(StepBatch(*numbers, rows=tuple(spans)))
        assert local.dtype == torch.float32 and local.shape[1] == self.step.plan.local_vocab
        gathered = self.step.comm.gather(local)
        if gathered is None:
            return {}
        full_vocab = self.step.config.full_vocab
        assert bool((gathered[:, full_vocab:] == float("-inf")).all())
        split = torch.split(gathered[:, :full_vocab], [span.num_tokens for span in spans])
        return dict(zip(parts, split))


def page_tables(count: int, is_scattered: bool) -> list[list[int]]:
    pages = list(range(NUM_PAGES))
    if is_scattered:
        random.Random(7).shuffle(pages)
    share = NUM_PAGES // count
    return [pages[i * share : (i + 1) * share] for i in range(count)]


def make_step(folder: Path, comm: Communicator, dtype: torch.dtype = torch.float32) -> EagerStep:
    config = load_config(folder)
    plan = ShardPlan.make(config, comm.size, comm.rank)
    weights = load_weights(Checkpoint.open(folder, config), plan, dtype, CPU)
    kv = KvCache.allocate(config.num_layers, NUM_PAGES, PAGE_SIZE, plan.local_kv_heads, config.head_dim, dtype, CPU)
    # Poisoned, so that reading a slot nobody wrote shows.
    kv.keys.fill_(float("nan"))
    kv.values.fill_(float("nan"))
    return EagerStep(config, plan, weights, comm, kv)


def prompt(length: int, seed: int = 0, vocab: int = 131) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def one_shot(rows: Rows, tokens: list[int]) -> torch.Tensor | None:
    return rows.feed({0: tokens}).get(0)


def in_parts(rows: Rows, tokens: list[int]) -> torch.Tensor | None:
    """Two uneven prefill chunks with history, then the rest by single-token decode."""
    cuts = [0, 5, 22, *range(23, len(tokens) + 1)]
    parts = [rows.feed({0: tokens[a:b]}).get(0) for a, b in zip(cuts, cuts[1:])]
    return torch.cat(parts) if parts[0] is not None else None


MODELS = {
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn-raised": {"family": "qwen2", "rope_parameters": YARN, "max_position_embeddings": 256},
    "qwen2-yarn": {"family": "qwen2", "rope_parameters": YARN, "max_position_embeddings": 64},
    "llama3": {"family": "llama", "rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "llama-9-3": {
        "family": "llama", "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8,
        "tie_word_embeddings": True,
    },
    "qwen3": {"family": "qwen3", "head_dim": 24, "attention_bias": True},
    "qwen2-window": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
    },
    "qwen2-window-all": {
        "family": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0,
    },
    "qwen2-window-off": {"family": "qwen2", "use_sliding_window": False, "sliding_window": 6, "max_window_layers": 0},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def model_case(request, tmp_path_factory):
    model = make_model(**MODELS[request.param])
    folder = save_model(model, tmp_path_factory.mktemp(request.param), max_shard_size="60KB")
    tokens = prompt(30)
    return folder, tokens, reference_logits(model, tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_logits_equal_transformers(model_case, size):
    folder, tokens, expected = model_case

    def target(comm: Communicator):
        step = make_step(folder, comm)
        whole = one_shot(Rows(step, page_tables(1, is_scattered=False)), tokens)
        step.kv.keys.fill_(float("nan"))
        scattered = in_parts(Rows(step, page_tables(1, is_scattered=True)), tokens)
        return whole, scattered

    whole, scattered = run_ranks(size, target)[0]
    torch.testing.assert_close(whole, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(scattered, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("size", [1, 3])
def test_mixed_batch_equals_each_row_alone(tmp_path, size):
    """Case 95: lengths 3, 50 and 100 together, prefill beside decode, positions from 0 in every row, no padding."""
    model = make_model("qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=1)
    folder = save_model(model, tmp_path)
    sequences = [prompt(length + 3, seed=length) for length in (3, 50, 100)]

    def target(comm: Communicator):
        rows = Rows(make_step(folder, comm), page_tables(3, is_scattered=True))
        first = rows.feed({0: sequences[0][:-3], 1: sequences[1][:20]})
        second = rows.feed({0: sequences[0][-3:-2], 1: sequences[1][20:-3], 2: sequences[2][:-3]})
        third = rows.feed({2: sequences[2][-3:-2], 0: sequences[0][-2:], 1: sequences[1][-3:]})
        fourth = rows.feed({2: sequences[2][-2:]})
        if comm.rank:
            return None
        steps = (first, second, third, fourth)
        return [torch.cat([step[row] for step in steps if row in step]) for row in range(3)]

    for tokens, found in zip(sequences, run_ranks(size, target)[0]):
        torch.testing.assert_close(found, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_only_asked_logits_are_returned_and_none_is_allowed(tmp_path):
    model = make_model("qwen2")
    folder = save_model(model, tmp_path)
    tokens = prompt(9)
    span = (RowSpan(0, 9, 0, (3, 4, 5)),)
    places = torch.arange(9)

    def target(comm: Communicator):
        step = make_step(folder, comm)
        none = step.run(StepBatch(torch.tensor(tokens), places, 12 + places, torch.tensor([], dtype=torch.long), span))
        last = step.run(StepBatch(torch.tensor(tokens), places, 12 + places, torch.tensor([8]), span))
        return none.shape, last

    shape, last = run_ranks(1, target)[0]
    assert shape == (0, 131)
    torch.testing.assert_close(last[0], reference_logits(model, tokens)[8], atol=TOLERANCE, rtol=0)


def test_step_leaves_its_inputs_and_foreign_slots_alone(tmp_path):
    folder = save_model(make_model("qwen2"), tmp_path)
    tokens = torch.tensor(prompt(9))
    places = torch.arange(9)

    def target(comm: Communicator):
        step = make_step(folder, comm)
        batch = StepBatch(
            tokens.clone(), places.clone(), 12 + places, torch.tensor([8]), (RowSpan(0, 9, 0, (3, 4, 5)),)
        )
        before = [t.clone() for t in (step.weights.embedding, step.weights.layers[0].qkv.to_dense())]
        step.run(batch)
        assert torch.equal(batch.token_ids, tokens) and torch.equal(batch.positions, places)
        assert torch.equal(step.weights.embedding, before[0]) and torch.equal(
            step.weights.layers[0].qkv.to_dense(), before[1]
        )
        written = ~step.kv.keys[:, :, :, 0].isnan().all(dim=2)
        assert bool((written.nonzero()[:, 1].unique() == 12 + places).all())

    run_ranks(2, target)


def test_bfloat16_follows_fp32(tmp_path):
    """Half precision runs and stays near fp32: bf16 keeps 8 bits, so two layers stay within a few percent."""
    model = make_model("qwen3")
    folder = save_model(model, tmp_path)
    tokens = prompt(30)

    def target(comm: Communicator):
        return one_shot(Rows(make_step(folder, comm, torch.bfloat16), page_tables(1, is_scattered=True)), tokens)

    found, expected = run_ranks(2, target)[0], reference_logits(model, tokens)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
