"""10,000 steps of drafts from rank 0 to all others, in replayed graphs with random delays: none torn, lost, or written over.

`python -m pytest -q -s tests/ranks/test_draft_soak.py` prints the time of each tenth. More ranks than GPUs need MPS.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from comm.device_signal import NUM_SLOTS
from tests.draft_payload import FAULTS, LEADS
from tests.ranks_harness import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

STEPS = 10_000
MOST_GROWTH = 1.5  # of the time of a step, from the first half of the run to the second


def soak_drafts(rank: int, size: int, wait: str, num_steps: int, limit_s: float, sources: Path | None = None):
    from tests.ranks.draft_soak import open_soak

    with open_soak(wait, limit_s, sources) as soak:
        return soak.run(num_steps)


@pytest.mark.parametrize("wait", ("kernel", "stream"))
@pytest.mark.parametrize("size", (2, 4, 8))
def test_ten_thousand_steps_of_drafts(size, wait):
    results = run_ranks(size, soak_drafts, wait, STEPS, 20.0, timeout_s=150)
    assert [result.timeout for result in results] == [None] * size
    assert [result.steps for result in results] == [STEPS] * size, "no rank is ahead or behind"
    first, *others = results
    assert [result.faults for result in others] == [dict.fromkeys(FAULTS, 0)] * (size - 1)
    tenths = [max(times) for times in zip(*(result.tenths_us for result in results))]
    print(f"{size} ranks, {wait}: us a step by tenth " + " ".join(f"{us:.1f}" for us in tenths) + f"; ahead by {first.leads}")
    assert sum(first.leads.values()) == STEPS * (size - 1)
    assert first.leads[LEADS[0]] == first.leads[LEADS[-1]] == 0, "nobody acknowledges what was not put, and rank 0 laps nobody"
    assert first.leads[str(NUM_SLOTS)] > 0, "rank 0 went as far ahead as it may, so that it had to wait"
    assert statistics.median(tenths[5:]) < MOST_GROWTH * statistics.median(tenths[:5])


def test_a_producer_that_does_not_wait_is_found_out(tmp_path):
    from tests.ranks.mutants import SIGNAL_MUTANTS, edited_sources

    edits = SIGNAL_MUTANTS["packets: no wait for the acknowledgement"].edits
    first, other = run_ranks(2, soak_drafts, "kernel", 400, 1.0, edited_sources(edits, tmp_path / "sources"), timeout_s=100)
    print(first, other)
    assert first.leads[LEADS[-1]] > 0
    assert other.timeout is not None and "rank 0 did not arrive at signal_take" in other.timeout
