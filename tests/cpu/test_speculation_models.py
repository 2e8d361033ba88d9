"""Which model may draft for which (case 98), and which options go together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.api import Engine
from engine.drafts.loading import _depth
from engine.drafts.speculation import DraftRow
from engine.frontend import Frontend
from engine.graph.loading import _speculable
from engine.loading import draw_blueprint
from engine.memory import page_bytes
from engine.sampler import SamplerState
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits
from engine.settings import EngineSettings
from launch.errors import ModelError, UsageError
from launch.world import World
from tests.cpu.drafters import scripted_model
from tests.cpu.engine_harness import answer, request
from tests.cpu.tiny import make_model, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer


def model_folder(path, vocab_rows: int, vocab_size: int = 500, **options):
    save_model(make_model("qwen2", vocab_size=vocab_rows, **options), path)
    return build_tiny_tokenizer(path, vocab_size)


@pytest.mark.parametrize("target_rows, draft_rows", [(500, 520), (520, 500), (500, 300)])
def test_vocabulary_rows_may_differ_if_the_tokenizer_is_the_same(tmp_path, target_rows, draft_rows):
    """The last pair: a draft that lacks ids the target uses drafts with what it has, for rows that it can read."""
    target = model_folder(tmp_path / "target", target_rows)
    draft = model_folder(tmp_path / "draft", draft_rows, seed=3, num_hidden_layers=1)
    # Mostly ids that all three drafts have, now and then one that the last has not.
    bias = {str(token_id): 14.0 for token_id in range(40, 70)} | {"480": 16.0}
    params = {"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, "repetition_penalty": 1.05, "logit_bias": bias}
    texts = [[71, 72, 73], [7], [8, 9], [5, 499, 450]]
    settings = {"threads": 1, "kv_memory_bytes": 1 << 24, "dtype": "float32"}
    with Engine(str(target), **settings) as engine:
        plain = engine.generate(texts, params, seed=5)
        assert engine.draft_stats is None
    with Engine(str(target), draft_model=str(draft), num_drafts=3, **settings) as engine:
        drafted = engine.generate(texts, params, seed=5)
        assert engine.draft_stats.num_proposed > 0
        again = engine.generate(texts, params, seed=5)
    assert drafted == plain == again
    said = [token_id for result in plain for token_id in result.completions[0].token_ids]
    assert 480 in said and max(said) < 500


def test_a_draft_never_proposes_what_the_target_does_not_have(tmp_path):
    target, draft = model_folder(tmp_path / "target", 500), model_folder(tmp_path / "draft", 520)
    blueprint = draw_blueprint(EngineSettings(str(target), draft_model=str(draft)), World())
    frontend = Frontend.load(blueprint, {})
    assert frontend.num_ids == 500
    loud = torch.tensor([0.0] * 500 + [4.0] * 20)  # prefers the ids that only it has
    speculation = scripted_model(lambda token_id, position: loud, 520, num_drafts=4)
    speculation.drafter.num_ids = frontend.num_ids
    row = DraftRow(0, [1, 2], SamplerState(SamplingParams(temperature=1.0), b"key", [1, 2]), 50, 4)
    (ids,) = speculation.drafter.propose([row])
    assert len(ids) == 4 and max(ids) < 500


def test_another_tokenizer_is_refused_by_name(tmp_path):
    target, draft = model_folder(tmp_path / "target", 520, 500), model_folder(tmp_path / "draft", 520, 510)
    blueprint = draw_blueprint(EngineSettings(str(target), draft_model=str(draft)), World())
    with pytest.raises(ModelError) as error:
        Frontend.load(blueprint, {})
    assert str(target) in str(error.value) and str(draft) in str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"is_ngram": True, "draft_model": "x"}, "--ngram and --draft-model"),
        ({"num_drafts": 4}, "--num-drafts goes with"),
        ({"is_ngram": True, "num_drafts": 17}, "1 to 16"),
        ({"is_ngram": True, "num_drafts": 0}, "1 to 16"),
        ({"max_speculative_rows": 4}, "--max-speculative-rows goes with"),
        ({"is_ngram": True, "max_speculative_rows": 0}, "--max-speculative-rows must be a number of rows from 1 on, not 0"),
        ({"is_ngram": True, "draft_kv_memory_bytes": 9}, "--draft-kv-memory goes with"),
        ({"is_ngram": True, "draft_placement": "split"}, "--draft-placement goes with --draft-model"),
        ({"draft_model": "x", "draft_placement": "half"}, "--draft-placement must be all or first or split, not 'half'"),
        ({"draft_model": "x", "draft_wait": "host"}, "--draft-wait must be kernel or stream, not 'host'"),
        ({"draft_model": "x", "draft_wait": "stream"}, "--draft-wait goes with --draft-placement first"),
        ({"draft_model": "x", "draft_placement": "split", "draft_wait": "stream"}, "--draft-wait goes with"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        draw_blueprint(EngineSettings("qwen2.5-0.5b", load_format="dummy", **options), World())


def test_a_missing_draft_model_is_named_as_such(tmp_path):
    with pytest.raises(ModelError, match="--draft-model: .*nowhere"):
        draw_blueprint(EngineSettings(str(model_folder(tmp_path, 500)), draft_model=str(tmp_path / "nowhere")), World())


def test_a_draft_cache_that_holds_nothing_is_refused(tmp_path):
    folder = model_folder(tmp_path, 500)
    with pytest.raises(UsageError, match="--draft-kv-memory"):
        answer(folder, [request([1])], draft_model=str(folder), draft_kv_memory_bytes=100)


DUMMY = {"load_format": "dummy", "draft_model": "qwen2.5-0.5b"}


@pytest.mark.parametrize(
    "max_batch, most, rows, padding",
    [(32, None, 16, 0), (5, None, 5, 3), (64, 64, 64, 0), (64, 20, 20, 4), (32, 100, 32, 0), (512, 400, 256, 0)],
)
def test_the_rows_of_a_step_with_drafts(max_batch, most, rows, padding):
    settings = EngineSettings("qwen2.5-72b", max_speculative_rows=most, **DUMMY)
    speculable = _speculable(settings, Limits(max_batch, 4096, 1000))
    assert (speculable.max_rows, speculable.padded_rows) == (rows, rows + padding)
    blueprint = draw_blueprint(settings, World())
    assert blueprint.draft.settings.max_speculative_rows is None, "the draft model has no drafts of its own"


@pytest.mark.parametrize("size", (1, 2, 3, 4, 14))
def test_a_split_draft_model_has_a_shard_on_each_rank_and_a_whole_beside_graphs(size):
    settings = EngineSettings("qwen2.5-72b", draft_placement="split", **DUMMY)
    blueprints = [draw_blueprint(settings, World(rank=rank, size=size)) for rank in range(size)]
    for rank, blueprint in enumerate(blueprints):
        assert (blueprint.draft.plan.size, blueprint.draft.plan.local_q_heads) == (1, 14)
        assert (blueprint.graph_draft.plan.size, blueprint.graph_draft.plan.rank) == (size, rank)
        assert blueprint.graph_draft.config == blueprint.draft.config
    heads = [head for blueprint in blueprints for head in blueprint.graph_draft.plan.q_heads if head is not None]
    assert heads == list(range(14))
    sizes = {page_bytes(one.graph_draft.config, one.graph_draft.plan, one.graph_draft.dtype, 16) for one in blueprints}
    assert len(sizes) == 1, "of a page, on every rank alike"
    for placement in ("all", "first"):
        blueprint = draw_blueprint(replace(settings, draft_placement=placement), World(rank=size - 1, size=size))
        assert blueprint.graph_draft == blueprint.draft


def test_a_shard_alone_has_a_shard_of_the_draft_model():
    settings = EngineSettings("qwen2.5-72b", draft_placement="split", shard_of=4, **DUMMY)
    assert draw_blueprint(settings, World()).graph_draft.plan.local_q_heads < 14


def test_too_many_ranks_for_a_split_draft_model_are_refused():
    settings = EngineSettings("qwen2.5-72b", draft_placement="split", **DUMMY)
    with pytest.raises(ModelError, match="--draft-placement split: 15 ranks are too many .* 14 query heads"):
        draw_blueprint(settings, World(rank=3, size=15))
    assert draw_blueprint(replace(settings, draft_placement="all"), World(rank=3, size=15)).graph_draft is not None


def draft_cost(model: str, draft: str, placement: str, is_on_device: bool) -> float:
    settings = EngineSettings(model, load_format="dummy", draft_model=draft, draft_placement=placement)
    return _depth(draw_blueprint(settings, World(size=8)), is_on_device).costs.draft


def test_what_a_draft_costs_follows_from_where_it_is():
    small, large = (
        {place: draft_cost("qwen2.5-72b", draft, place, True) for place in ("all", "first", "split")}
        for draft in ("qwen2.5-0.5b", "qwen2.5-7b")
    )
    assert small["all"] == small["first"] and large["split"] < large["all"] / 4, "a large one is read by all ranks together"
    assert small["split"] > 0.5 * small["all"], "a small one takes its time however few bytes a rank reads"
    assert draft_cost("qwen2.5-72b", "qwen2.5-7b", "split", False) == draft_cost("qwen2.5-72b", "qwen2.5-7b", "all", False)


def test_without_graphs_a_split_draft_model_is_whole_on_the_first_rank(tmp_path):
    folder = model_folder(tmp_path, 500)
    plain = answer(folder, [request([1, 2, 3])], size=2)
    drafted = answer(folder, [request([1, 2, 3])], size=2, draft_model=str(folder), draft_placement="split", num_drafts=3)
    assert drafted.answers == plain.answers and drafted.drafts.acceptance == 1.0
