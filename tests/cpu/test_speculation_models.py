"""Which model may draft for which (case 98), and which options go together."""

from __future__ import annotations

import pytest
import torch

from engine.api import Engine
from engine.drafts.speculation import DraftRow
from engine.frontend import Frontend
from engine.loading import draw_blueprint
from engine.sampler import SamplerState
from engine.sampling_params import SamplingParams
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
        ({"is_ngram": True, "draft_kv_memory_bytes": 9}, "--draft-kv-memory goes with"),
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
