"""The kernels of prefill on a GPU against their torch twins, and attention of chunks against the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.add_norm import add_norm, launch_add_norm, load_add_norm
from kernels.build import Build, default_cache_folder
from kernels.chunk_attention import Chunk, PackedRows, chunk_attention, plan_chunk
from kernels.fp8_linear import open_scaled_linear, scaled_linear
from kernels.long_attention import takes_long
from kernels.paged_attention import paged_attention, plan_row
from kernels.quantize import FP8, quantize
from kernels.quantize_rows import launch_quantize_rows, load_quantize_rows, quantize_rows
from kernels.rotary import rotary_turns
from kernels.rotary_write import launch_rotary_write, load_rotary_write, rotary_write
from tests.gpu.test_embed_silu_kernels import bits, rand

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUILD = Build(default_cache_folder())
NAN = float("nan")
EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, hidden", [(1, 8), (65, 896), (129, 3584), (2048, 8192), (3, 1032)])
@pytest.mark.parametrize("is_in_place", (False, True))
def test_add_norm(dtype, rows, hidden, is_in_place):
    x, residual = rand(rows + 1, hidden, dtype=dtype), rand(rows + 1, hidden, dtype=dtype, scale=30.0, seed=1)
    weight = rand(hidden, dtype=dtype, seed=2)
    wanted_residual, x_before = residual[:rows].clone(), x.clone()
    wanted = add_norm(x[:rows], wanted_residual, weight, EPS)
    last = residual[rows].clone()
    out = x if is_in_place else torch.full_like(x, NAN)
    launch_add_norm(load_add_norm(BUILD, dtype), x[:rows], residual[:rows], weight, EPS, out[:rows])
    assert torch.equal(bits(residual[:rows]), bits(wanted_residual)) and torch.equal(residual[rows], last)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out[:rows], wanted, rtol=4 * eps, atol=4 * torch.finfo(dtype).tiny)
    if dtype != torch.float32:
        assert (bits(out[:rows]) == bits(wanted)).float().mean() > 0.99
    assert torch.equal(out[rows], x_before[rows]) if is_in_place else out[rows].isnan().all()
    assert is_in_place or torch.equal(bits(x), bits(x_before))


def test_add_norm_of_no_numbers():
    x, residual, weight = (torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((3, 64), (3, 64), (64,)))
    x[1, 5] = NAN
    launch_add_norm(load_add_norm(BUILD, torch.bfloat16), x, residual, weight, EPS, out := torch.empty_like(x))
    assert out[1].isnan().all() and out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, num_q, num_kv, dim", [(1, 28, 4, 128), (700, 32, 4, 128), (65, 14, 2, 64), (9, 3, 3, 16)])
def test_rotary_write(dtype, tokens, num_q, num_kv, dim):
    inv_freq = (1e4 ** -(torch.arange(0, dim, 2) / dim)).cuda()
    turns = rotary_turns(4000, inv_freq, 1.2, dtype)[torch.randperm(4000, device="cuda")[:tokens]].contiguous()
    qkv = rand(tokens + 1, num_q + 2 * num_kv, dim, dtype=dtype)
    slots = torch.randperm(2 * tokens, device="cuda")[:tokens].contiguous()
    slots[1::3] = -1
    caches = [torch.full((2 * tokens, num_kv, dim), NAN, device="cuda", dtype=dtype) for _ in range(4)]
    wanted, last = qkv[:tokens].clone(), qkv[tokens].clone()
    rotary_write(wanted, turns, slots, *caches[:2])
    launch_rotary_write(load_rotary_write(BUILD, dtype), qkv[:tokens], turns, slots, *caches[2:])
    scale = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2e-6}[dtype]  # an ulp or two at the largest magnitude
    torch.testing.assert_close(qkv[:tokens], wanted, atol=scale, rtol=scale)
    assert torch.equal(bits(qkv[tokens]), bits(last)) and torch.equal(bits(qkv[:tokens, -num_kv:]), bits(wanted[:, -num_kv:]))
    for expected, found in zip(caches[:2], caches[2:]):
        torch.testing.assert_close(found, expected, atol=scale, rtol=scale, equal_nan=True)


def test_rotary_write_of_nothing_but_padding():
    qkv, cache = rand(4, 6, 64, dtype=torch.bfloat16), torch.full((8, 1, 64), NAN, device="cuda", dtype=torch.bfloat16)
    turns, slots = rand(4, 64, dtype=torch.bfloat16), torch.full((4,), -1, device="cuda")
    launch_rotary_write(load_rotary_write(BUILD, torch.bfloat16), qkv, turns, slots, cache, cache)
    assert cache.isnan().all()


# Context and new tokens of each row: whole prompts, two alike; chunks behind a context; single tokens.
ROWS = ((0, 200), (0, 200), (512, 300), (37, 129), (1000, 1), (0, 1), (16, 2))


@pytest.mark.parametrize("window", (None, 100))
@pytest.mark.parametrize("is_scattered", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_q, num_kv, dim", [(28, 4, 128), (14, 2, 64), (8, 8, 64)])
def test_chunk_attention(dtype, is_scattered, window, num_q, num_kv, dim):
    size, num_pages = 16, 400
    order = torch.randperm(num_pages).tolist() if is_scattered else list(range(num_pages))
    keys, values = (rand(num_pages * size, num_kv, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    num_tokens = sum(count for _, count in ROWS)
    qkv = rand(num_tokens, num_q + 2 * num_kv, dim, dtype=dtype, seed=3)
    plans, chunks, start = [], [], 0
    for context, count in ROWS:
        pages, order = order[: -(-(context + count) // size)], order[-(-(context + count) // size) :]
        page_ids, place = torch.tensor(pages, device="cuda"), torch.arange(context, context + count, device="cuda")
        slots = page_ids[place // size] * size + place % size
        rows = qkv[start : start + count]
        keys[slots], values[slots] = rows[:, num_q : num_q + num_kv], rows[:, num_q + num_kv :]
        plans.append(plan_row(start, count, context, pages, size, window, dtype, qkv.device))
        chunks.append(plan_chunk(start, count, context, pages, page_ids, size, window, dtype))
        start += count
    wanted = paged_attention(qkv[:, :num_q], keys, values, plans, torch.empty(num_tokens, num_q, dim, device="cuda", dtype=dtype))
    scale = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    starts = torch.tensor([0, 200, 400], dtype=torch.int32, device="cuda")
    for packed in ([], [PackedRows(0, 400, starts, 200, (200, 200), window)], [PackedRows(0, 400, starts, 400, None, window)]):
        found = chunk_attention(qkv, keys, values, [*packed, *chunks[2 * len(packed) :]], size)
        torch.testing.assert_close(found, wanted, atol=scale, rtol=scale)


@pytest.mark.parametrize("window", (None, 1, 100))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_q, num_kv, dim", [(28, 4, 128), (14, 2, 64), (4, 4, 24)])
def test_packed_rows_in_a_graph(dtype, window, num_q, num_kv, dim):
    """Rows whose lengths only the device knows change between replays; the last one is padding, and some have no tokens."""
    total, room = 512, 9
    qkv = rand(total, num_q + 2 * num_kv, dim, dtype=dtype, seed=3)
    cache = rand(16, num_kv, dim, dtype=dtype, seed=1)
    starts = torch.zeros(room + 1, dtype=torch.int32, device="cuda")
    rows = PackedRows(0, total, starts, total, window=window)
    chunk_attention(qkv, cache, cache, (rows,), 16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chunk_attention(qkv, cache, cache, (rows,), 16)
    scale = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}[dtype]
    for lengths in ((512,), (1, 511), (64, 65, 128, 129, 1, 1, 3), (2, 2, 2, 2, 2, 2, 2, 2)):
        ends = [sum(lengths[: idx + 1]) for idx in range(len(lengths))]
        starts.copy_(torch.tensor([0, *ends, *[total] * (room - len(lengths))]))
        found.fill_(NAN)
        graph.replay()
        at = 0
        for length in (*lengths, total - sum(lengths)):
            if length:
                pages = torch.arange(-(-length // 16), device="cuda")
                chunk = plan_chunk(0, length, 0, pages.tolist(), pages, 16, window, torch.float32)
                own = qkv[at : at + length].float()
                wanted = chunk_attention(own, cache.float(), cache.float(), (chunk,), 16)
                torch.testing.assert_close(found[at : at + length].float(), wanted, atol=scale, rtol=scale)
            at += length


LONG = (1536, 1537, 2047, 2048, 2300, 4096)
# Of a head's result, relative. The rounding of weights and results is 2**-9 or 2**-12 of each, at most; tens of keys that are
# missed, or seen in excess, are a tenth at these lengths.
LONG_ERROR = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3}


def check_long(found: torch.Tensor, qkv: torch.Tensor, num_kv: int, what: str) -> None:
    cache = torch.empty(16, num_kv, qkv.shape[2], device="cuda")
    wanted = chunk_attention(qkv.float(), cache, cache, (Chunk(0, qkv.shape[0], qkv.shape[0]),), 16)
    error = float(((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    print(f"{what}, {qkv.dtype}, {tuple(qkv.shape)}: relative error of a head at most {error:.5f}")
    assert error < LONG_ERROR[qkv.dtype]


def poison_free_memory(num_bytes: int) -> None:
    """What torch allocates next, up to so many bytes, holds NaN."""
    torch.cuda.empty_cache()
    torch.full((num_bytes // 4,), NAN, device="cuda")
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", LONG_ERROR)
@pytest.mark.parametrize("length", LONG)
@pytest.mark.parametrize("num_q, num_kv, dim", [(28, 4, 128), (8, 1, 128), (14, 2, 64), (64, 8, 128), (4, 4, 64)])
def test_long_attention(dtype, length, num_q, num_kv, dim):
    qkv = rand(length + 5, num_q + 2 * num_kv, dim, dtype=dtype, seed=3)
    cache, before = torch.full((16, num_kv, dim), NAN, device="cuda", dtype=dtype), qkv.clone()
    assert takes_long(qkv), "cuDNN's attention is not to be had here"
    poison_free_memory(1 << 30)
    own = qkv[:length]
    whole = chunk_attention(own, cache, cache, (Chunk(0, length, length, is_long=True),), 16)
    assert whole.is_contiguous(), "what follows would copy"
    check_long(whole, own, num_kv, "alone")
    # Between other tokens, which are not touched; the same plan.
    out = torch.full((length + 5, num_q, dim), NAN, device="cuda", dtype=dtype)
    chunk_attention(qkv, cache, cache, (Chunk(3, length, length, is_long=True),), 16, out)
    check_long(out[3 : length + 3], qkv[3 : length + 3], num_kv, "among others")
    assert out[:3].isnan().all() and out[length + 3 :].isnan().all() and torch.equal(bits(qkv), bits(before))


@pytest.mark.parametrize("length", (2047, 2048))
@pytest.mark.parametrize("num_q, num_kv, dim", [(28, 4, 128), (14, 2, 64)])
def test_long_attention_in_a_graph(length, num_q, num_kv, dim):
    """The plan is made by the plain call before the capture; replays read what is in the buffers then."""
    qkv = rand(length, num_q + 2 * num_kv, dim, dtype=torch.bfloat16)
    cache, chunk = torch.full((16, num_kv, dim), NAN, device="cuda", dtype=qkv.dtype), Chunk(0, length, length, is_long=True)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        plain = chunk_attention(qkv, cache, cache, (chunk,), 16).clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        found = chunk_attention(qkv, cache, cache, (chunk,), 16)
    found.fill_(NAN)
    graph.replay()
    assert torch.equal(found, plain)
    for seed in (1, 2, 3):
        qkv.copy_(rand(*qkv.shape, dtype=qkv.dtype, seed=seed))
        found.fill_(NAN)
        graph.replay()
        check_long(found, qkv, num_kv, "replayed")


def test_attention_of_20_000_tokens():
    """Against FlashAttention, as the whole square of scores is too large."""
    qkv = rand(20_000, 36, 128, dtype=torch.bfloat16)
    cache = torch.full((16, 4, 128), NAN, device="cuda", dtype=qkv.dtype)
    found, wanted = (
        chunk_attention(qkv, cache, cache, (Chunk(0, 20_000, 20_000, is_long=is_long),), 16).float() for is_long in (True, False)
    )
    error = float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())
    print(f"relative difference of a head at most {error:.5f}")
    assert error < 2 * LONG_ERROR[torch.bfloat16]


@pytest.mark.parametrize("rows, width", [(17, 64), (512, 8192), (3, 29568), (1, 8)])
def test_quantize_rows(rows, width):
    x = rand(rows + 1, width, dtype=torch.bfloat16) * torch.logspace(-4, 4, rows + 1, device="cuda").bfloat16()[:, None]
    x[0, 1] = 0.0
    before = x.clone()
    data = torch.full((rows + 1, width), 1.0, device="cuda").to(FP8)
    scale = torch.full((rows + 1,), NAN, device="cuda")
    launch_quantize_rows(load_quantize_rows(BUILD), x[:rows], data[:rows], scale[:rows])
    wanted, wanted_scale = quantize_rows(x[:rows])
    torch.testing.assert_close(scale[:rows], wanted_scale, rtol=2e-7, atol=0)
    found, wanted = data[:rows].view(torch.uint8), wanted.view(torch.uint8)
    # A scale or its reciprocal may round to a neighbour, which moves a value that lies in the middle between two.
    assert (found == wanted).float().mean() > 0.999 and ((found.int() - wanted.int()).abs() <= 1).all()
    assert scale[rows].isnan() and (data[rows].float() == 1.0).all() and torch.equal(bits(x), bits(before))


def test_quantize_rows_of_zeros_and_no_numbers():
    x = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    x[0], x[1, 3], x[2, 5] = 0.0, NAN, float("inf")
    data, scale = torch.empty(4, 64, device="cuda", dtype=FP8), torch.empty(4, device="cuda")
    launch_quantize_rows(load_quantize_rows(BUILD), x, data, scale)
    product = data.float() * scale[:, None]
    assert not product[0].any() and product[1].isnan().any() and product[2].isnan().any() and product[3].eq(1.0).all()


@pytest.mark.parametrize("is_fast", (False, True))
@pytest.mark.parametrize("has_bias", (False, True))
@pytest.mark.parametrize("rows, inner, out", [(17, 64, 32), (512, 3584, 4608), (2048, 14784, 8192), (100, 8192, 29568)])
def test_scaled_linear(rows, inner, out, has_bias, is_fast):
    x, bias = rand(rows, inner, dtype=torch.bfloat16), rand(out, dtype=torch.bfloat16, seed=2) if has_bias else None
    weight = quantize(rand(out, inner, dtype=torch.bfloat16, scale=0.02, seed=1), None, 1)
    scaled = open_scaled_linear(BUILD, is_fast)
    assert scaled.takes(x, weight)
    found, wanted = scaled.linear(x, weight, bias), scaled_linear(x, weight, bias)
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    print(f"{rows} x {inner} x {out}: relative error {error:.5f}")
    assert found.dtype == torch.bfloat16 and error < (0.02 if is_fast else 0.004)
