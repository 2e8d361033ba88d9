"""Each safeguard of the device protocols taken out, on real GPUs: the schedule that the product passes must find the fault.

Two ranks, one run for all mutants. Where only the hardware's habits keep a mutant right, the test is skipped and says so.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks.mutants import MUTANTS, SIGNAL_MUTANTS, SOURCES, edited_sources
from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ALL = {**MUTANTS, **SIGNAL_MUTANTS}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """By name: the outcome on the GPUs, or why the mutant could not be made."""
    from tests.ranks.mutant_trials import folder_of, run_all

    root, found = tmp_path_factory.mktemp("mutants"), {}
    for name, mutant in ALL.items():
        try:
            edited_sources(mutant.legal, root / folder_of(name) / "control")
            edited_sources((*mutant.legal, *mutant.edits), root / folder_of(name) / "mutant")
        except ValueError as error:
            found[name] = str(error)
    by_rank = run_ranks(2, run_all, root, [name for name in ALL if name not in found], timeout_s=280)
    return by_rank[0] | found


@pytest.mark.parametrize("name", ALL)
def test_a_removed_safeguard_is_caught(outcomes, name):
    outcome, mutant = outcomes[name], ALL[name]
    assert not isinstance(outcome, str), outcome
    assert not any(outcome.control), f"the product itself: {outcome.control}"
    assert not any(outcome.calm), f"not even when nothing overlaps, so this shows nothing about the safeguard: {outcome.calm}"
    faults = [fault for fault in outcome.mutant if fault is not None]
    if not faults and not mutant.is_certain:
        pytest.skip("this hardware keeps the order that the mutant no longer asks for")
    # Once a rank has gone wrong, the other may go wrong in another way.
    assert any(fault.startswith(mutant.faults) for fault in faults), outcome.mutant
    print(name, "->", outcome.mutant)


def test_call_numbers_wrap_without_harm(tmp_path):
    from tests.ranks.mutant_trials import run_near_wrap

    for met in run_ranks(2, run_near_wrap, SOURCES, tmp_path, timeout_s=120):
        assert met and all(fault is None for faults in met.values() for fault in faults), met
