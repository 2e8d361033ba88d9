"""Steps that prefill, as a GPU takes them, against the eager step: buckets, chunks, mixed steps, what they write (fp32)."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from comm.single import SingleCommunicator
from engine.graph.operators import TorchOperators
from engine.graph.prefill import GraphPrefill, TwinPrefill
from engine.graph.step_shape import BUCKETS, MANY_STEPS, StepShape, buckets_up_to, tokens_worth_a_graph
from engine.replica import build_batch
from engine.scheduler import Limits, ScheduledRow
from engine.sequence import Sequence
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.test_burst import prompts
from tests.cpu.test_eager import make_step, page_tables, prompt
from tests.cpu.tiny import make_model, save_model

BORDERS = sorted({1, 2} | {bucket + offset for bucket in BUCKETS if bucket <= 512 for offset in (-1, 0, 1)})
TOLERANCE = 1e-4  # fp32, logits of magnitude about 10: sums in another order, two layers deep
FAMILIES = {
    "qwen2": {},
    "qwen3": {"head_dim": 24},
    "llama": {},
    "window": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, options in FAMILIES.items():
        family = "qwen2" if name == "window" else name
        made[name] = save_model(make_model(family, max_position_embeddings=1024, **options), tmp_path_factory.mktemp(name))
    return made


def prefill_for(graph_tokens: int):
    """Makes both backends of a rank: bursts, and prefill in padded buckets up to `graph_tokens`."""

    def backends(replica):
        bursts = twin_bursts(replica)
        replica.backend = TwinPrefill(bursts._operators, replica.scheduler.limits, graph_tokens)
        return bursts

    return backends


def test_buckets():
    assert buckets_up_to(0) == ()
    assert buckets_up_to(1) == buckets_up_to(16) == (16,)
    assert buckets_up_to(17) == (16, 32)
    assert buckets_up_to(512)[-1] == 512 and buckets_up_to(2048) == buckets_up_to(9999) == BUCKETS


def test_which_prompts_take_which_bucket(folders):
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    backend = TwinPrefill(operators, Limits(4, 200, 1024), graph_tokens=512)
    found = [backend.shape_for(0, [length]) for length in (1, 16, 17, 128, 129, 200)]
    assert found == [StepShape(0, bucket, 1) for bucket in (16, 16, 32, 128, 192, 256)]
    assert backend.shape_for(0, [201]) is None and backend.shape_for(0, []) is None
    # Several together: as many tokens and as many prompts as a bucket has room for.
    assert backend.shape_for(0, [5, 6]) == StepShape(0, 16, 4) and backend.shape_for(0, [100, 101]) is None
    assert [backend.shape_for(0, [1] * count).num_tokens for count in (4, 5, 8, 9)] == [16, 128, 128, 192]
    assert backend.shape_for(1, [5]) is None  # torch's operators take no rows of one token apart
    assert TwinPrefill(operators, Limits(4, 200, 1024), graph_tokens=0).shape_for(0, [5]) is None


def test_steps_that_launches_bind_are_worth_a_graph():
    """A layer's elements of 0.5B, 7B, 72B at TP=2, and a model so wide that none is."""
    assert [tokens_worth_a_graph(int(elems)) for elems in (14.9e6, 233e6, 439e6, 1e11)] == [2048, 512, 256, 0]
    assert tokens_worth_a_graph(int(439e6), is_fp8=True) == 512


def test_rows_that_decode_take_few_shapes(folders):
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    operators.most_single = 40
    backend = TwinPrefill(operators, Limits(99, 4096, 1024), graph_tokens=512)
    found = [backend.shape_for(count, [300, 200]).num_single for count in (0, 1, 4, 5, 16, 17, 40)]
    assert found == [0, 4, 4, 16, 16, 40, 40] and backend.shape_for(41, [300]) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_border_of_the_buckets(folders, family):
    """Each prompt alone: the first token, and those that follow from what was left in the cache."""
    rows = lambda: [request(prompt(length, seed=length), length, max_tokens=3) for length in BORDERS]  # noqa: E731
    plain = answer(folders[family], rows(), max_batch=1)
    for graph_tokens in (512, 40):
        assert answer(folders[family], rows(), max_batch=1, bursts=prefill_for(graph_tokens)).answers == plain.answers


@pytest.mark.parametrize("size", (1, 2, 3))
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_mixed_steps(folders, family, size):
    """Prompts in chunks of a few tokens beside rows that decode; several whole prompts in a step, some equally long."""
    texts = [*prompts(6, longest=60), *(prompt(21, seed) for seed in range(3))]
    rows = lambda: [request(text, idx, max_tokens=4 + idx, temperature=idx % 2) for idx, text in enumerate(texts)]  # noqa: E731
    plain = answer(folders[family], rows(), size)
    for settings in ({}, {"max_step_tokens": 7}, {"max_batch": 3, "max_step_tokens": 33}):
        run = answer(folders[family], rows(), size, bursts=prefill_for(512), **settings)
        assert run.answers == plain.answers, settings


@pytest.mark.parametrize("family", FAMILIES)
def test_a_larger_shape_stands_in(folders, family):
    """Every step is padded to the largest shape there is, a prompt alone to one of several."""

    def prefill(replica):
        backend = prefill_for(512)(replica)
        replica.backend._padded_to = lambda shape: StepShape(shape.num_single, 256, 16)
        return backend

    rows = lambda: [request(text, idx, max_tokens=4 + idx) for idx, text in enumerate(prompts(6, longest=60))]  # noqa: E731
    for settings in ({}, {"max_batch": 1}, {"max_batch": 3}):
        run = answer(folders[family], rows(), bursts=prefill, max_step_tokens=200, **settings)
        assert run.answers == answer(folders[family], rows(), **settings).answers, settings


def test_a_captured_shape_stands_in_for_a_smaller_one_until_many_come(folders, monkeypatch):
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    backend = GraphPrefill(operators, Limits(8, 512, 1024), 512)
    asked = StepShape(4, 256, 16)
    assert [backend._padded_to(asked) for _ in range(3)] == [None, asked, asked], "the second is captured"
    backend._graphs = dict.fromkeys((StepShape(4, 512, 32), StepShape(0, 384, 24), StepShape(16, 384, 24), asked))
    assert backend._padded_to(asked) == asked
    small, alone = StepShape(0, 256, 16), StepShape(0, 384, 1)
    found = [backend._padded_to(small) for _ in range(MANY_STEPS + 1)]
    assert found == [asked] * MANY_STEPS + [small], "the smallest that holds it, until a capture is worth while"
    assert backend._padded_to(alone) == StepShape(0, 384, 24), "a prompt alone among those that could be several"
    assert backend._padded_to(StepShape(64, 256, 16)) is None and backend._padded_to(StepShape(4, 128, 8)) is None


def test_prompt_logprobs_and_reused_prefixes(folders):
    texts = [prompt(70, 1), prompt(70, 1)[:64] + prompt(9, 2), prompt(70, 1)]
    rows = lambda: [request(text, max_tokens=5, prompt_logprobs=1 if text is texts[0] else None) for text in texts]  # noqa: E731
    plain = answer(folders["qwen2"], rows(), max_batch=1)
    run = answer(folders["qwen2"], rows(), max_batch=1, bursts=prefill_for(512))
    assert run.token_ids == plain.token_ids and run.stats.prefill_tokens < sum(map(len, texts))
    for found, wanted in zip(run.answers[0][0].prompt_logprobs[1:], plain.answers[0][0].prompt_logprobs[1:]):
        assert (found.token_id, found.logprob) == (wanted.token_id, pytest.approx(wanted.logprob, abs=TOLERANCE))


def steps_of(folder):
    """The eager step and the padded one, each with a cache of its own, and what they share as (keys, values)."""
    eager, padded = make_step(folder, SingleCommunicator()), make_step(folder, SingleCommunicator())
    operators = TorchOperators(padded.config, padded.plan, padded.weights, padded.comm, padded.kv, 131)
    generator = torch.Generator().manual_seed(1)
    for part in ("keys", "values"):
        made = torch.randn(getattr(eager.kv, part).shape, generator=generator)
        made[:, ::3] = float("nan")  # what nobody may read
        for step in (eager, padded):
            getattr(step.kv, part).copy_(made)
    return eager, padded, TwinPrefill(operators, Limits(4, 512, 1024), graph_tokens=512)


@pytest.mark.parametrize("length", (1, 5, 16, 17, 63, 100, 250))
@pytest.mark.parametrize("family", ("qwen2", "window"))
def test_padding_writes_nowhere(folders, family, length):
    eager, padded, backend = steps_of(folders[family])
    before = {part: getattr(padded.kv, part).clone() for part in ("keys", "values")}
    pages = page_tables(1, is_scattered=True)[0]
    sequence = Sequence(0, prompt(length), length, 999, pages=pages[: -(-length // eager.kv.page_size)])
    batch = build_batch([ScheduledRow.of(sequence, length)], eager.kv.page_size, eager.device)
    # The step before leaves a longer prompt's tokens and slots in the buffers.
    longest = Sequence(1, prompt(255), 255, 999, pages=pages[:64])
    backend.run(build_batch([ScheduledRow.of(longest, 255)], eager.kv.page_size, eager.device))
    for part, kept in before.items():
        getattr(padded.kv, part).copy_(kept)
    wanted, found = eager.run(batch), backend.run(batch)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE, rtol=0)
    is_new = torch.zeros(eager.kv.num_slots, dtype=torch.bool)
    is_new[batch.slots] = True
    assert int(is_new.sum()) == length
    for part, kept in before.items():
        now = getattr(padded.kv, part)
        torch.testing.assert_close(now[:, is_new], getattr(eager.kv, part)[:, is_new], atol=TOLERANCE, rtol=0)
        assert torch.equal(now[:, ~is_new].nan_to_num(7.0), kept[:, ~is_new].nan_to_num(7.0)), "padding has written"


def test_a_step_whose_logits_nobody_wants(folders):
    eager, _, backend = steps_of(folders["qwen2"])
    sequence = Sequence(0, prompt(30), 30, 999, pages=list(range(8)))
    batch = build_batch([ScheduledRow.of(sequence, 20)], eager.kv.page_size, eager.device)
    assert backend.run(batch).shape == eager.run(batch).shape == (0, 131)


@pytest.mark.slow
def test_a_prompt_of_30_000_tokens(tmp_path):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 16, "head_dim": 8}
    folder = save_model(make_model("qwen2", max_position_embeddings=32768, intermediate_size=16, **shape), tmp_path)
    row = lambda: [request(prompt(30_000), max_tokens=4)]  # noqa: E731
    plain = answer(folder, row(), max_step_tokens=1000)
    assert answer(folder, row(), max_step_tokens=2048, bursts=prefill_for(512)).answers == plain.answers


def test_a_bucket_is_captured_by_its_second_prompt(folders, monkeypatch):
    """So neither the start nor a first token waits for a capture. The graph itself needs a GPU."""
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    backend = GraphPrefill(operators, Limits(4, 512, 1024), 512)
    padded = []
    monkeypatch.setattr(backend, "_run", lambda shape: padded.append(shape) or backend._step(shape))
    found = []
    for length in (20, 100, 30, 100, 20):
        sequence = Sequence(0, prompt(length), length, 999, pages=list(range(32)))
        batch = build_batch([ScheduledRow.of(sequence, length)], step.kv.page_size, step.device)
        found.append((length, backend.run(batch).clone()))
    assert padded == [StepShape(0, bucket, 1) for bucket in (32, 128, 32)]
    for (_, plain), (_, later) in ((found[0], found[4]), (found[1], found[3])):
        torch.testing.assert_close(later, plain, atol=TOLERANCE, rtol=0)


def test_ranks_that_share_a_gpu_capture_no_large_steps(folders, monkeypatch):
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    operators.most_single = 8
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    backend = GraphPrefill(operators, Limits(8, 512, 1024), 512, most_rows=64)
    assert backend.description.startswith("graphs up to 64 tokens")
    assert [backend.shape_for(0, [length]) is None for length in (64, 65, 500)] == [False, True, True]
    assert backend.shape_for(8, [20, 10]) == StepShape(8, 32, 4) and backend.shape_for(1, [40]) is None, "rows that decode count"


def test_a_capture_keeps_to_the_order_of_ranks_that_share_a_gpu(folders, monkeypatch):
    """What asks for memory, or gives it back, does so while all ranks are idle; the capture's own result is what is replayed."""
    step = make_step(folders["qwen2"], SingleCommunicator())
    operators = TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)
    calls = []
    graph = SimpleNamespace(replay=lambda: calls.append("replay"))

    def capture(captured, pool, stream, capture_error_mode):
        assert captured is graph and capture_error_mode == "thread_local"
        calls.append("capture")
        return nullcontext()

    for name, fake in {
        "graph_pool_handle": lambda: (0, 0), "Stream": lambda: None, "stream": lambda stream: nullcontext(),
        "synchronize": lambda: calls.append("synchronize"), "CUDAGraph": lambda: graph, "graph": capture,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(step.comm, "barrier", lambda: calls.append("barrier"))
    monkeypatch.setattr(step.comm, "meet", lambda: calls.append("meet"))
    backend = GraphPrefill(operators, Limits(4, 512, 1024), 512, stock_up=lambda: calls.append("stock up"))
    run_step = backend._step
    monkeypatch.setattr(backend, "_step", lambda shape: calls.append("step") or run_step(shape))
    sequence = Sequence(0, prompt(20), 20, 999, pages=list(range(8)))
    batch = build_batch([ScheduledRow.of(sequence, 20)], step.kv.page_size, step.device)
    plain, first, replayed = (backend.run(batch).clone() for _ in range(3))
    idle = ["synchronize", "barrier"]
    assert calls == [*idle, "stock up", "barrier", "step", *idle, "capture", "step", "stock up", "barrier", "meet", "replay"]
    torch.testing.assert_close(first, plain, atol=TOLERANCE, rtol=0)
    assert torch.equal(replayed, first)
