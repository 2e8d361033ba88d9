"""A draft model split over the ranks of the target, in bursts, fp32: what is said is what is said without, TP 2 to 4."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest

from engine import loading
from engine.drafts.speculation import Speculation
from engine.graph import loading as graph_loading
from engine.graph.operators import TorchOperators
from engine.graph.prefill import PrefillStep, TwinPrefill
from engine.graph.row_state import Speculable
from tests.cpu.engine_harness import answer, request, twin_bursts, twin_draft_model
from tests.cpu.test_speculative_bursts import FOUR, PAGE_BYTES, RULES, TEXTS, rows, run_with
from tests.cpu.tiny import make_model, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(make_model("qwen2"), tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module", params=(127, 201))
def odd(tmp_path_factory, request):
    """5 query heads, each with a KV head: nothing of it divides by 2, 3 or 4. Its vocabulary is smaller than the target's, or
    larger, so that some ranks have no id that may be chosen."""
    options = {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40, "head_dim": 8, "intermediate_size": 37}
    return save_model(make_model("qwen2", seed=3, vocab_size=request.param, **options), tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("size", (2, 3, 4))
def test_a_draft_model_split_over_the_ranks_guesses_what_a_whole_one_does(folder, size):
    """Nobody but the target decides what is said, so whether guesses are right shows in how many of them hold."""
    for kind in RULES:
        make_rows = partial(rows, 5, **RULES[kind])
        runs = [run_with(folder, make_rows, twin_draft_model(folder, where), size=size) for where in ("split", "all")]
        assert runs[0].drafts == runs[1].drafts and runs[0].drafts.acceptance > 0.7


@pytest.mark.parametrize("size", (2, 3, 4))
def test_split_drafts_of_an_odd_shape_are_those_of_the_whole_model_on_every_rank(folder, odd, size):
    proposed = {}

    def noting(where):
        make = twin_draft_model(odd, where)

        def make_noting(replica):
            drafter = make(replica)
            propose, log = drafter.propose, proposed.setdefault((where, replica.comm.rank), [])

            def propose_noting(rows, num_drafts):
                drafts = propose(rows, num_drafts)
                log.append(drafts[rows.rows.positions >= 0].tolist())
                return drafts

            drafter.propose = propose_noting
            return drafter

        return make_noting

    for kind in ("greedy", "drawn", "top_k"):
        for where in ("split", "all"):
            run_with(folder, partial(rows, 5, **RULES[kind]), noting(where), size=size)
    logs = list(proposed.values())
    assert len(proposed) == 2 * size and len(logs[0]) > 10 and all(log == logs[0] for log in logs)
    assert len({token_id for step in logs[0] for row in step for token_id in row}) > 10, "and not always the same"


def test_split_drafts_in_few_pages_with_rows_that_join_and_end(folder):
    def make_rows():
        return [request(text, row_key=idx, max_tokens=3 + 5 * (idx % 6)) for idx, text in enumerate(TEXTS[:6])]

    for settings in ({"max_batch": 3, "max_step_tokens": 16}, {"kv_memory_bytes": 10 * PAGE_BYTES, "max_model_len": 128}):
        run = run_with(folder, make_rows, twin_draft_model(folder, "split"), size=3, **settings)
        assert run.drafts.acceptance > 0.6


class LoadedForGraphs:
    """Has `build_replica` load as for graphs on a GPU, and keeps the draft model of each rank, by rank."""

    def __init__(self, monkeypatch):
        self.drafts = {}
        monkeypatch.setattr(loading, "speculates_on_device", lambda *asked: True)
        monkeypatch.setattr(loading, "obstacle_to_graphs", lambda *asked: "")
        monkeypatch.setattr(loading, "open_graphs", self._open_graphs)
        monkeypatch.setattr(graph_loading, "open_operators", self._open_operators)
        monkeypatch.setattr(graph_loading, "GraphPrefill", TwinPrefill)

    def _open_graphs(self, step, num_ids, limits, settings, stock_up, profiler, draft, ranks_per_gpu):
        self.drafts[step.comm.rank] = draft
        return None, step

    def _open_operators(self, step, num_ids, max_rows, max_context, ranks_per_gpu):
        return TorchOperators(step.config, step.plan, step.weights, step.comm, step.kv, num_ids), lambda: None

    def bursts(self, replica):
        limits, draft = replica.scheduler.limits, self.drafts[replica.comm.rank]
        speculable = Speculable(limits.max_batch, 16, limits.max_model_len)
        drafter, _ = graph_loading._open_draft(draft, replica.full_vocab, speculable, limits, 1, 32)
        return twin_bursts(replica, lambda replica: drafter)


@pytest.mark.parametrize("size", (2, 3, 4))
def test_what_is_loaded_for_graphs_is_a_shard_in_the_targets_pages_on_its_communicator(folder, size, monkeypatch):
    plain = answer(folder, rows(3), size, kv_memory_bytes=1 << 20)
    loaded, seen = LoadedForGraphs(monkeypatch), []

    def bursts(replica):
        backend, step = loaded.bursts(replica), loaded.drafts[replica.comm.rank].step
        target = replica.backend
        assert step.comm is replica.comm and (step.plan, step.kv.keys.shape) == (target.plan, target.kv.keys.shape)
        seen.append(SimpleNamespace(says=backend.drafter.description, num_pages=replica.scheduler.pool.num_pages))
        return backend

    drafts = {"draft_model": str(folder), "draft_placement": "split", "kv_memory_bytes": 1 << 20, "max_model_len": 512}
    run = answer(folder, rows(3), size, speculation=Speculation(None, FOUR), bursts=bursts, **drafts)
    assert run.answers == plain.answers and run.drafts.acceptance > 0.7
    assert {one.says for one in seen} == {f"{folder}, split over {size} ranks"} and len(seen) == size
    local_page = PAGE_BYTES * loaded.drafts[0].step.plan.local_kv_heads // 2
    assert {one.num_pages for one in seen} == {(1 << 20) // (2 * local_page)}, "a page is the target's and the draft model's"


def test_a_draft_model_computes_a_prompt_once_and_else_what_steps_without_drafts_computed(folder):
    """Rows join and end all the time, some together: then the others decode without drafts, and lack that token, or two."""
    chunks = []

    def make_noting(replica):
        drafter = twin_draft_model(folder)(replica)
        run, catch_up = drafter._prefill.run, drafter.catch_up

        def run_noting(batch):
            chunks.append([(row.context_len, row.num_tokens) for row in batch.rows])
            return run(batch)

        def catch_up_noting(sequences):
            catch_up(sequences)
            assert all(one.num_draft_computed == one.num_computed - 1 for one in sequences), "that much, and no more"

        drafter._prefill.run, drafter.catch_up = run_noting, catch_up_noting
        return drafter

    def make_plain(replica):
        drafter = twin_draft_model(folder)(replica)
        drafter._prefill = PrefillStep(drafter._operators, replica.scheduler.limits.max_model_len)
        return drafter

    def make_rows():
        texts = TEXTS[:14] + [text[::-1] for text in TEXTS[:14]] + [text[1:] for text in TEXTS[:8]]
        return [request(text, row_key=idx, max_tokens=1 + 9 * (idx // 2 % 7)) for idx, text in enumerate(texts)]

    found, plain = (run_with(folder, make_rows, make, max_batch=8) for make in (make_noting, make_plain))
    assert found.drafts == plain.drafts and found.drafts.acceptance > 0.7, "whichever way it catches up, it guesses the same"
    flat = [row for step in chunks for row in step]
    prompts = [num_tokens for context_len, num_tokens in flat if context_len == 0]
    assert len(prompts) <= 36 and sum(prompts) <= found.stats.prefill_tokens
    assert {num_tokens for context_len, num_tokens in flat if context_len} == {1}, "one token a step"
    beside = [[context_len == 0 for context_len, _ in step] for step in chunks if step[0][0]]
    assert any(sum(step) > 1 for step in beside) and not all(map(any, beside)), "prompts beside them, several too, and none"
