"""Graphs with drafts draw from the target's law, under every option they take; acceptance that is wrong is found out.

`python -m pytest -q -s tests/gpu/test_sampling_law_graphs.py` prints how far each statistic is from its limit.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.graph_engine import open_replica
from tests.sampling_law import BROKEN, FILTERED, NUM_DRAFTS, PLAIN, all_laws, count_texts, excess, make_pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

ROWS = 64  # more than a run's steps with drafts have, for as many texts in less time
TEXTS = 4000
SHAPE = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 208}  # our attention takes no smaller heads


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(the target's folder, the draft's, the laws of the target by kind)"""
    from tests.cpu.tiny import save_model

    target, draft = make_pair(**SHAPE)
    folders = [save_model(model, tmp_path_factory.mktemp("model")) for model in (target, draft)]
    return *folders, all_laws(target)


@pytest.fixture(scope="module", params=("model", "ngram"))
def backend(request, pair):
    settings = {"draft_model": str(pair[1])} if request.param == "model" else {"is_ngram": True}
    settings |= {"max_batch": ROWS, "max_speculative_rows": ROWS, "max_model_len": 32, "num_drafts": NUM_DRAFTS}
    replica = open_replica(pair[0], "cuda", **settings)
    assert replica.burst_backend.speculable.max_rows == ROWS
    return replica.burst_backend


def test_the_texts_have_the_targets_law(backend, pair):
    found = {}
    for kinds in (PLAIN, FILTERED):
        counts, share = count_texts(backend, kinds, ROWS, TEXTS)
        print(f"{backend.drafter.description}: {100 * share:.0f} % of the drafts held")
        assert 0.05 < share < 0.9, "drafts must hold and fail, or nothing is shown"
        found |= {name: excess(counts[name], pair[2][name]) for name in kinds}
    print({name: round(value, 2) for name, value in found.items()})
    assert len(found) == len(PLAIN | FILTERED) and max(found.values()) < 1


@pytest.mark.parametrize("backend", ("model",), indirect=True)
@pytest.mark.parametrize("breakage", BROKEN, ids=lambda breakage: breakage.__name__)
def test_wrong_acceptance_has_another_law(backend, pair, breakage):
    operators, names = backend._operators, BROKEN[breakage]
    whole = dict(vars(operators))
    try:
        breakage(operators)
        backend.replace_drafter(backend.drafter)  # captures anew
        counts, _ = count_texts(backend, {name: (PLAIN | FILTERED)[name] for name in names}, ROWS, TEXTS)
    finally:
        vars(operators).clear()
        vars(operators).update(whole)
        backend.replace_drafter(backend.drafter)
    found = {name: excess(counts[name], pair[2][name]) for name in names}
    print(found)
    assert min(found.values()) > 2
