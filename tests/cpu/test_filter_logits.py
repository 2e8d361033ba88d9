"""Filters on whole batches against the sampler, which takes rows one by one; the kernel's source, run on the host, too."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm.vocabulary import DrawOptions, local_best
from engine.graph.row_rules import RowRules
from engine.sampler import sample, stream_key, stream_start
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.token_rules import TokenRules
from kernels.filter_logits import _SHARED_BYTES, FilterParams, filter_logits
from tests.cpu.filter_case import CPU, Batch

ROOT = Path(__file__).resolve().parents[2]


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(5, 60), st.booleans())
def test_ids_are_those_of_the_sampler(seed, num_rows, vocab, is_tied):
    batch = Batch(seed, num_rows, vocab, is_tied)
    filtered = filter_logits(*batch.operands())
    assert filtered[:, vocab:].isnan().all(), "columns that do not count are left alone"
    assert batch.drawn(filtered) == sample(batch.logits, batch.states)


def test_options_in_turn_over_a_large_vocabulary():
    for seed in range(6):
        batch = Batch(seed, 4, 20_011, is_tied=seed % 2 == 1)
        assert batch.drawn(filter_logits(*batch.operands())) == sample(batch.logits, batch.states)


def test_a_row_with_nothing_to_choose_from_has_no_finite_highest():
    batch = Batch(1, 4, 40, is_tied=False)
    batch.logits[0, 7], batch.logits[1, 3], batch.logits[2] = float("nan"), float("inf"), float("-inf")
    batch.temperatures[:] = 1.0
    filtered = filter_logits(*batch.operands())[:, :40]
    assert filtered.amax(1).isfinite().tolist() == [False, False, False, True]


def test_draws_follow_the_filtered_distribution():
    """Chi-square, 12 ids, top-k 6 after a penalty: 9000 draws."""
    count, vocab = 9000, 12
    logits = torch.linspace(0, 3, vocab)
    params = SamplingParams(temperature=0.8, top_k=6, repetition_penalty=1.5)
    rules = TokenRules.of(params, False, ())
    sequences = [Sequence(row, [11, 2, 10], 2, 9, num_computed=2, temperature=0.8, rules=rules) for row in range(count)]
    device = RowRules(count, vocab, CPU)
    device.begin(sequences)
    temperatures = torch.full((count,), 0.8, dtype=torch.float64)
    rows = logits.repeat(count, 1)
    filter_logits(rows, vocab, torch.full((count,), 10), torch.full((count,), 2), temperatures, device.options(count))
    starts = torch.tensor([[stream_start(stream_key(5, row, 0), 1)] for row in range(count)])
    found = local_best(rows, 0, vocab, DrawOptions(temperatures, starts)).ids.bincount(minlength=vocab).double()
    penalised = logits.clone()
    penalised[[2, 10, 11]] /= 1.5
    kept = penalised.topk(6).indices
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[kept] = count * (penalised[kept].double() / 0.8).softmax(0)
    assert found[expected == 0].sum() == 0
    assert ((found - expected)[kept] ** 2 / expected[kept]).sum() < 20.5, "five degrees of freedom, one in a thousand"


@pytest.fixture(scope="module")
def kernel_on_host(tmp_path_factory):
    """The kernel's source, compiled for the host, with threads for threads."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("on_host")
    host = ROOT / "tests/cpu/cuda_on_host"
    for source in (*(ROOT / "kernels/cuda").glob("*.cuh"), ROOT / "kernels/filter_logits.cu", *host.iterdir()):
        shutil.copy(source, folder)
    library = folder / "filter_logits.so"
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-DELEM=2"]
    done = subprocess.run([compiler, *options, "-o", library, folder / "filter_logits.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def run_on_host(library, operands, ctas: int, threads: int) -> torch.Tensor:
    """What `launch_filter_logits` does, but for its look at where the tensors are."""
    logits, num_ids, token_ids, positions, temperatures, options = operands
    tensors = (logits, token_ids, positions, temperatures, options.rules, options.bias_ids, options.biases)
    tensors += (options.forbidden_ids, options.seen)
    assert all(tensor.is_contiguous() for tensor in tensors)
    params = FilterParams(*(tensor.data_ptr() for tensor in tensors), logits.shape[1], options.seen.shape[1], num_ids)
    library.run_filter_logits(ctypes.byref(params), len(logits), ctas, threads)
    return logits


def test_the_kernels_structures_have_the_sizes_of_their_python_ones(kernel_on_host):
    assert kernel_on_host.params_bytes() == ctypes.sizeof(FilterParams)
    assert kernel_on_host.shared_bytes() == _SHARED_BYTES


@pytest.mark.parametrize("ctas,threads", ((1, 32), (2, 8), (3, 5)))
@pytest.mark.parametrize("is_tied", (False, True))
def test_the_kernel_equals_its_twin_to_the_bit(kernel_on_host, is_tied, ctas, threads):
    for seed, vocab in enumerate((5, 12, 40, 131, 700, 1009)):
        batch = Batch(1000 * ctas + seed, 6, vocab, is_tied)
        wanted, found = batch.operands(), batch.operands()
        filter_logits(*wanted)
        run_on_host(kernel_on_host, found, ctas, threads)
        assert torch.equal(found[0][:, :vocab], wanted[0][:, :vocab]) and found[0][:, vocab:].isnan().all()
        assert torch.equal(found[-1].seen[1:], wanted[-1].seen[1:]), "counts of what was said, but for the slot of nobody"
        assert batch.drawn(found[0]) == sample(batch.logits, batch.states)


def test_the_kernel_leaves_rows_that_are_not_there_or_not_finite(kernel_on_host):
    batch = Batch(3, 5, 50, is_tied=False)
    batch.logits[0, 7], batch.logits[1, 3], batch.logits[2] = float("nan"), float("inf"), float("-inf")
    batch.temperatures[:] = 1.0
    batch.positions[4] = -1
    found = run_on_host(kernel_on_host, batch.operands(), 2, 8)[:, :50]
    assert found.amax(1).isfinite().tolist()[:4] == [False, False, False, True]
    assert torch.equal(found[4], batch.logits[4])
