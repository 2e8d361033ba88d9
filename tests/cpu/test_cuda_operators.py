"""How the operators of a GPU are strung together, with the torch twin in the place of each kernel: shapes, parts, windows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import engine.eager
from comm.vocabulary import best_of_ranks, local_best
from engine.drafts.depth import FixedDepth
from engine.drafts.speculation import Speculation
from engine.graph import cuda_operators
from engine.graph.cuda_operators import CudaOperators, EndKernels
from engine.graph.operators import _exchange
from engine.graph.prefill import TwinPrefill
from engine.graph.row_state import RowState, Speculable
from engine.graph.step import TwinBurst
from engine.rope import inverse_frequencies
from kernels.accept_drafts import accept_drafts
from kernels.add_norm import add_norm
from kernels.advance_rows import advance_rows
from kernels.decode_attention import decode_attention
from kernels.embed import embed
from kernels.filter_logits import filter_logits
from kernels.fp8_linear import MIN_ROWS, scaled_linear
from kernels.gemv import gemv_twin
from kernels.quantize import Fp8Weight
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_turns
from kernels.rotary_write import rotary_write
from kernels.silu_mul import silu_mul
from tests.cpu.engine_harness import CPU, answer, request, twin_draft_model
from tests.cpu.test_burst import prompts
from tests.cpu.test_fp8_linear import fp8_linear
from tests.cpu.tiny import make_model, save_model


class TwinGemv:
    """Products as parts. `most_rows`: more are left to the library."""

    def __init__(self, most_rows: int):
        self._most_rows = most_rows
        self.num_products = 0

    def takes(self, x, weight, is_gate_up=False):
        return x.shape[0] <= self._most_rows

    def linear(self, x, weight, bias=None):
        self.num_products += 1
        whole = gemv_twin(x, dense(weight), bias, is_gate_up=False)
        return torch.stack([whole / 2, whole / 4, whole / 4])

    def gate_up(self, x, weight, bias=None):
        return gemv_twin(x, dense(weight), bias, is_gate_up=True)


def dense(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


class TwinPeers:
    """The fused norm, and the choice, of the ranks of a thread each."""

    def __init__(self, comm, is_norm_fused=True, has_room=False):
        self._comm, self.is_norm_fused, self.num_fused, self.num_two_shot = comm, is_norm_fused, 0, 0
        self._room = torch.full((1 << 16,), float("nan")) if has_room and comm.size > 1 else None
        self.collectives = self.vocabulary = self

    def summands(self, rows, hidden, dtype):
        return None if self._room is None else self._room[: rows * hidden].view(rows, hidden)

    def all_reduce_two_shot_norm(self, summands, residual, weight, eps):
        self.num_two_shot += 1
        total = self._comm.all_reduce(summands.clone())
        summands.fill_(float("nan"))
        share = -(-len(residual) // self._comm.size)
        parts = torch.zeros(self._comm.size, *residual.shape)
        own = slice(self._comm.rank * share, (self._comm.rank + 1) * share)
        residual[own] += total[own]
        parts[self._comm.rank, own] = rms_norm(residual[own], weight, eps)
        is_other = torch.ones(len(residual), 1, dtype=torch.bool)
        is_other[own] = False
        residual.masked_fill_(is_other, float("nan"))
        return self._comm.all_reduce(parts).sum(0)

    def all_reduce_lamport_norm(self, x, residual, weight, eps, normed, is_next_early):
        self.num_fused += 1
        x = x if x.dim() == 2 else x[0] + x[1] + x[2]
        residual += self._comm.all_reduce(x.contiguous())
        return normed.copy_(rms_norm(residual, weight, eps))

    is_one_rank_per_gpu = True

    def gather(self, x):
        columns = torch.zeros(self._comm.size, *x.shape)
        columns[self._comm.rank] = x
        return torch.cat(list(self._comm.all_reduce(columns)), dim=-1)

    def draw(self, logits, first_id, num_valid, options, values):
        assert logits.dim() == 2
        part = local_best(logits, first_id, num_valid, options)
        best = best_of_ranks(_exchange(part, self._comm))
        values.copy_(best.values)
        return best.ids


def twin_attention(step, max_context: int):
    inv_freq = inverse_frequencies(step.config.rope, step.config.head_dim)
    turns = rotary_turns(max_context, inv_freq, step.config.rope.attention_factor, step.dtype)

    def launch(*tensors, norms=None, window, is_early, is_rotated=False):
        options = {"norms": norms, "window": window, "is_rotated": is_rotated}
        return decode_attention(*tensors, turns=turns, page_size=step.kv.page_size, **options)

    return SimpleNamespace(launch=launch, max_rows=2, turns=turns)


@pytest.fixture
def twin_kernels(monkeypatch):
    """Twins in the place of the launches."""

    def launch_embed(kernel, ids, table, begin, end, out, zeroed):
        zeroed.zero_()
        return out.copy_(embed(ids, table, begin, end))

    def launch_add_norm(kernel, x, residual, weight, eps, out):
        return out.copy_(add_norm(x, residual, weight, eps))

    def launch_filters(kernel, *tensors, is_pdl):
        filter_logits(*tensors)

    monkeypatch.setattr(cuda_operators, "launch_advance_rows", lambda kernel, *tensors: advance_rows(*tensors))
    monkeypatch.setattr(cuda_operators, "launch_accept_drafts", lambda kernel, *tensors: accept_drafts(*tensors))
    monkeypatch.setattr(cuda_operators, "launch_embed", launch_embed)
    monkeypatch.setattr(cuda_operators, "launch_silu_mul", lambda kernel, both, out: out.copy_(silu_mul(both)))
    monkeypatch.setattr(cuda_operators, "launch_filter_logits", launch_filters)
    monkeypatch.setattr(cuda_operators, "launch_add_norm", launch_add_norm)
    monkeypatch.setattr(cuda_operators, "launch_rotary_write", lambda kernel, *tensors: rotary_write(*tensors))
    monkeypatch.setattr(cuda_operators, "FUSED_ROWS", 3)


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("most_rows", (0, 2, 16))
@pytest.mark.parametrize("has_attention", (True, False))
@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_the_wiring(family, has_attention, most_rows, size, tmp_path, twin_kernels):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if family == "qwen2" else {}
    folder = save_model(make_model(family, max_position_embeddings=128, **windows), tmp_path)
    gemvs, shapes = [], set()

    class SeenPrefill(TwinPrefill):
        def _run(self, shape):
            shapes.add(shape)
            return super()._run(shape)

    def bursts(replica):
        step, max_context = replica.backend, replica.scheduler.limits.max_model_len
        attention = twin_attention(step, max_context) if has_attention else None
        gemvs.append(TwinGemv(most_rows))
        ends = EndKernels(*[None] * 7)
        operators = CudaOperators(step, replica.full_vocab, TwinPeers(replica.comm), attention, gemvs[-1], ends)
        replica.backend = SeenPrefill(operators, replica.scheduler.limits, graph_tokens=64)
        max_pages = -(-max_context // step.kv.page_size)
        return TwinBurst(operators, RowState(8, max_pages, replica.full_vocab, CPU, replica.comm.check))

    # Lengths fall apart, so that steps of four, three, two rows and one are among them.
    rows = lambda: [  # noqa: E731
        request(text, idx, max_tokens=5 + 4 * idx, temperature=float(idx % 2)) for idx, text in enumerate(prompts(4))
    ]
    plain, run = answer(folder, rows(), size), answer(folder, rows(), size, bursts=bursts)
    assert run.answers == plain.answers and run.stats.num_waits == 0
    filtered = lambda: [  # noqa: E731
        request(text, idx, max_tokens=5 + 4 * idx, temperature=1.0, top_k=5 * idx, top_p=0.9, repetition_penalty=1.2)
        for idx, text in enumerate(prompts(4))
    ]
    plain, run = answer(folder, filtered(), size), answer(folder, filtered(), size, bursts=bursts)
    assert run.answers == plain.answers and run.stats.num_waits == 0
    # Chunks of prompts beside rows that decode, prompts alone in a bucket, and whole prompts beside rows that decode.
    for settings in ({"max_step_tokens": 9}, {"max_batch": 1}, {"max_batch": 2}):
        assert answer(folder, rows(), size, bursts=bursts, **settings).answers == answer(folder, rows(), size).answers
    assert (gemvs[0].num_products > 0) == (most_rows > 0)
    assert any(shape.num_prompts > 1 for shape in shapes) and any(shape.num_single for shape in shapes) == has_attention


@pytest.mark.parametrize("most_rows", (0, 2, 16))
@pytest.mark.parametrize("has_attention", (True, False))
@pytest.mark.parametrize("family", ("qwen2", "qwen3"))
def test_the_wiring_of_steps_with_drafts(family, has_attention, most_rows, tmp_path, twin_kernels):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1} if family == "qwen2" else {}
    folder = save_model(make_model(family, max_position_embeddings=128, **windows), tmp_path)

    def bursts(replica):
        step, max_context = replica.backend, replica.scheduler.limits.max_model_len
        attention = twin_attention(step, max_context) if has_attention else None
        ends = EndKernels(*[None] * 7)
        operators = CudaOperators(step, replica.full_vocab, TwinPeers(replica.comm), attention, TwinGemv(most_rows), ends)
        max_pages = -(-max_context // step.kv.page_size)
        state = RowState(8, max_pages, replica.full_vocab, CPU, replica.comm.check, Speculable(8, 4, max_context))
        return TwinBurst(operators, state, drafter=twin_draft_model(folder)(replica))

    for rules in ({}, {"temperature": 1.0, "top_k": 9}):
        rows = lambda: [request(text, idx, max_tokens=5 + 4 * idx, **rules) for idx, text in enumerate(prompts(4))]  # noqa: B023, E731
        speculation = Speculation(None, FixedDepth(3))
        run = answer(folder, rows(), 2, bursts=bursts, speculation=speculation)
        assert run.answers == answer(folder, rows(), 2).answers and speculation.stats.acceptance > 0.6


@pytest.mark.parametrize("is_norm_fused", (True, False))
@pytest.mark.parametrize("most_rows", (0, 16))
def test_a_sum_of_few_rows_is_one_kernel_with_the_norm_unless_another_algorithm_is_asked_for(
    most_rows, is_norm_fused, tmp_path, twin_kernels, monkeypatch
):
    folder, peers, norms = save_model(make_model("qwen2", max_position_embeddings=128), tmp_path), [], []
    launch = cuda_operators.launch_add_norm
    monkeypatch.setattr(cuda_operators, "launch_add_norm", lambda *operands: norms.append(len(operands[1])) or launch(*operands))

    def bursts(replica):
        peers.append(TwinPeers(replica.comm, is_norm_fused))
        ends = EndKernels(*[None] * 7)
        operators = CudaOperators(replica.backend, replica.full_vocab, peers[-1], None, TwinGemv(most_rows), ends)
        return TwinBurst(operators, RowState(8, 8, replica.full_vocab, CPU, replica.comm.check))

    rows = lambda: [request(text, idx, max_tokens=5) for idx, text in enumerate(prompts(2))]  # noqa: E731
    assert answer(folder, rows(), 2, bursts=bursts).answers == answer(folder, rows(), 2).answers
    assert all((twin.num_fused > 0) == is_norm_fused for twin in peers) and (len(norms) > 0) != is_norm_fused
    assert not norms or max(norms) <= 3  # rows that would fit the fused kernel


@pytest.mark.parametrize("size", (1, 2))
def test_many_rows_by_an_fp8_matrix(size, tmp_path, monkeypatch, twin_kernels):
    """Scaled products in prefill, the widened matrix for few rows: as an eager step that does the same."""
    counts = []

    class TwinScaled:
        def takes(self, x, weight):
            return isinstance(weight, Fp8Weight) and x.shape[0] >= MIN_ROWS

        def linear(self, x, weight, bias=None):
            counts.append(x.shape[0])
            return scaled_linear(x, weight, bias)

    def bursts(replica):
        step, limits = replica.backend, replica.scheduler.limits
        ends, peers = EndKernels(*[None] * 7), TwinPeers(replica.comm)
        operators = CudaOperators(step, replica.full_vocab, peers, None, TwinGemv(0), ends, TwinScaled())
        replica.backend = TwinPrefill(operators, limits, graph_tokens=0)
        return TwinBurst(operators, RowState(8, 8, replica.full_vocab, CPU, replica.comm.check))

    folder = save_model(make_model("qwen2", max_position_embeddings=128), tmp_path)
    rows = lambda: [request([7 * idx + 3] * 20 + text, max_tokens=6) for idx, text in enumerate(prompts(3))]  # noqa: E731
    run = answer(folder, rows(), size, bursts=bursts, dtype="fp8", max_batch=1)
    assert len(set(counts)) == 3 and min(counts) > 20
    # The last layer's o, gate and up, and down meet the one token that is asked for, so they take the other way.
    assert len(counts) == 3 * size * (4 + 1)
    monkeypatch.setattr(engine.eager, "linear", fp8_linear)
    assert run.token_ids != [] and len(run.token_ids[2]) == 6
    plain = answer(folder, rows(), size, dtype="fp8", max_batch=1)
    same = sum(ids == wanted for ids, wanted in zip(run.token_ids, plain.token_ids))
    assert same >= 2, (run.token_ids, plain.token_ids)  # the last layer's rounding may turn a near tie


@pytest.mark.parametrize("dtype", ("float32", "fp8"))
@pytest.mark.parametrize("size", (1, 2, 3))
def test_many_rows_are_summed_and_normed_where_the_products_lie(size, dtype, tmp_path, monkeypatch, twin_kernels):
    """Each rank norms a share of the rows, and its residual is good for these alone; the rest of it is poisoned. Prompts, and
    decode steps of more rows than the fused norm takes."""
    monkeypatch.setattr(cuda_operators, "FUSED_ROWS", 2)
    twins = []

    def bursts(replica):
        step, limits = replica.backend, replica.scheduler.limits
        twins.append(TwinPeers(replica.comm, has_room=True))
        operators = CudaOperators(step, replica.full_vocab, twins[-1], None, TwinGemv(0), EndKernels(*[None] * 7))
        replica.backend = TwinPrefill(operators, limits, graph_tokens=64)
        return TwinBurst(operators, RowState(8, 8, replica.full_vocab, CPU, replica.comm.check))

    folder = save_model(make_model("qwen2", max_position_embeddings=128), tmp_path)
    texts = ([3] * 5, [4] * 21, [5] * 4, [6, 7], [9], [3, 8, 3])
    for options in ({"max_batch": 1}, {"max_batch": 6}, {"max_batch": 4, "max_step_tokens": 7}):
        rows = lambda: [request(text, idx, max_tokens=6 + idx) for idx, text in enumerate(texts)]  # noqa: E731
        run = answer(folder, rows(), size, bursts=bursts, dtype=dtype, **options)
        assert run.answers == answer(folder, rows(), size, dtype=dtype, **options).answers, options
    assert all((twin.num_two_shot > 0) == (size > 1) for twin in twins)
