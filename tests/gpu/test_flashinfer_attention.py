"""FlashInfer's decode attention, and the kernel that runs before it, against their torch twins, on one GPU.

`python -m pytest -q tests/gpu/test_flashinfer_attention.py`. Attention is skipped without FlashInfer. Of heads and pages there
are only three sorts, since FlashInfer compiles for each of them; so the launchers are kept.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kernels.build import Build, default_cache_folder
from kernels.decode_attention import decode_attention
from kernels.decode_write import decode_write, launch_decode_write, load_decode_write
from kernels.flashinfer_attention import FlashInferAttention, is_installed
from kernels.rotary import rotary_turns
from tests.gpu.attention_case import AttentionCase, Step

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = 4e-2  # of results of about 1, as for our kernel: weights and results are rounded, keys may be a rounding apart
# Of heads: a fused product may round to the neighbour of what two roundings give.
ROUNDING = {BF16: 4 * torch.finfo(BF16).eps, FP16: 4 * torch.finfo(FP16).eps, FP32: 4 * torch.finfo(FP32).eps}
MAX_ROWS, MAX_CONTEXT = 256, 40000
BUILD = Build(default_cache_folder())
HEADS = {"group of 7": (28, 4, 128), "group of 8": (8, 1, 128), "group of 7 of 64": (14, 2, 64)}
BORDERS = (0, 1, 7, 8, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, -1)
needs_flashinfer = pytest.mark.skipif(not is_installed(), reason="FlashInfer is not installed")


@cache
def launcher(num_q: int, num_kv: int, head_dim: int) -> FlashInferAttention:
    inv_freq = 10000.0 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)  # as a `Step` has it
    turns = rotary_turns(MAX_CONTEXT, inv_freq, 1.0, BF16)
    num_sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return FlashInferAttention(load_decode_write(BUILD, BF16), num_q, num_kv, 16, turns, MAX_ROWS, num_sms)


def of(step: Step) -> FlashInferAttention:
    return launcher(step.case.num_q, step.case.num_kv, step.case.head_dim)


def case_of(positions: tuple[int, ...], heads: str = "group of 7", **changes) -> AttentionCase:
    num_q, num_kv, head_dim = HEADS[heads]
    return AttentionCase(positions, num_q, num_kv, head_dim, has_bias=False, **changes)


def check(case: AttentionCase) -> None:
    step, wanted = Step(case, DEVICE), Step(case, DEVICE)
    decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=16)
    before = [part.clone() for part in (step.qkv, step.positions, step.page_table)]
    of(step).launch(*step.arguments())
    assert_same(step, wanted)
    assert all(torch.equal(old, new) for old, new in zip(before, (step.qkv, step.positions, step.page_table)))
    of(step).launch(*step.arguments())  # from counters that are 0 again
    assert_same(step, wanted)


def assert_same(step: Step, wanted: Step) -> None:
    torch.testing.assert_close(step.out, wanted.out, atol=TOLERANCE, rtol=TOLERANCE)
    assert not step.out[step.positions < 0].any(), "a padding row is zeros"
    for found, right in ((step.keys, wanted.keys), (step.values, wanted.values)):
        torch.testing.assert_close(found, right, atol=ROUNDING[BF16], rtol=ROUNDING[BF16], equal_nan=True)


@needs_flashinfer
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("parts", [0, 2])
def test_lengths(heads, parts):
    check(case_of(BORDERS, heads, parts=parts))


@needs_flashinfer
@pytest.mark.parametrize("heads", HEADS)
def test_few_rows_that_all_sms_share(heads):
    check(case_of((32767,), heads))
    check(case_of((-1, 20001, 3), heads, is_wide=True))
    check(case_of((-1,), heads))


@needs_flashinfer
def test_many_rows_that_share_nothing():
    lengths = torch.randint(-1, 900, (MAX_ROWS,), generator=torch.Generator().manual_seed(1)).tolist()
    check(case_of(tuple(lengths)))


@needs_flashinfer
def test_layers_back_to_back_share_the_workspace():
    """In a graph, each launch behind another that may not have ended, on caches of their own."""
    case = case_of((3000, 10, 1700))
    steps, wanted = ([Step(case, DEVICE, seed) for seed in range(12)] for _ in range(2))
    attention, graph = of(steps[0]), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for step in steps:
            attention.launch(*step.arguments())
    for _ in range(5):
        for step in steps:
            step.out.fill_(float("nan"))
        graph.replay()
    for step, right in zip(steps, wanted):
        decode_attention(*right.arguments(), turns=right.turns, page_size=16)
        assert_same(step, right)


@needs_flashinfer
def test_a_replayed_graph_goes_on_from_token_to_token():
    """Positions advance on the device, over borders of pages; each step reads what the last one wrote."""
    num_steps, starts = 40, (10, 0, -1, 500)
    case = case_of(tuple(start + num_steps if start >= 0 else start for start in starts))
    step, wanted = Step(case, DEVICE), Step(case, DEVICE)
    qkvs = torch.randn(num_steps, *step.qkv.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE) * 2
    for each in (step, wanted):
        each.positions.copy_(torch.tensor(starts))
    advance = (step.positions >= 0).int()
    attention, graph = of(step), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        attention.launch(*step.arguments())
        step.positions.add_(advance)
    for qkv in qkvs:
        for each in (step, wanted):
            each.qkv.copy_(qkv)
        graph.replay()
        decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=16)
        torch.testing.assert_close(step.out, wanted.out, atol=TOLERANCE, rtol=TOLERANCE)
        wanted.positions.add_(advance)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_the_kernel_that_writes(parts, dtype):
    for head_dim, page_size, is_wide in ((128, 16, False), (64, 1, True), (128, 64, True)):
        case = AttentionCase(BORDERS, 7, 1, head_dim, dtype, page_size, parts, has_bias=False, is_wide=is_wide)
        found, wanted = [], []
        for outputs in (found, wanted):
            x = Step(case, DEVICE)
            queries, lengths = torch.full_like(x.out, -3), torch.full((len(BORDERS),), -7, dtype=torch.int32, device=DEVICE)
            operands = (x.qkv, x.turns, x.positions, x.page_table, queries, x.keys, x.values, lengths, page_size)
            if outputs is found:
                launch_decode_write(load_decode_write(BUILD, dtype), *operands)
            else:
                decode_write(*operands)
            outputs += [queries, x.keys, x.values, lengths]
        for own, right in zip(found, wanted):
            torch.testing.assert_close(own, right, atol=ROUNDING[dtype], rtol=ROUNDING[dtype], equal_nan=True)
