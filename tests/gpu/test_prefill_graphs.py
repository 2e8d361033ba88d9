"""Prefill in graphs, launched one by one, and in chunks, against the eager step, on one GPU; and how often the host waits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from kernels.quantize import Fp8Weight
from tests.gpu.graph_engine import answer_on_gpu, open_replica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCAB = 1009
# Two prompts or more of each bucket.
BORDERS = (1, 15, 16, 17, 31, 33, 64, 65, 127, 128, 129, 191, 193, 255, 256, 257, 383, 385, 511, 512, 513, 700)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 208, "max_position_embeddings": 1024}
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    options = {"qwen2": {}, "qwen3": {}, "window": window, "narrow": {"head_dim": 24}}
    made = {}
    for name, extra in options.items():
        family = name if name.startswith("qwen") else "qwen2"
        made[name] = save_model(make_model(family, **{**shape, **extra}), tmp_path_factory.mktemp(name))
    return made


def rows(lengths, max_tokens: int = 4, **options) -> list:
    from tests.cpu.engine_harness import request

    rng = random.Random(7)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [request(prompt, idx, max_tokens=max_tokens, **options) for idx, prompt in enumerate(prompts)]


@pytest.mark.parametrize("steps", ("cuda", "torch"))
@pytest.mark.parametrize("family", ("qwen2", "qwen3", "window", "narrow"))
def test_every_border_of_the_buckets(folders, family, steps):
    """fp32, prompts one by one: plainly, when a bucket is captured, and from graphs that are there."""
    from engine.graph.prefill import GraphPrefill

    eager, graph = (open_replica(folders[family], kind, max_batch=1) for kind in ("eager", steps))
    if steps == "torch":
        graph.backend = GraphPrefill(graph.burst_backend._operators, graph.scheduler.limits, 512)
    wanted = answer_on_gpu(eager, rows(BORDERS))
    for _ in range(2):
        assert answer_on_gpu(graph, rows(BORDERS)).answers == wanted.answers
    assert sorted(shape.num_tokens for shape in graph.backend._graphs) == [16, 32, 64, 128, 192, 256, 384, 512]  # fp32: no more


@pytest.mark.parametrize("family", ("qwen2", "qwen3", "window", "narrow"))
def test_chunks_and_mixed_steps(folders, family):
    """Chunks beside rows that decode, several prompts in a step, no graphs at all: the same tokens as eager steps (fp32)."""
    lengths = (5, 300, 64, 64, 64, 129, 1, 40, 700)
    wanted = answer_on_gpu(open_replica(folders[family], "eager", max_batch=9), rows(lengths, 30))
    for settings in ({"max_batch": 9}, {"max_batch": 4, "max_step_tokens": 50}, {"max_batch": 9, "max_step_tokens": 128},
                     {"max_batch": 2, "graph_tokens": 0}):  # fmt: skip
        run = answer_on_gpu(open_replica(folders[family], "cuda", **settings), rows(lengths, 30))
        assert run.answers == wanted.answers, settings


@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize("family", ("qwen2", "qwen3", "window"))
def test_prompts_beside_rows_that_decode_from_graphs(folders, family, dtype):
    """Rows of many lengths come and go: every padded step gives the logits of the step launched one by one (fp32: the tokens of
    eager steps), when it is captured and when it is replayed."""
    lengths = [3, 90, 17, 64, 1, 33, 200, 5, 128, 50, 20, 77] * 3
    from engine.graph.prefill import PrefillStep

    def requests():
        """They end one after the other, so that most steps that let rows in have others that decode."""
        return [replace(each, params=replace(each.params, max_tokens=4 + idx % 7)) for idx, each in enumerate(rows(lengths))]

    graph = open_replica(folders[family], "cuda", max_batch=6, dtype=dtype)
    backend, found = graph.backend, []

    def both(batch, marks=None):
        logits = type(backend).run(backend, batch).clone()
        wanted = PrefillStep.run(backend, batch)
        scale = 1e-3 if dtype == "float32" else 0.1
        found.append(float((logits - wanted)[:, :VOCAB].abs().max()))
        assert found[-1] < scale, (found, [row.num_tokens for row in batch.rows])
        return logits

    backend.run = both
    run = answer_on_gpu(graph, requests())
    mixed = [shape for shape in backend._graphs if shape.num_single]
    print(f"{family} {dtype}: {len(found)} steps, most {max(found):.2g} apart; {len(backend._graphs)} graphs, {len(mixed)} mixed")
    assert len(mixed) >= 2 and any(shape.num_prompts > 1 for shape in backend._graphs)
    if dtype == "float32":
        assert run.answers == answer_on_gpu(open_replica(folders[family], "eager", max_batch=6), requests()).answers


def scaled_twin(x, weight, bias=None):
    """What a step of many rows computes with FP8 matrices, by torch."""
    from kernels.fp8_linear import MIN_ROWS, scaled_linear
    from kernels.linear import linear

    is_scaled = isinstance(weight, Fp8Weight) and x.shape[0] >= MIN_ROWS
    return scaled_linear(x, weight, bias) if is_scaled else linear(x, weight, bias)


@pytest.mark.parametrize(
    "settings, most",
    (({"dtype": "bfloat16"}, 0.05), ({"dtype": "fp8", "fp8_products": "widened"}, 0.05), ({"dtype": "fp8"}, 0.2)),
    ids=("bf16", "widened", "scaled"),
)
def test_logits_of_other_dtypes(folders, monkeypatch, settings, most):
    """Of the first token: near the eager step's. Quantised activations move them far more than rounding does (by 0.3 for this
    model, whose weights are noise), so there the eager step quantises as well, in torch; what is rounded otherwise before may
    then be quantised otherwise."""
    import engine.eager
    from engine.replica import build_batch
    from engine.scheduler import ScheduledRow
    from engine.sequence import Sequence

    if settings == {"dtype": "fp8"}:
        monkeypatch.setattr(engine.eager, "linear", scaled_twin)
    eager, graph = (open_replica(folders["qwen2"], kind, max_batch=2, **settings) for kind in ("eager", "cuda"))
    for length in (15, 100, 600):
        prompt = rows([length])[0].prompt_ids
        sequence = Sequence(0, prompt, length, 999, pages=list(range(3, 3 + -(-length // 16))))
        batch = build_batch([ScheduledRow.of(sequence, length)], 16, eager.device)
        wanted = eager.backend.run(batch)
        found = [graph.backend.run(batch).clone() for _ in range(3)]  # plainly, padded, and from a graph
        for way, logits in zip(("plain", "padded"), found):
            error = float((logits - wanted).norm() / (wanted - wanted.mean()).norm())
            print(f"{settings}, {length} tokens, {way}: relative error of the logits {error:.4f}")
            assert error < most
        assert torch.equal(found[2], found[1])


@pytest.mark.parametrize("length", (3, 100, 257))
def test_padding_writes_nowhere(folders, length):
    from engine.replica import build_batch
    from engine.scheduler import ScheduledRow
    from engine.sequence import Sequence

    graph = open_replica(folders["qwen2"], "cuda", max_batch=2)
    kv = graph.backend.kv
    pages = random.Random(3).sample(range(kv.num_slots // 16), 40)
    # A longer prompt leaves its slots in the buffers; then each way that a prompt may take.
    for count in (511, 511, length, length, length):
        kv.keys.fill_(float("nan"))
        kv.values.fill_(float("nan"))
        sequence = Sequence(0, rows([count])[0].prompt_ids, count, 999, pages=pages[: -(-count // 16)])
        batch = build_batch([ScheduledRow.of(sequence, count)], 16, graph.device)
        assert graph.backend.run(batch).isfinite().all()
        is_new = torch.zeros(kv.num_slots, dtype=torch.bool, device="cuda").index_fill_(0, batch.slots, True)
        for cache in (kv.keys, kv.values):
            assert cache[:, is_new].isfinite().all() and cache[:, ~is_new].isnan().all(), count


RULES = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1, "frequency_penalty": 0.1}


@pytest.mark.parametrize("rules", ({}, {"temperature": 1.0}, RULES), ids=("greedy", "drawn", "filtered"))
@pytest.mark.parametrize("lengths", ((100,), (700,), (60, 60, 200, 5)))
def test_a_request_waits_at_most_twice(folders, lengths, rules):
    """Prefill and 128 tokens, once the graphs are there."""
    from engine.profile.host_syncs import count_host_syncs

    graph = open_replica(folders["qwen2"], "cuda", max_batch=4)
    for _ in range(2):  # the second captures
        answer_on_gpu(graph, rows(lengths, 129, **rules))
    runs = []
    count = count_host_syncs(lambda: runs.append(answer_on_gpu(graph, rows(lengths, 129, **rules))))
    print(f"prompts of {lengths} and 128 tokens more: {count} host syncs")
    assert count <= 2 and runs[0].stats.num_waits == 0


@pytest.mark.parametrize("graph_tokens", (0, 2048))
def test_long_prompts_before_and_after_cudnn_attends_them(tmp_path, monkeypatch, graph_tokens):
    """The first of a padded length by FlashAttention; the second by cuDNN, plainly or when it is captured; the third by its plan
    or from its graph. Tokens in bf16 part at near-ties only, from each other and from transformers."""
    import kernels.long_attention as long_attention
    from tests.near_ties import MOST_TIES, Reference
    from tests.token_cases import Rows, save_mild_model

    calls, attend = [], long_attention.cudnn_attention
    monkeypatch.setattr(long_attention, "cudnn_attention", lambda q, k, v: calls.append(q.shape[2]) or attend(q, k, v))
    folder, long_rows = save_mild_model(tmp_path), Rows.draw((1600, 2048, 3000), 40)
    settings = {"dtype": "bfloat16", "max_batch": 1, "max_model_len": 4096, "max_step_tokens": 4096, "is_prefix_reuse": False}
    replica = open_replica(folder, "cuda", graph_tokens=graph_tokens, **settings)
    assert "cuDNN's attention" in replica.backend.description
    runs, called = [], []
    for _ in range(3):
        calls.clear()
        runs.append(answer_on_gpu(replica, long_rows.requests).token_ids)
        called.append(list(calls))
    each = {length: [length] * 3 for length in (1792, 2048, 3072)}  # three layers
    if graph_tokens:  # computed and captured, then replayed
        assert called == [[], each[1792] * 2 + each[2048] * 2 + each[3072], each[3072]]
    else:
        assert called == [[], each[1792] + each[2048] + each[3072], each[1792] + each[2048] + each[3072]]
    assert runs[2] == runs[1]
    reference = Reference(folder, "cuda")
    for what, wanted, found in (("cuDNN's against FlashAttention's", runs[0], runs[1]), ("cuDNN's", None, runs[1])):
        tally = reference.compare(long_rows.prompts, wanted, found, torch.bfloat16)
        print(f"{what}: {tally}")
        assert tally.tie_rate < MOST_TIES


def test_a_prompt_of_30_000_tokens(tmp_path_factory):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 208, "num_attention_heads": 4}
    folder = save_model(make_model("qwen2", **shape, max_position_embeddings=32768), tmp_path_factory.mktemp("long"))
    settings = {"max_batch": 1, "dtype": "bfloat16", "max_model_len": 30_100}
    wanted = answer_on_gpu(open_replica(folder, "eager", max_step_tokens=2048, **settings), rows([30_000], 3, logprobs=20))
    for step_tokens in (2048, 4096, 32_768):
        run = answer_on_gpu(open_replica(folder, "cuda", max_step_tokens=step_tokens, **settings), rows([30_000], 3, logprobs=20))
        found, right = run.answers[0][0].logprobs[0], wanted.answers[0][0].logprobs[0]
        likely = {entry.token_id: entry.logprob for entry in right.top}
        print(f"chunks of {step_tokens}: {found.token_id} at {found.logprob:.3f}, eager {right.token_id} at {right.logprob:.3f}")
        assert likely.get(found.token_id, -99.0) > max(likely.values()) - 0.15
