"""Steps with drafts as graphs on one GPU: their kernels against the twins, and the engine's tokens with and without."""

from __future__ import annotations

import random

import pytest
import torch

from tests.gpu.graph_engine import answer_on_gpu, open_replica

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

VOCAB = 1009
RULES = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "logit_bias": ((3, 2.0), (9, -50.0))},
}


@pytest.fixture(scope="module")
def build():
    from kernels.build import Build, default_cache_folder

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    return Build(default_cache_folder())


@pytest.mark.parametrize("rows, num_drafts", [(1, 1), (5, 4), (16, 8), (16, 16)])
def test_accept_drafts(build, rows, num_drafts):
    from kernels.accept_drafts import accept_drafts, launch_accept_drafts, load_accept_drafts
    from tests.cpu.test_device_drafts import draw_case

    kernel, rng = load_accept_drafts(build), random.Random(rows)
    for step_number in range(30):
        ids, values, drafts = draw_case(rng, rows, num_drafts)
        positions = torch.tensor([rng.randrange(3, 40) if rng.random() < 0.8 else -1 for _ in range(rows)])
        outcomes = []
        for launch in (accept_drafts, lambda *tensors: launch_accept_drafts(kernel, *tensors)):
            state = [
                torch.full((rows,), 5), positions.clone(), torch.full((rows + 1, 64), 7, dtype=torch.int32),
                torch.tensor([step_number]), torch.zeros(4, rows * (num_drafts + 1) + 3, dtype=torch.int64),
            ]  # fmt: skip
            state = [tensor.cuda() for tensor in state]
            launch(torch.tensor(ids).flatten().cuda(), torch.tensor(values).flatten().cuda(), torch.tensor(drafts).cuda(), *state)
            outcomes.append([tensor.tolist() for tensor in state])
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("longest", (1, 7, 600, 5000))
def test_ngram_drafts(build, longest):
    from kernels.ngram_drafts import launch_ngram_drafts, load_ngram_drafts, ngram_drafts

    kernel, generator = load_ngram_drafts(build), torch.Generator().manual_seed(longest)
    for num_ids, num_drafts in ((2, 1), (6, 8), (50, 16), (100_000, 5)):
        history = torch.randint(0, num_ids, (5, longest + 3), generator=generator).int().cuda()
        positions = torch.randint(0, longest, (5,), generator=generator).cuda()
        positions[3] = -1
        drafts = [torch.full((5, num_drafts), -5, device="cuda") for _ in range(2)]
        ngram_drafts(history, positions, drafts[0])
        launch_ngram_drafts(kernel, history, positions, drafts[1])
        assert torch.equal(*drafts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": VOCAB, "hidden_size": 256, "head_dim": 64, "intermediate_size": 208, "max_position_embeddings": 1024}
    small = {**shape, "num_hidden_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    window = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    options = {"qwen2": shape, "qwen3": shape, "window": {**shape, **window}, "narrow": {**shape, "head_dim": 24}, "small": small}
    made = {}
    for name, extra in options.items():
        family = name if name.startswith("qwen") else "qwen2"
        made[name] = save_model(make_model(family, **extra), tmp_path_factory.mktemp(name))
    return made


def rows(lengths, max_tokens: int = 60, **options) -> list:
    """Prompts that repeat themselves."""
    from tests.cpu.engine_harness import request

    rng = random.Random(7)
    prompts = [([rng.randrange(VOCAB) for _ in range(-(-length // 2))] * 2)[:length] for length in lengths]
    return [request(prompt, idx, max_tokens=max_tokens, **options) for idx, prompt in enumerate(prompts)]


def speculate(depth):
    from engine.drafts.depth import FixedDepth
    from engine.drafts.speculation import Speculation

    return Speculation(None, FixedDepth(depth) if isinstance(depth, int) else depth)


LENGTHS = (5, 300, 64, 15, 16, 17, 1, 40, 130)


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("family", ("qwen2", "qwen3", "window", "narrow"))
def test_tokens_are_those_without_drafts(folders, family, rules):
    """fp32; drafts of the row itself, of the model itself and of noise; 1 to 8 of them; alone and in batches."""
    wanted = answer_on_gpu(open_replica(folders[family], "eager", max_batch=9), rows(LENGTHS, **RULES[rules]))
    acceptance = {}
    for name, settings in {
        "ngram": {"is_ngram": True},
        "itself": {"draft_model": str(folders[family])},
        "noise": {"draft_model": str(folders["small"])},
    }.items():
        for max_batch in (1, 9):
            replica = open_replica(folders[family], "cuda", max_batch=max_batch, num_drafts=8, **settings)
            for num_drafts in (1, 2, 4, 8):
                run = answer_on_gpu(replica, rows(LENGTHS, **RULES[rules]), speculation=speculate(num_drafts))
                assert run.answers == wanted.answers, (name, max_batch, num_drafts)
                acceptance[name, max_batch, num_drafts] = run.drafts.acceptance
    print({key: round(value, 3) for key, value in acceptance.items()})
    assert all(value > 0.7 for (name, *_), value in acceptance.items() if name == "itself"), "a model guesses its own tokens"


def test_no_step_with_drafts_waits_for_the_device(folders):
    from engine.profile.host_syncs import count_host_copies, count_host_syncs

    replica = open_replica(folders["qwen2"], "cuda", max_batch=3, draft_model=str(folders["small"]))
    for _ in range(3):  # the draft model's prefill is captured when a shape comes for the second time, which waits
        answer_on_gpu(replica, rows((20, 30, 40), 20), speculation=speculate(4))
    counts = {}
    for count in (count_host_syncs, count_host_copies):
        counts[count.__name__] = [
            count(lambda n=n: answer_on_gpu(replica, rows((20, 30, 40), n), speculation=speculate(4))) for n in (20, 60)
        ]
    print(counts)
    assert all(few == many for few, many in counts.values()), "40 tokens more wait no more"


@pytest.mark.parametrize("options", ({"repetition_penalty": 1.3}, {"temperature": 0.9, "top_k": 30, "presence_penalty": 0.5}))
def test_rows_with_penalties_get_no_drafts(folders, options):
    wanted = answer_on_gpu(open_replica(folders["qwen2"], "eager", max_batch=3), rows((20, 30, 40), **options))
    replica = open_replica(folders["qwen2"], "cuda", max_batch=3, draft_model=str(folders["qwen2"]))
    run = answer_on_gpu(replica, rows((20, 30, 40), **options), speculation=speculate(4))
    assert run.answers == wanted.answers and run.drafts.num_proposals == 0
    assert answer_on_gpu(replica, rows((20, 30, 40)), speculation=speculate(4)).drafts.num_proposals > 0


def test_a_step_is_tried_out_once_its_rows_are_not_there(folders, monkeypatch):
    """Rows to try a step on are made on torch's stream, the step runs on another. Late as they are here, it must wait for them: a
    row that is there would write keys and values over somebody's."""
    from engine.graph.row_state import PADDING, RowState
    from engine.graph.step import StepKind

    replica = open_replica(folders["qwen2"], "cuda", max_batch=1, num_drafts=2, is_ngram=True)
    caches = replica.backend.kv.keys, replica.backend.kv.values
    for cache in caches:
        cache.normal_()
    before, make = [cache.clone() for cache in caches], RowState.scratch

    def make_late(self: RowState, count: int) -> RowState:
        state = make(self, count)
        state._positions.zero_()
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        state._positions.fill_(PADDING)
        return state

    monkeypatch.setattr(RowState, "scratch", make_late)
    replica.burst_backend._prepare(StepKind(1, num_drafts=2))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(before, caches))


MANY = [10 + 7 * idx for idx in range(20)]


def test_more_rows_than_by_default_and_rows_that_wait(folders):
    """20 rows in steps of 24, and as many again behind them."""
    wanted = answer_on_gpu(open_replica(folders["qwen2"], "eager", max_batch=20), rows(MANY * 2, 30))
    options = {"max_batch": 20, "num_drafts": 4, "draft_model": str(folders["qwen2"])}
    replica = open_replica(folders["qwen2"], "cuda", max_speculative_rows=20, **options)
    speculable = replica.burst_backend.speculable
    assert (speculable.max_rows, speculable.padded_rows) == (20, 24)
    run = answer_on_gpu(replica, rows(MANY * 2, 30), speculation=speculate(4))
    assert run.answers == wanted.answers and run.drafts.num_proposals > 20 and run.drafts.acceptance > 0.7
    # By default they step aside, and come back when the last few are left.
    fewer = answer_on_gpu(open_replica(folders["qwen2"], "cuda", **options), rows(MANY * 2, 30), speculation=speculate(4))
    assert fewer.answers == wanted.answers and fewer.drafts.num_proposals < run.drafts.num_proposals


def test_drafts_hold_at_a_rate_that_is_set_and_changed_without_another_capture(folders):
    from engine.bench.acceptance import SetAcceptance

    replica = open_replica(folders["qwen2"], "cuda", max_batch=8, num_drafts=3, draft_model=str(folders["small"]))
    backend, judge = replica.burst_backend, SetAcceptance(VOCAB, replica.device)
    backend.replace_drafter(backend.drafter, judge)
    kinds = []
    for rate in (1.0, 0.7, 0.0, 1.0):
        judge.set_rate(rate)
        stats = answer_on_gpu(replica, rows(MANY[:8], 300), speculation=speculate(3)).drafts
        expected = 1 + rate + rate**2 + rate**3
        assert abs(stats.tokens_per_step - expected) < 0.08 * expected, rate
        kinds.append(dict(backend._graphs))
    assert all(kinds[0][kind] is graph for made in kinds for kind, graph in made.items() if kind in kinds[0])


def test_few_pages_and_stops(folders):
    pages = {"kv_memory_bytes": 40 * 2 * 2 * 16 * 2 * 64 * 4, "max_batch": 9, "max_model_len": 256}
    requests = lambda: rows((60, 50, 70, 30, 20, 10, 90), 100)  # noqa: E731
    wanted = answer_on_gpu(open_replica(folders["qwen2"], "eager", **pages), requests())
    replica = open_replica(folders["qwen2"], "cuda", draft_model=str(folders["qwen2"]), **pages)
    run = answer_on_gpu(replica, requests(), speculation=speculate(5))
    assert run.answers == wanted.answers and replica.scheduler.num_preemptions > 0
    for place in (5, 6, 7, 8, 9):
        stops = [ids[place] for ids in wanted.token_ids]
        found = [
            answer_on_gpu(open_or, rows((60, 50), 100, stop_ids=stops), **more)
            for open_or, more in ((open_replica(folders["qwen2"], "eager"), {}), (replica, {"speculation": speculate(5)}))
        ]
        assert found[0].answers == found[1].answers


@pytest.mark.parametrize("dtype", ("bfloat16", "fp8"))
def test_other_dtypes_differ_at_near_ties_only(tmp_path, dtype):
    """Against plain graphs of the same dtype: a first difference is where two logits are nearly equal."""
    from tests.near_ties import MOST_TIES, Reference
    from tests.token_cases import save_mild_model

    folder = save_mild_model(tmp_path)
    plain = open_replica(folder, "cuda", dtype=dtype, max_batch=8)
    drafted = open_replica(folder, "cuda", dtype=dtype, max_batch=8, draft_model=str(folder))
    prompts = [item.prompt_ids for item in rows(LENGTHS[:8])]
    wanted = answer_on_gpu(plain, rows(LENGTHS[:8], 40)).token_ids
    run = answer_on_gpu(drafted, rows(LENGTHS[:8], 40), speculation=speculate(4))
    print(f"{dtype}: acceptance {run.drafts.acceptance:.3f}")
    if dtype == "bfloat16":
        tally = Reference(folder, "cuda").compare(prompts, wanted, run.token_ids, torch.bfloat16)
        print(tally)
        assert tally.tie_rate < MOST_TIES
    assert run.drafts.acceptance > 0.6
