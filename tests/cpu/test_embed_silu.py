"""The embedding lookup and SiLU·mul: the lookup's twin, and what the launchers pass on and refuse. Nothing is launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels.embed import embed, launch_embed
from kernels.silu_mul import launch_silu_mul
from tests.cpu.test_device_refusals import on_gpu

IDS = torch.tensor([0, 3, 4, 5, 9, 10, 130, -1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_of_other_ranks_give_zeros(dtype):
    table = torch.randn(7, 8)  # two rows of padding behind ids 4 to 8
    found = embed(IDS.to(dtype), table, 4, 9)
    assert torch.equal(found[2:4], table[:2])
    others = [0, 1, 4, 5, 6, 7]
    assert not found[others].any()


def test_shards_add_up_to_the_lookup():
    table, ids = torch.randn(10, 8), torch.tensor([9, 0, 4, 4])
    parts = [embed(ids, table[begin : begin + 4], begin, min(begin + 4, 10)) for begin in (0, 4, 8)]
    assert torch.equal(sum(parts), table[ids])


@pytest.fixture
def kernel(monkeypatch):
    launches = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=77))
    fake = SimpleNamespace(launches=launches)
    fake.launch = lambda grid, block, args, stream, is_pdl: launches.append((grid, block, args[0], stream, is_pdl))
    return fake


def test_embed_passes_addresses_and_shapes(kernel):
    ids, table, out, zeroed = on_gpu(3, dtype=torch.int32), on_gpu(40, 4096), on_gpu(3, 4096), on_gpu(3, 4096)
    assert launch_embed(kernel, ids, table, 80, 120, out, zeroed) is out
    launch_embed(kernel, ids.long().as_subclass(type(ids)), table, 80, 119, out, is_pdl=False)
    (grid, block, params, stream, is_pdl), (_, _, wide, _, other_pdl) = kernel.launches
    assert (grid, block, stream, is_pdl, other_pdl) == ((2, 3, 1), 256, 77, True, False)
    found = {name: getattr(params, name) for name in ("ids", "table", "out", "zeroed", "begin", "end", "vectors", "is_wide")}
    assert found == {"ids": ids.data_ptr(), "table": table.data_ptr(), "out": out.data_ptr(), "zeroed": zeroed.data_ptr(),
                     "begin": 80, "end": 120, "vectors": 512, "is_wide": 0}  # fmt: skip
    assert (wide.zeroed, wide.end, wide.is_wide) == (0, 119, 1)


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"ids": on_gpu(3, dtype=torch.int16)}, TypeError, "int64 or int32"),
        ({"ids": on_gpu(2, dtype=torch.int64)}, ValueError, r"out must be contiguous \(2, 64\)"),
        ({"ids": on_gpu(0, dtype=torch.int64)}, ValueError, "1 to 65535 rows, not 0"),
        ({"end": 41}, ValueError, "a table of 40 rows does not hold the ids from 0 to 41"),
        ({"table": on_gpu(40, 65), "out": on_gpu(3, 65)}, ValueError, "multiple of 16 bytes, not 130"),
        ({"table": torch.zeros(40, 64, dtype=torch.bfloat16)}, TypeError, "table must be torch.bfloat16 on a GPU"),
        ({"out": on_gpu(3, 64, dtype=torch.float32)}, TypeError, "out must be torch.bfloat16 on a GPU, not torch.float32"),
        ({"out": on_gpu(3, 64, offset=1)}, ValueError, "out must be contiguous .* at a 16-byte border"),
        ({"zeroed": on_gpu(3, 32)}, ValueError, "zeroed must be"),
    ],
    ids=str,
)
def test_embed_refuses_what_does_not_fit(kernel, changes, error, sentence):
    fitting = {"ids": on_gpu(3, dtype=torch.int64), "table": on_gpu(40, 64), "begin": 0, "end": 40, "out": on_gpu(3, 64)}
    with pytest.raises(error, match=sentence):
        launch_embed(kernel, **{**fitting, **changes})
    assert not kernel.launches


@pytest.mark.parametrize(
    "width, dtype, offset, grid_x, is_aligned",
    [
        (14784, torch.bfloat16, 0, 8, True),
        (64, torch.bfloat16, 0, 1, True),
        (1028, torch.float32, 0, 2, True),
        (1027, torch.float32, 0, 5, False),
        (64, torch.bfloat16, 1, 1, False),
    ],
)
def test_silu_mul_passes_addresses_and_shapes(kernel, width, dtype, offset, grid_x, is_aligned):
    gate_up, out = on_gpu(5, 2 * width, dtype=dtype, offset=offset), on_gpu(5, width, dtype=dtype)
    assert launch_silu_mul(kernel, gate_up, out) is out
    ((grid, block, params, stream, is_pdl),) = kernel.launches
    assert (grid, block, stream, is_pdl) == ((grid_x, 5, 1), 256, 77, True)
    assert (params.gate_up, params.out, params.width) == (gate_up.data_ptr(), out.data_ptr(), width)
    assert bool(params.is_aligned) == is_aligned


@pytest.mark.parametrize(
    "gate_up, out, error, sentence",
    [
        (torch.zeros(2, 8), on_gpu(2, 4), TypeError, "on a GPU, not torch.float32 on cpu"),
        (on_gpu(2, 8), on_gpu(2, 4, dtype=torch.float32), TypeError, "out must be"),
        (on_gpu(2, 8), on_gpu(2, 3), ValueError, r"must be \(2, 6\) for a result of \(2, 3\), not \(2, 8\)"),
        (on_gpu(2, 16)[:, ::2], on_gpu(2, 4), ValueError, "contiguous"),
        (on_gpu(70000, 2), on_gpu(70000, 1), ValueError, "1 to 65535 rows"),
    ],
)
def test_silu_mul_refuses_what_does_not_fit(kernel, gate_up, out, error, sentence):
    with pytest.raises(error, match=sentence):
        launch_silu_mul(kernel, gate_up, out)
    assert not kernel.launches
