"""Long prompts by cuDNN's attention, which torch's stands in for here: who takes it and when, the padding, what is captured."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import kernels.long_attention as long_attention
from comm.single import SingleCommunicator
from engine.api import Engine
from engine.eager import EagerStep
from engine.graph.long_prompts import LongPrompts, open_long_prompts
from engine.graph.operators import TorchOperators
from engine.graph.prefill import GraphPrefill, PrefillStep, TwinPrefill
from engine.graph.step_shape import BUCKETS, StepShape
from engine.kv_cache import KvCache
from engine.replica import build_batch
from engine.scheduler import Limits, ScheduledRow
from engine.sequence import Sequence
from kernels.chunk_attention import Chunk, chunk_attention, plan_chunk
from kernels.long_attention import LEAST_TOKENS, TOKENS_MULTIPLE, attend_long, padded_length, takes_long
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.test_eager import make_step, prompt
from tests.cpu.test_prefill_kernels import rand
from tests.cpu.tiny import make_model, save_model

TOLERANCE = 1e-4  # fp32, logits of magnitude about 10: sums in another order, two layers deep
PAGE_SIZE, NUM_PAGES = 16, 600
LIMITS = Limits(8, 8192, 4096)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    options = {"qwen2": {}, "window": {"use_sliding_window": True, "sliding_window": 1000, "max_window_layers": 1}}
    make = lambda extra: make_model("qwen2", max_position_embeddings=4096, **extra)  # noqa: E731
    return {name: save_model(make(extra), tmp_path_factory.mktemp(name)) for name, extra in options.items()}


@pytest.fixture
def calls(monkeypatch):
    """The padded lengths that cuDNN was asked for, in order."""
    found = []

    def attend(q, k, v):
        found.append(q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    monkeypatch.setattr(long_attention, "cudnn_attention", attend)
    return found


# The policy.


def test_the_first_prompt_of_a_padded_length_does_not_plan():
    prompts = LongPrompts(is_usable=True)
    asked = ([1600], [1535], [1700, 2049], [1535], [1793], [1600, 2100, 12], [2048])
    found = [sorted(prompts.choose(lengths)) for lengths in asked]
    assert found == [[], [], [1700], [], [], [1600, 2100], [2048]]


def test_one_step_is_one_choice():
    """Two prompts of one padded length in a step are both its first."""
    prompts = LongPrompts(is_usable=True)
    assert prompts.choose(iter([1600, 1700, 1600])) == frozenset() and prompts.choose([1700, 1536]) == {1700}
    assert prompts.choose([1536]) == {1536}


def test_nothing_is_long_without_cudnn():
    prompts = LongPrompts(is_usable=False)
    assert not prompts.choose([2048]) and not prompts.choose([2048]) and not prompts.takes(4096) and prompts.description == ""
    assert "1536 tokens or more by cuDNN" in LongPrompts(is_usable=True).description


def test_padded_lengths():
    assert [padded_length(length) for length in (1, 256, 257, 1536, 1537, 2047, 2048)] == [256, 256, 512, 1536, 1792, 2048, 2048]
    assert LEAST_TOKENS % TOKENS_MULTIPLE == 0
    # What is captured needs no copy, and has the plan of the prompts in it.
    assert all(bucket % TOKENS_MULTIPLE == 0 for bucket in BUCKETS if bucket >= LEAST_TOKENS)


FITTING = {"is_cuda": True, "dtype": torch.bfloat16, "shape": (9, 2, 128), "device": "cuda:3"}
CUDNN = {"is_available": True, "version": 91900, "capability": (9, 0)}


@pytest.mark.parametrize(
    "changes, is_taken",
    [
        ({}, True), ({"dtype": torch.float16, "shape": (9, 2, 64)}, True), ({"capability": (10, 0)}, True),
        ({"version": 91501}, True), ({"version": 91500}, False), ({"is_available": False, "version": None}, False),
        ({"capability": (8, 9)}, False), ({"dtype": torch.float32}, False), ({"shape": (9, 2, 96)}, False),
        ({"is_cuda": False}, False),
    ],
    ids=str,
)  # fmt: skip
def test_where_cudnns_attention_is_to_be_had(monkeypatch, changes, is_taken):
    values = {**FITTING, **CUDNN, **changes}
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: values["is_available"])
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: values["version"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: {"cuda:3": values["capability"]}[device])
    keys = SimpleNamespace(**{name: values[name] for name in FITTING})
    assert takes_long(keys) == is_taken
    assert open_long_prompts(keys, 1).takes(2048) == is_taken and not open_long_prompts(keys, 2).takes(2048)


# The padding.


@pytest.fixture
def poisoned_memory():
    """What torch allocates holds NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("num_q, num_kv, dim", [(14, 2, 64), (8, 1, 128), (3, 3, 64)])
@pytest.mark.parametrize("length", (1, 5, 255, 256, 257, 300, 512))
def test_padding_is_zeros_that_nobody_sees(calls, monkeypatch, poisoned_memory, length, num_q, num_kv, dim):
    qkv, cache = rand(length, num_q + 2 * num_kv, dim), rand(16, num_kv, dim, seed=1)
    before, attend, strides = qkv.clone(), long_attention.cudnn_attention, []

    def checked(q, k, v):
        assert q.shape == (1, num_q, padded_length(length), dim) and k.shape == v.shape == (1, num_kv, padded_length(length), dim)
        for part in (q, k, v):
            assert not part[:, :, length:].any(), "padding that is not zeros"
            strides.append(part.stride())
        assert (q.data_ptr() == qkv.data_ptr()) == (length % TOKENS_MULTIPLE == 0), "a copy where none is needed"
        out = torch.empty(1, q.shape[2], num_q, dim).transpose(1, 2)  # laid out as q is, as cuDNN's is
        return out.copy_(attend(q, k, v))

    monkeypatch.setattr(long_attention, "cudnn_attention", checked)
    found = attend_long(qkv, num_kv)
    wanted = chunk_attention(qkv, cache, cache, (Chunk(0, length, length),), 16)
    torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
    assert found.is_contiguous() and found.shape == (length, num_q, dim) and torch.equal(qkv, before)
    row, tokens = (num_q + 2 * num_kv) * dim, padded_length(length)
    assert strides == [(row * tokens, dim, row, 1)] * 3, "another plan for each length in a multiple"


def test_a_long_chunk_among_others(calls):
    """Only its own tokens are read and written."""
    num_q, num_kv, dim = 4, 2, 64
    qkv, cache = rand(600, num_q + 2 * num_kv, dim), rand(700, num_kv, dim, seed=1)
    pages = torch.arange(40)
    chunks = [
        plan_chunk(start, count, context, pages.tolist(), pages, 16, window, torch.float32, is_long=True)
        for start, count, context, window in ((0, 100, 0, 50), (100, 300, 0, None), (400, 100, 64, None), (500, 100, 0, 100))
    ]
    assert [chunk.is_long for chunk in chunks] == [False, True, False, True], "not behind cached tokens, and not with a mask"
    found = chunk_attention(qkv, cache, cache, chunks, 16, torch.full((600, num_q, dim), float("nan")))
    assert calls == [512, 256]
    plain = [Chunk(chunk.start, chunk.num_tokens, chunk.kv_len, chunk.cached, chunk.first, chunk.mask) for chunk in chunks]
    torch.testing.assert_close(found, chunk_attention(qkv, cache, cache, plain, 16), atol=2e-6, rtol=0)
    assert len(calls) == 2


# The steps.


def step_of(folder) -> EagerStep:
    step = make_step(folder, SingleCommunicator())
    heads, dim = step.plan.local_kv_heads, step.config.head_dim
    step.kv = KvCache.allocate(step.config.num_layers, NUM_PAGES, PAGE_SIZE, heads, dim, torch.float32, step.device)
    step.kv.keys.fill_(float("nan"))
    step.kv.values.fill_(float("nan"))
    return step


def operators_of(step: EagerStep) -> TorchOperators:
    return TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, 131)


def batch_of(*parts: tuple[int, int]):
    """A step of rows with (cached, new) tokens, on pages of their own."""
    rows, first_page = [], 0
    for key, (num_cached, num_new) in enumerate(parts):
        num_tokens = num_cached + num_new
        pages = list(range(first_page, first_page + -(-num_tokens // PAGE_SIZE)))
        sequence = Sequence(key, prompt(num_tokens, key), num_tokens, 999, pages=pages)
        sequence.num_computed, first_page = num_cached, first_page + len(pages)
        rows.append(ScheduledRow.of(sequence, num_new))
    return build_batch(rows, PAGE_SIZE, torch.device("cpu"))


@pytest.mark.parametrize("family, num_full", [("qwen2", 2), ("window", 1)])
def test_all_layers_of_a_step_go_the_same_way(folders, calls, family, num_full):
    """`num_full`: layers that see everything."""
    eager, step = step_of(folders[family]), step_of(folders[family])
    backend = PrefillStep(operators_of(step), 4096, LongPrompts(is_usable=True))
    for parts, padded in (
        ([(0, 1600)], None),
        ([(0, 1700)], 1792),  # the second of its padded length
        ([(0, 1536)], None),
        ([(1600, 1600)], None),  # a chunk behind cached tokens: no causal attention of cuDNN's
        ([(0, 1600), (0, 1600)], None),  # packed
        ([(20, 1), (0, 1550), (9, 40)], 1792),  # alone between others
        ([(0, 1000)], None),
        ([(0, 1600)], 1792),
    ):
        batch = batch_of(*parts)
        for row in batch.rows:  # what is cached is the same in both
            slots = torch.tensor([page * PAGE_SIZE + at for page in row.pages for at in range(PAGE_SIZE)])[: row.context_len]
            for one, other in ((eager.kv.keys, step.kv.keys), (eager.kv.values, step.kv.values)):
                one[:, slots] = other[:, slots] = rand(*one[:, slots].shape, seed=5)
        calls.clear()
        found = backend.run(batch)
        assert calls == ([] if padded is None else [padded] * num_full), parts
        torch.testing.assert_close(found, eager.run(batch), atol=TOLERANCE, rtol=0)


def test_a_capture_goes_the_way_of_the_plain_run_before_it(folders, calls, monkeypatch):
    """And that run has made the plan. What a graph replays is not called again."""
    events = []

    def capture(graph, **options):
        events.append(("capture", len(calls)))
        return nullcontext()

    for name, fake in {
        "graph_pool_handle": lambda: (0, 0), "Stream": lambda: None, "stream": lambda stream: nullcontext(), "graph": capture,
        "synchronize": lambda: None, "CUDAGraph": lambda: SimpleNamespace(replay=lambda: events.append(("replay", len(calls)))),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("engine.graph.prefill.takes_flash", lambda keys: True)  # buckets of more than a square of fp32 bears
    eager, step = step_of(folders["qwen2"]), step_of(folders["qwen2"])
    monkeypatch.setattr(step.comm, "barrier", lambda: None)
    monkeypatch.setattr(step.comm, "meet", lambda: None, raising=False)
    backend = GraphPrefill(operators_of(step), LIMITS, 2048, long_prompts=LongPrompts(is_usable=True))
    assert backend.description == (
        "graphs up to 2048 tokens, kernels one by one above, prompts of 1536 tokens or more by cuDNN's attention"
    )
    assert backend.shape_for(0, [1600]) == StepShape(0, 1792, 1)
    for length, new_calls in ((1600, 0), (1700, 4), (1650, 0), (2100, 0), (2100, 2), (1537, 0)):
        before = len(calls)
        found = backend.run(batch_of((0, length)))
        assert len(calls) - before == new_calls, length
        if (length, new_calls) != (1650, 0) and length != 1537:  # the fakes replay nothing
            torch.testing.assert_close(found, eager.run(batch_of((0, length))), atol=TOLERANCE, rtol=0)
    # Two layers plainly, then two in the capture; the replays come after.
    assert events == [("capture", 2), ("replay", 4), ("replay", 6)] and calls == [1792] * 4 + [2304] * 2


def test_a_padded_step_goes_by_its_shape(folders, calls, monkeypatch):
    monkeypatch.setattr("engine.graph.prefill.takes_flash", lambda keys: True)
    eager, step = step_of(folders["window"]), step_of(folders["window"])
    backend = TwinPrefill(operators_of(step), LIMITS, 2048, LongPrompts(is_usable=True))
    for length, wanted in ((1600, [1792]), (1280, []), (1281, [1536])):  # one of two layers has a window
        calls.clear()
        found = backend.run(batch_of((0, length)))
        assert calls == wanted
        torch.testing.assert_close(found, eager.run(batch_of((0, length))), atol=TOLERANCE, rtol=0)
    backend.run(batch_of((0, 800), (0, 800)))
    assert calls == [1536], "prompts together are packed"


@pytest.mark.parametrize("max_batch, num_chosen", [(1, 4), (2, 1)])
@pytest.mark.parametrize("size", (1, 2))
def test_all_ranks_choose_alike_and_answer_the_same(folders, calls, size, max_batch, num_chosen):
    """Prompts alone, in chunks, and beside rows that decode; choices of every rank, in the order of its steps."""
    texts = [prompt(length, length) for length in (1600, 1650, 30, 1700, 2500, 2500, 1600)]
    rows = lambda: [request(text, idx, max_tokens=3) for idx, text in enumerate(texts)]  # noqa: E731
    settings = {"max_batch": max_batch, "max_step_tokens": 2000, "is_prefix_reuse": False}
    plain = answer(folders["qwen2"], rows(), size, **settings)
    assert not calls
    chosen: dict[int, list] = {}

    def backends(replica):
        bursts, prompts = twin_bursts(replica), LongPrompts(is_usable=True)
        choose, own = prompts.choose, chosen.setdefault(replica.comm.rank, [])

        def noted(lengths):
            own.append(sorted(found := choose(lengths)))
            return found

        prompts.choose = noted
        replica.backend = TwinPrefill(bursts._operators, replica.scheduler.limits, 0, prompts)
        return bursts

    run = answer(folders["qwen2"], rows(), size, bursts=backends, **settings)
    assert run.answers == plain.answers and len(set(run.digests)) == 1
    assert len(chosen) == size and all(own == chosen[0] for own in chosen.values())
    assert sum(map(len, chosen[0])) == num_chosen and len(calls) == 2 * size * num_chosen


def test_what_the_engine_says_of_its_attention(folders, monkeypatch):
    step = step_of(folders["qwen2"])
    operators, usable = operators_of(step), LongPrompts(is_usable=True)
    monkeypatch.setattr("engine.graph.prefill.takes_flash", lambda keys: True)
    padded = TwinPrefill(operators, LIMITS, 2048, usable)
    backends = (PrefillStep(operators, 4096, usable), PrefillStep(operators, 4096), padded, step)
    cases = ((1, 1536), (1, 1500), (1, 1280), (2, 2048))
    found = []
    for backend in backends:
        engine = SimpleNamespace(replica=SimpleNamespace(backend=backend))
        found.append([Engine.prefill_attention(engine, *case) for case in cases])
    # In a bucket of 1536 tokens, those of 1500 are as many.
    assert found == [["cudnn", None, None, None], [None] * 4, ["cudnn", "cudnn", None, None], [None] * 4]
