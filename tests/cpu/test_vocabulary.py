"""Arg-max and draw over a split vocabulary, plainly, against torch and the sampler; and the shapes of the kernels' launches."""

from __future__ import annotations

import ctypes

import pytest
import torch

from comm.device_vocabulary import (
    ARGMAX_CTAS,
    GATHER_CTAS,
    GATHER_PACKETS,
    GATHER_THREADS,
    ROW_CTAS,
    ROWS,
    ArgmaxParams,
    DeviceVocabulary,
    DrawParams,
    GatherParams,
    ctas_a_row,
    gather_chunks,
    row_chunks,
)
from comm.vocabulary import Best, DrawOptions, best_of_ranks, local_best
from engine.sampler import draw, filter_logits, stream_key, stream_start
from engine.sampling_params import SamplingParams


def shards(full: torch.Tensor, size: int) -> list[tuple[torch.Tensor, int, int]]:
    """(logits, first id, valid columns) of each rank; what is padding holds NaN, which must not count."""
    local = -(-full.shape[1] // size)
    parts = []
    for rank in range(size):
        first = min(rank * local, full.shape[1])
        valid = min(local, full.shape[1] - first)
        logits = torch.full((full.shape[0], local), float("nan"), dtype=full.dtype)
        logits[:, :valid] = full[:, first : first + valid]
        parts.append((logits, first, valid))
    return parts


def best_of(full: torch.Tensor, size: int, options: DrawOptions | None = None) -> Best:
    return best_of_ranks([local_best(*shard, options) for shard in shards(full, size)])


def kinds(rows: int, width: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(width)
    ties = torch.randint(-2, 3, (rows, width), generator=generator).float()
    specks = torch.rand(rows, width, generator=generator)
    return {
        "random": torch.randn(rows, width, generator=generator),
        "ties": ties,
        "equal": torch.ones(rows, width),
        "zeros of both signs": torch.where(specks < 0.5, -0.0, 0.0),
        "nothing": torch.full((rows, width), -torch.inf),
        "NaN": torch.where(specks < 0.2, torch.nan, ties),
        "infinite": torch.where(specks < 0.2, torch.inf, ties),
        "mostly masked": torch.where(specks < 0.9, -torch.inf, ties),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [9, 64, 1001])
def test_arg_max_over_ranks_is_that_of_the_whole_row(size, width):
    for name, full in kinds(6, width).items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            logits = full.to(dtype)
            best = best_of(logits, size)
            assert torch.equal(best.ids, logits.argmax(1)), (name, dtype)
            wanted = logits.float().gather(1, best.ids[:, None])[:, 0]
            assert torch.equal(best.values.nan_to_num(7e7), wanted.nan_to_num(7e7)), (name, dtype)


def test_a_rank_that_holds_only_padding_loses_even_to_infinity_below_zero():
    full = torch.full((2, 10), -torch.inf)
    assert shards(full, 4)[3][2] == 1 and shards(full[:, :9], 4)[3][2] == 0
    assert best_of(full[:, :9], 4).ids.tolist() == [0, 0]
    nothing, something = local_best(full, 5, 0), local_best(full, 7, 3)
    assert best_of_ranks([nothing, something]).ids.tolist() == [7, 7]


def test_draws_of_shards_are_the_samplers():
    full = torch.randn(20, 1001, generator=torch.Generator().manual_seed(3)) * 3
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.0]).double().repeat(5)
    keys = [stream_key(1, row, 0) for row in range(20)]
    for position in range(12):
        starts = torch.tensor([[stream_start(key, position // 4 * 4 + i) for i in range(4)] for key in keys])
        options = DrawOptions(temperatures, starts, torch.full((20,), position))
        wanted = [
            draw(*filter_logits(row, SamplingParams(temperature=t)), key, position) if t else int(row.argmax())
            for row, t, key in zip(full, temperatures.tolist(), keys)
        ]
        for size in (1, 2, 8):
            assert best_of(full, size, options).ids.tolist() == wanted, (position, size)
    assert len({int(i) for i in best_of(full, 2, options).ids}) > 10


def test_a_draw_without_positions_takes_the_first_start():
    full, key = torch.zeros(1, 50), stream_key(2, 2, 2)
    options = DrawOptions(torch.ones(1).double(), torch.tensor([[stream_start(key, 5), 0]]))
    assert best_of(full, 2, options).ids.tolist() == [draw(*filter_logits(full[0], SamplingParams(temperature=1.0)), key, 5)]


@pytest.mark.parametrize("share", [1, 4, 8, 16])
def test_launches_stay_within_their_room(share):
    for num_rows in (1, 2, 63, 64, 65, 256):
        parts = list(row_chunks(num_rows, share))
        assert [row for part in parts for row in range(part.start, part.stop)] == list(range(num_rows))
        for part in parts:
            rows = part.stop - part.start
            assert 1 <= rows <= max(1, ROWS // share)
            for width in (1, 255, 19008, 152064):
                ctas = ctas_a_row(rows, width, 2048, share)
                assert 1 <= ctas <= ROW_CTAS and ctas * rows <= max(ARGMAX_CTAS // share, rows)
                assert (ctas - 1) * 2048 < width, "a CTA would have nothing to do"
    assert ctas_a_row(1, 76032, 2048, 1) == 38
    assert ctas_a_row(64, 76032, 256, 1) == 8


@pytest.mark.parametrize("share", [1, 4, 16])
@pytest.mark.parametrize("elem_bytes", [2, 4])
def test_gathers_are_cut_at_unit_borders_and_fit_their_inbox(share, elem_bytes):
    for num_elems in (1, 3, 4, 5, 4096, 524288, 524289, 3_000_001):
        end = 0
        for first, count, ctas in gather_chunks(num_elems, elem_bytes, share):
            assert first == end and first * elem_bytes % 8 == 0 and count > 0
            units = -(-count * elem_bytes // 8)
            assert 1 <= ctas <= max(1, GATHER_CTAS // share)
            assert (ctas - 1) * GATHER_THREADS < units, "every CTA sends at least one packet, or its peers wait for ever"
            rounds = -(-units // (ctas * GATHER_THREADS))
            assert rounds * GATHER_THREADS <= GATHER_PACKETS
            end = first + count
        assert end == num_elems


def test_parameters_have_the_sizes_of_the_kernels_structures():
    # As nvcc lays them out: 8-byte pointers and longs, no packing.
    assert [ctypes.sizeof(kind) for kind in (ArgmaxParams, DrawParams, GatherParams)] == [168, 200, 176]


def test_what_is_not_on_a_gpu_is_refused_by_name():
    class Heap:
        rank, size = 0, 2

    vocabulary = DeviceVocabulary(Heap(), None, {})
    with pytest.raises(TypeError, match="argmax_lamport takes bf16, fp16 or fp32 tensors on a GPU, not torch.float32 on cpu"):
        vocabulary.argmax(torch.zeros(1, 4), 0, 4)
    with pytest.raises(TypeError, match="gather_lamport takes"):
        vocabulary.gather(torch.zeros(4))
