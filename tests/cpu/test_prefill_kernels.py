"""The kernels of prefill without a GPU: their torch twins against separate steps, and what the launchers pass on and refuse."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.add_norm import add_norm, launch_add_norm
from kernels.chunk_attention import Chunk, PackedRows, chunk_attention, packed_mask, plan_chunk
from kernels.kv_write import kv_write
from kernels.paged_attention import paged_attention, plan_row
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary_table, rotary_turns, rotate
from kernels.rotary_write import launch_rotary_write, rotary_write
from tests.cpu.test_device_refusals import on_gpu

CPU = torch.device("cpu")
INV_FREQ = 1.0 / 1e4 ** (torch.arange(0, 16, 2) / 16)


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_add_norm_is_the_sum_and_its_norm(dtype):
    x, residual, weight = rand(5, 24, dtype=dtype), rand(5, 24, seed=1, dtype=dtype), rand(24, seed=2, dtype=dtype)
    before, total = x.clone(), residual + x
    found = add_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total) and torch.equal(found, rms_norm(total, weight, 1e-6)) and torch.equal(x, before)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rotary_write_is_both_steps(dtype):
    num_q, num_kv, positions = 6, 2, torch.tensor([3, 4, 5, 0, 9])
    qkv = rand(5, num_q + 2 * num_kv, 16, dtype=dtype)
    slots = torch.tensor([7, 30, 2, -1, -1])
    turns = rotary_turns(12, INV_FREQ, 1.5, dtype).index_select(0, positions)
    wanted = qkv.clone()
    wanted[:, : num_q + num_kv] = rotate(qkv[:, : num_q + num_kv], *rotary_table(positions, INV_FREQ, 1.5, dtype))
    caches = [torch.full((40, num_kv, 16), float("nan"), dtype=dtype) for _ in range(4)]
    kv_write(*caches[:2], slots[:3], wanted[:3, num_q : num_q + num_kv], wanted[:3, num_q + num_kv :])
    rotary_write(qkv, turns, slots, *caches[2:])
    assert torch.equal(qkv, wanted)
    for expected, found in zip(caches[:2], caches[2:]):
        assert torch.equal(found.nan_to_num(9.0), expected.nan_to_num(9.0))


# (context, new tokens, pages) of each row, pages of 4 tokens.
ROWS = (
    (0, 9, (3, 4, 5)), (0, 9, (8, 7, 6)), (5, 1, (20, 21)), (6, 7, (30, 31, 32, 33)), (10, 5, (40, 12, 44, 13)), (0, 1, (50,)),
    (14, 3, (60, 58, 61, 57, 2)),
)  # fmt: skip


@pytest.mark.parametrize("window", (None, 4, 8, 100))
def test_chunk_attention_is_paged_attention(window):
    num_q, num_kv, size = 6, 2, 4
    keys, values = rand(400, num_kv, 16, seed=1), rand(400, num_kv, 16, seed=2)
    num_tokens = sum(count for _, count, _ in ROWS)
    qkv = rand(num_tokens, num_q + 2 * num_kv, 16, seed=3)
    plans, chunks, start = [], [], 0
    for context, count, pages in ROWS:
        place = torch.arange(context, context + count)
        slots = torch.tensor(pages)[place // size] * size + place % size
        rows = qkv[start : start + count]
        kv_write(keys, values, slots, rows[:, num_q : num_q + num_kv], rows[:, num_q + num_kv :])
        plans.append(plan_row(start, count, context, pages, size, window, torch.float32, CPU))
        chunks.append(plan_chunk(start, count, context, pages, torch.tensor(pages), size, window, torch.float32))
        start += count
    is_slice = [isinstance(chunk.cached, slice) for chunk in chunks]
    assert is_slice[2:4] == [True, True] and isinstance(chunks[4].cached, torch.Tensor) and chunks[0].cached is None
    wanted = paged_attention(qkv[:, :num_q], keys, values, plans, torch.empty(num_tokens, num_q, 16))
    before = qkv.clone()
    for lengths in (None, (9, 9)):  # the first two rows together, and one by one
        packed = PackedRows(0, 18, torch.tensor([0, 9, 18], dtype=torch.int32), 9, lengths, window)
        for joined in (chunks, [packed, *chunks[2:]]):
            found = chunk_attention(qkv, keys, values, joined, size)
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)
            assert torch.equal(qkv, before)
            # With a place for the result, only the chunks' tokens are written.
            out, end = torch.full((num_tokens, num_q, 16), 7.0), joined[0].end
            chunk_attention(qkv, keys, values, joined[1:], size, out)
            assert (out[:end] == 7.0).all()
            torch.testing.assert_close(out[end:], wanted[end:], atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", (None, 1, 3, 50))
@pytest.mark.parametrize("lengths", ((1, 1, 1), (5, 1, 12, 2), (7, 0, 0), (3, 0, 4)))
def test_packed_rows_attend_each_for_itself(lengths, window):
    """Rows of no tokens are those that a captured step has too many of."""
    num_q, num_kv, total = 4, 2, sum(lengths)
    qkv, cache = rand(total, num_q + 2 * num_kv, 16), rand(8, num_kv, 16)
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    wanted, at = torch.empty(total, num_q, 16), 0
    for length in filter(None, lengths):
        pages = list(range(length))
        chunk = plan_chunk(at, length, 0, pages, torch.tensor(pages), 4, window, torch.float32)
        chunk_attention(qkv, cache, cache, (chunk,), 4, wanted)
        at += length
    for known in (None, tuple(filter(None, lengths))):
        found = chunk_attention(qkv, cache, cache, (PackedRows(0, total, starts, max(lengths), known, window),), 4)
        torch.testing.assert_close(found, wanted, atol=2e-6, rtol=0)


def test_the_mask_of_packed_rows():
    starts = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    seen = packed_mask(PackedRows(0, 5, starts, 3, window=2), torch.float32) == 0.0
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]]


def test_one_chunk_that_is_all_needs_no_copy():
    qkv, cache = rand(6, 4, 16), rand(8, 1, 16)
    found = chunk_attention(qkv, cache, cache, (Chunk(0, 6, 6),), 4)
    apart = chunk_attention(qkv, cache, cache, (Chunk(0, 6, 6),), 4, torch.empty(6, 2, 16))
    assert found.shape == (6, 2, 16) and torch.equal(found, apart)


@pytest.fixture
def kernel(monkeypatch):
    launches = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    fake = SimpleNamespace(launches=launches)
    fake.launch = lambda grid, block, args, stream, is_pdl: launches.append((grid, block, args[0], stream, is_pdl))
    return fake


@pytest.mark.parametrize("hidden, dtype, threads", [(8192, torch.bfloat16, 256), (3584, torch.bfloat16, 128),
                                                    (8, torch.bfloat16, 32), (8192, torch.float32, 512)])  # fmt: skip
def test_add_norm_passes_addresses_and_shapes(kernel, hidden, dtype, threads):
    x, residual, weight = on_gpu(70, hidden, dtype=dtype), on_gpu(70, hidden, dtype=dtype), on_gpu(hidden, dtype=dtype)
    assert launch_add_norm(kernel, x, residual, weight, 1e-6, x) is x
    ((grid, block, params, stream, is_pdl),) = kernel.launches
    assert (grid, block, stream, is_pdl) == (70, threads, 77, True)
    assert (params.x, params.residual, params.weight, params.out) == tuple(t.data_ptr() for t in (x, residual, weight, x))
    assert params.vectors == hidden * dtype.itemsize // 16 <= 4 * threads and params.eps == pytest.approx(1e-6)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"x": torch.zeros(3, 64, dtype=torch.bfloat16)}, TypeError, "x must be .* on a GPU, not torch.bfloat16 on cpu"),
        ({"weight": on_gpu(64, dtype=torch.float32)}, TypeError, "weight must be"),
        ({"out": on_gpu(3, 64, offset=1)}, ValueError, "out must be contiguous .* at a 16-byte border"),
        ({"x": on_gpu(2, 64)}, ValueError, r"x must be contiguous \(3, 64\)"),
        ({"residual": on_gpu(3, 65)}, ValueError, "a multiple of 16 bytes up to 32768, not 130"),
        ({"residual": on_gpu(3, 32768)}, ValueError, "up to 32768, not 65536"),
        ({"residual": on_gpu(0, 64)}, ValueError, "at least one row"),
    ],
    ids=str,
)
def test_add_norm_refuses_what_does_not_fit(kernel, changes, error, sentence):
    fitting = {"x": on_gpu(3, 64), "residual": on_gpu(3, 64), "weight": on_gpu(64), "eps": 1e-6, "out": on_gpu(3, 64)}
    with pytest.raises(error, match=sentence):
        launch_add_norm(kernel, **{**fitting, **changes})
    assert not kernel.launches


@pytest.mark.parametrize("num_q, num_kv, dim, dtype, threads, half", [(28, 4, 128, torch.bfloat16, 256, 8),
                                                                      (2, 1, 16, torch.bfloat16, 32, 1),
                                                                      (8, 2, 64, torch.float32, 96, 8)])  # fmt: skip
def test_rotary_write_passes_addresses_and_shapes(kernel, num_q, num_kv, dim, dtype, threads, half):
    qkv, turns, slots = on_gpu(9, num_q + 2 * num_kv, dim, dtype=dtype), on_gpu(9, dim, dtype=dtype), on_gpu(9, dtype=torch.int64)
    keys, values = on_gpu(32, num_kv, dim, dtype=dtype), on_gpu(32, num_kv, dim, dtype=dtype)
    launch_rotary_write(kernel, qkv, turns, slots, keys, values, is_pdl=False)
    ((grid, block, params, stream, is_pdl),) = kernel.launches
    assert (grid, block, stream, is_pdl) == (9, threads, 77, False)
    assert (params.num_q, params.num_kv, params.half) == (num_q, num_kv, half)
    found = (params.qkv, params.turns, params.slots, params.keys, params.values)
    assert found == tuple(tensor.data_ptr() for tensor in (qkv, turns, slots, keys, values))


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"qkv": on_gpu(3, 6, 24)}, ValueError, "heads of whole vectors"),
        ({"qkv": on_gpu(0, 6, 32)}, ValueError, "at least one token"),
        ({"qkv": on_gpu(3, 4, 32)}, ValueError, "4 heads do not hold queries beside 2"),
        ({"turns": on_gpu(2, 32)}, ValueError, r"turns must be contiguous \(3, 32\)"),
        ({"values": on_gpu(9, 2, 32)}, ValueError, "values must be"),
        ({"keys": on_gpu(8, 2, 32, dtype=torch.float32)}, TypeError, "keys must be"),
        ({"slots": on_gpu(3, dtype=torch.int32)}, TypeError, r"slots must be contiguous int64 \[3\]"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, TypeError, "slots must be"),
    ],
    ids=str,
)
def test_rotary_write_refuses_what_does_not_fit(kernel, changes, error, sentence):
    fitting = {"qkv": on_gpu(3, 6, 32), "turns": on_gpu(3, 32), "slots": on_gpu(3, dtype=torch.int64), "keys": on_gpu(8, 2, 32),
               "values": on_gpu(8, 2, 32)}  # fmt: skip
    with pytest.raises(error, match=sentence):
        launch_rotary_write(kernel, **{**fitting, **changes})
    assert not kernel.launches
