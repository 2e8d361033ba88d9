"""Captured decode steps against the eager step, on one GPU: `python -m pytest -q tests/gpu/test_graph_step.py`, about 60 s."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch

from tests.gpu.graph_engine import answer_on_gpu, open_replica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCAB = 1009  # odd, and larger than a CTA takes at once
GRAPHS = ("torch", "cuda")
# Log-probability by which a token may fall short of the likeliest and yet be taken: what bf16 steps of another order may differ.
NEAR_TIE = 0.15


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200}
    return {
        family: save_model(make_model(family, **shape), tmp_path_factory.mktemp(family)) for family in ("qwen2", "qwen3")
    } | {"narrow": save_model(make_model("qwen2", vocab_size=VOCAB), tmp_path_factory.mktemp("narrow"))}


def rows(count: int, max_tokens: int = 40, **options) -> list:
    from tests.cpu.engine_harness import request

    rng = random.Random(count)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))] for _ in range(count)]
    return [
        request(prompt, row_key=idx, max_tokens=max_tokens, temperature=float(idx % 2), **options)
        for idx, prompt in enumerate(prompts)
    ]


def filtered_rows(count: int, max_tokens: int = 40) -> list:
    """Rows with rules, among them some without."""
    from tests.cpu.engine_harness import request
    from tests.cpu.test_filtered_burst import SINGLE

    kinds = [*SINGLE, {}, {"temperature": 1.0}, {"temperature": 1.0, "min_tokens": 9, "stop_ids": range(0, VOCAB, 19)}]
    return [
        request(item.prompt_ids, idx, max_tokens=max_tokens, **kinds[(idx + count) % len(kinds)])
        for idx, item in enumerate(rows(count))
    ]


@pytest.mark.parametrize("steps", GRAPHS)
def test_filtered_tokens_are_those_of_the_sampler(folders, steps):
    """fp32; all rules, alone and beside each other; buckets from 1 to 16, captured when they are needed, in mid-run."""
    eager, graph = open_replica(folders["qwen2"], "eager", max_batch=16), open_replica(folders["qwen2"], steps, max_batch=16)
    for count in (1, 2, 5, 13):
        plain, run = answer_on_gpu(eager, filtered_rows(count)), answer_on_gpu(graph, filtered_rows(count))
        assert run.token_ids == plain.token_ids, count
        assert run.stats.num_waits == 0 and plain.stats.num_waits > 0
    uneven = lambda: [item for length in (3, 9, 26, 40) for item in (*filtered_rows(3, length), *rows(1, length))]  # noqa: E731
    assert answer_on_gpu(graph, uneven()).answers == answer_on_gpu(eager, uneven()).answers
    assert answer_on_gpu(graph, rows(9)).answers == answer_on_gpu(eager, rows(9)).answers, "plain steps, after filtered ones"


@pytest.mark.parametrize("steps", GRAPHS)
@pytest.mark.parametrize("family", ("qwen2", "qwen3", "narrow"))
def test_tokens_are_those_of_eager_steps(folders, family, steps):
    """fp32; greedy and drawn rows; every bucket up to 33 rows from below, so with padding, and by rows that end in turn."""
    eager, graph = open_replica(folders[family], "eager", max_batch=33), open_replica(folders[family], steps, max_batch=33)
    for count in (1, 2, 3, 5, 9, 17, 33):
        plain, run = answer_on_gpu(eager, rows(count)), answer_on_gpu(graph, rows(count))
        assert run.token_ids == plain.token_ids, count
        assert run.stats.num_waits == 0 and plain.stats.num_waits > 0
    uneven = lambda: [item for length in (3, 9, 26, 40) for item in rows(4, length)]  # noqa: E731
    assert answer_on_gpu(graph, uneven()).answers == answer_on_gpu(eager, uneven()).answers


@pytest.mark.parametrize("steps", GRAPHS)
def test_stops_arrivals_and_page_shortage(folders, steps):
    from tests.cpu.engine_harness import request
    from tests.cpu.test_burst import DripSource

    settings = {"max_batch": 3, "max_model_len": 128, "kv_memory_bytes": 17 * 2 * 2 * 16 * 2 * 64 * 4}
    eager, graph = open_replica(folders["qwen2"], "eager", **settings), open_replica(folders["qwen2"], steps, **settings)
    free = answer_on_gpu(eager, rows(6, 50)).token_ids

    def stopped() -> list:
        items = rows(6, 50)
        return [request(item.prompt_ids, idx, stop_ids=[ids[7 + idx]], max_tokens=50, temperature=item.params.temperature)
                for idx, (item, ids) in enumerate(zip(items, free))]  # fmt: skip

    plain = answer_on_gpu(eager, stopped())
    assert answer_on_gpu(graph, stopped()).answers == plain.answers
    for interval in (1, 3):
        items = stopped()
        assert answer_on_gpu(graph, items, source=DripSource(items, interval)).answers == plain.answers


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("steps", GRAPHS)
def test_half_types_take_the_likeliest_token_up_to_near_ties(folders, steps, dtype):
    from tests.cpu.engine_harness import request

    greedy = lambda **options: [request(item.prompt_ids, max_tokens=30, **options) for item in rows(9)]  # noqa: E731
    plain = answer_on_gpu(open_replica(folders["qwen2"], "eager", dtype=dtype), greedy(logprobs=5))
    run = answer_on_gpu(open_replica(folders["qwen2"], steps, dtype=dtype), greedy())
    assert run.stats.num_waits == 0
    num_equal = 0
    for (wanted,), ids in zip(plain.answers, run.token_ids):
        split = next((idx for idx, pair in enumerate(zip(wanted.token_ids, ids)) if pair[0] != pair[1]), len(ids))
        num_equal += split
        if split < len(ids):
            likely = {entry.token_id: entry.logprob for entry in wanted.logprobs[split].top}
            assert likely.get(ids[split], -99.0) > max(likely.values()) - NEAR_TIE, (split, ids[split], likely)
    assert num_equal > 9 * 30 // 2


@pytest.mark.parametrize("steps", GRAPHS)
def test_a_step_writes_its_own_slots_and_no_others(folders, steps):
    """Three rows in a bucket of four: the caches of an eager and a captured step agree in the new slots, to the bit elsewhere."""
    from engine.replica import build_batch
    from engine.scheduler import ScheduledRow
    from engine.sequence import Sequence

    replicas = [open_replica(folders["qwen2"], kind, max_batch=4) for kind in ("eager", steps)]
    generator = torch.Generator("cuda").manual_seed(1)
    caches = [(replica.backend.kv.keys, replica.backend.kv.values) for replica in replicas]
    num_slots = min(caches[0][0].shape[1], 1024)
    for part in range(2):
        made = torch.randn(caches[0][part][:, :num_slots].shape, generator=generator, device="cuda")
        for cache in caches:
            cache[part].fill_(float("nan"))
            cache[part][:, :num_slots] = made
    sequences = [
        Sequence(idx, [7 + idx] * (position + 1), 1, 99, num_computed=position, pages=pages)
        for idx, (position, pages) in enumerate(((15, [9]), (16, [30, 4]), (47, [11, 2, 40])))
    ]
    eager, graph = replicas
    with torch.inference_mode():
        wanted = eager.backend.run(build_batch([ScheduledRow.of(s, 1) for s in sequences], 16, eager.device)).argmax(-1).tolist()
        burst = graph.burst_backend.begin(sequences)
        graph.burst_backend.launch(burst, 1)
        assert graph.burst_backend.read(burst) == [[token_id] for token_id in wanted]
    torch.cuda.synchronize()
    slots = [s.pages[s.num_computed // 16] * 16 + s.num_computed % 16 for s in sequences]
    is_new = torch.zeros(num_slots, dtype=torch.bool, device="cuda").index_fill_(0, torch.tensor(slots, device="cuda"), True)
    for part in range(2):
        right, found = (cache[part][:, :num_slots] for cache in caches)
        assert torch.equal(found[:, ~is_new], right[:, ~is_new])
        torch.testing.assert_close(found[:, is_new], right[:, is_new], atol=1e-4, rtol=1e-4)
        assert caches[1][part][:, num_slots:].isnan().all()


@contextmanager
def no_host_syncs():
    """Whatever makes the host wait for the GPU raises."""

    def refuse(*args, **kwargs):
        raise AssertionError("the host waits for the GPU")

    patch = pytest.MonkeyPatch()
    for owner, name in ((torch.cuda, "synchronize"), (torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize")):
        patch.setattr(owner, name, refuse)
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
        patch.undo()


@pytest.mark.parametrize("make_rows", (rows, filtered_rows))
@pytest.mark.parametrize("steps", GRAPHS)
def test_a_burst_never_makes_the_host_wait(folders, steps, make_rows, monkeypatch):
    """From the message that begins a burst to its last token, with pages and noise added on the way."""
    from engine.burst_reader import BurstReader
    from engine.replica import Replica

    graph = open_replica(folders["qwen2"], steps, max_batch=8)
    answer_on_gpu(graph, make_rows(5, 100))  # filtered steps are captured by the first burst that needs them
    guarded = []

    def guard(owner, name, is_due):
        method = getattr(owner, name)

        def call(self, *args):
            if not is_due(self):
                return method(self, *args)
            guarded.append(name)
            with no_host_syncs():
                return method(self, *args)

        monkeypatch.setattr(owner, name, call)

    guard(BurstReader, "read_on", lambda reader: reader._replica.burst is not None)
    guard(Replica, "step", lambda replica: replica.scheduler.running and not replica.scheduler.waiting)
    # The first step is the prefill of rows that still wait; all that follow decode.
    run = answer_on_gpu(graph, make_rows(5, 100))
    assert [len(ids) for ids in run.token_ids] == [100] * 5
    assert guarded.count("read_on") > 10 and guarded.count("step") > 10 and run.stats.num_waits == 0


def test_the_kernel_that_ends_a_step_equals_its_twin():
    from kernels.advance_rows import advance_rows, launch_advance_rows, load_advance_rows
    from kernels.build import Build, default_cache_folder

    kernel = load_advance_rows(Build(default_cache_folder()))
    for count in (1, 7, 256):
        generator = torch.Generator("cuda").manual_seed(count)
        ids = torch.randint(0, 150_000, (count,), generator=generator, device="cuda")
        values = torch.randn(count, generator=generator, device="cuda")
        values[::3], values[1::5] = float("nan"), float("-inf")
        positions = torch.randint(-1, 3, (count,), generator=generator, device="cuda")

        def outputs(start=positions, count=count) -> list:
            step = torch.tensor([(1 << 33) + 5], device="cuda")
            return [torch.full((count,), -7, device="cuda"), start.clone(), step, torch.full((4, 300), -7, device="cuda")]

        found, wanted = outputs(), outputs()
        advance_rows(ids, values, *wanted)
        launch_advance_rows(kernel, ids, values, *found)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted)), count
