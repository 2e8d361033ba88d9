"""Bursts with drafts draw from the target's law, under every option they take; acceptance that is wrong is found out (torch)."""

from __future__ import annotations

import pytest

from comm.single import SingleCommunicator
from engine.graph.drafters import NgramDrafts
from engine.loading import build_replica, draw_blueprint
from engine.settings import EngineSettings
from launch.world import World
from tests.cpu.engine_harness import twin_bursts, twin_draft_model
from tests.cpu.tiny import save_model
from tests.sampling_law import BROKEN, FILTERED, NUM_DRAFTS, PLAIN, all_laws, count_texts, excess, make_pair

ROWS, TEXTS = 256, 2000
DRAFTERS = ("model", "ngram")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(the target's folder, the draft's, the laws of the target by kind)"""
    target, draft = make_pair()
    folders = [save_model(model, tmp_path_factory.mktemp("model")) for model in (target, draft)]
    return *folders, all_laws(target)


def open_burst(pair, drafter: str):
    settings = EngineSettings(str(pair[0]), threads=1, kv_memory_bytes=1 << 24, max_batch=ROWS, max_model_len=16)
    blueprint = draw_blueprint(settings, World())
    replica = build_replica(blueprint, World(), SingleCommunicator())
    make = twin_draft_model(pair[1]) if drafter == "model" else lambda replica: NgramDrafts()
    return twin_bursts(replica, make, NUM_DRAFTS)


@pytest.fixture(scope="module", params=DRAFTERS)
def counts(request, pair):
    backend, found = open_burst(pair, request.param), {}
    for kinds in (PLAIN, FILTERED):
        some, share = count_texts(backend, kinds, ROWS, TEXTS)
        print(f"{request.param}: {100 * share:.0f} % of the drafts held")
        assert 0.05 < share < 0.9, "drafts must hold and fail, or nothing is shown"  # n-grams of one token hold seldom
        found |= some
    return found


@pytest.mark.parametrize("name", PLAIN | FILTERED)
def test_the_texts_have_the_targets_law(counts, pair, name):
    assert counts[name].total() >= TEXTS
    found = excess(counts[name], pair[2][name])
    print(f"{name}: {found:.2f} of the limit")
    assert found < 1


@pytest.mark.parametrize("breakage", BROKEN, ids=lambda breakage: breakage.__name__)
def test_wrong_acceptance_has_another_law(pair, breakage):
    backend = open_burst(pair, "model")
    breakage(backend._operators)
    names = BROKEN[breakage]
    kinds = {name: (PLAIN | FILTERED)[name] for name in names}
    counts, _ = count_texts(backend, kinds, ROWS, TEXTS)
    found = {name: excess(counts[name], pair[2][name]) for name in names}
    print(found)
    assert min(found.values()) > 2
