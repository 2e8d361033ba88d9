"""The filter kernel against its twin and the sampler, and its time.

`python -m pytest -q -s tests/gpu/test_filter_logits_kernel.py`, about 30 s.
"""

from __future__ import annotations

import pytest
import torch

from engine.sampler import sample
from tests.cpu.filter_case import Batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

QWEN_VOCAB = 151_936
MOST_US = 1000.0  # a row or eight; a sort takes about as long


@pytest.fixture(scope="module")
def kernel():
    from kernels.build import Build, default_cache_folder
    from kernels.filter_logits import load_filter_logits

    torch.cuda.set_device(0)
    return load_filter_logits(Build(default_cache_folder()))


@pytest.mark.parametrize("is_tied", (False, True))
@pytest.mark.parametrize("vocab", (5, 131, 1009, 20_011, QWEN_VOCAB))
def test_it_leaves_what_the_twin_leaves_and_draws_what_the_sampler_draws(kernel, vocab, is_tied):
    from kernels.filter_logits import filter_logits, launch_filter_logits

    for seed in range(8):
        batch = Batch(seed, 8, vocab, is_tied, torch.device("cuda", 0))
        wanted, found = batch.operands(), batch.operands()
        filter_logits(*wanted)
        launch_filter_logits(kernel, *found, is_pdl=seed % 2 == 0)
        assert torch.equal(found[0][:, :vocab], wanted[0][:, :vocab]), seed
        assert found[0][:, vocab:].isnan().all()
        assert torch.equal(found[-1].seen[1:], wanted[-1].seen[1:])
        assert batch.drawn(found[0]) == sample(batch.logits, batch.states), seed


def test_many_rows_and_the_same_bits_each_time(kernel):
    from kernels.filter_logits import launch_filter_logits

    batch = Batch(5, 256, 20_011, True, torch.device("cuda", 0))
    first = launch_filter_logits(kernel, *batch.operands())
    assert batch.drawn(first) == sample(batch.logits, batch.states)
    for _ in range(5):
        again = launch_filter_logits(kernel, *batch.operands())
        assert torch.equal(first.nan_to_num(), again.nan_to_num())


def test_rows_that_are_not_there_or_not_finite(kernel):
    from kernels.filter_logits import launch_filter_logits

    batch = Batch(3, 5, 50, False, torch.device("cuda", 0))
    batch.logits[0, 7], batch.logits[1, 3], batch.logits[2] = float("nan"), float("inf"), float("-inf")
    batch.temperatures[:] = 1.0
    batch.positions[4] = -1
    found = launch_filter_logits(kernel, *batch.operands())[:, :50]
    assert found.amax(1).isfinite().tolist()[:4] == [False, False, False, True]
    assert torch.equal(found[4], batch.logits[4])


@pytest.mark.parametrize("rows", (1, 8, 64))
@pytest.mark.parametrize("spread", (0.3, 3.0))
def test_time(kernel, rows, spread):
    """With the options of Qwen2.5, and with top-p alone over flat and over peaked logits."""
    from kernels.filter_logits import REPETITION, TOP_K, TOP_P, filter_logits, launch_filter_logits

    logits, *rest = Batch(1, rows, QWEN_VOCAB, False, torch.device("cuda", 0)).operands()
    options = rest[-1]
    options.rules.zero_()
    rest[-2].fill_(0.7)
    source = torch.randn(logits.shape, device="cuda") * spread

    def microseconds(call, repeats: int) -> float:
        graph, begin, end = torch.cuda.CUDAGraph(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                call()
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / repeats

    copy_us = microseconds(lambda: logits.copy_(source), 50)
    for name, top_k, top_p, repetition in (("top_k 20, top_p 0.8, repetition 1.1", 20, 0.8, 1.1), ("top_p 0.9", 0, 0.9, 1.0)):
        options.rules[:, TOP_K] = top_k
        options.number(TOP_P).fill_(top_p)
        options.number(REPETITION).fill_(repetition)
        kernel_us = microseconds(lambda: launch_filter_logits(kernel, logits.copy_(source), *rest), 50) - copy_us
        twin_us = microseconds(lambda: filter_logits(logits.copy_(source), *rest), 5) - copy_us
        print(f"{rows} rows, spread {spread}, {name}: {kernel_us:.0f} us, torch {twin_us:.0f} us")
        assert kernel_us < MOST_US * max(1, rows // 8)
