"""The embedding lookup and SiLU·mul on a GPU against their torch twins, and in a graph behind the kernel that feeds them."""

from __future__ import annotations

import pytest
import torch

from kernels.build import Build, default_cache_folder
from kernels.embed import embed, launch_embed, load_embed
from kernels.silu_mul import launch_silu_mul, load_silu_mul, silu_mul

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BUILD = Build(default_cache_folder())
NAN = float("nan")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def rand(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, hidden", [(1, 8192), (1, 8), (7, 896), (64, 3584), (300, 16384)])
@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("is_zeroing", [False, True])
def test_embed(dtype, rows, hidden, ids_dtype, is_zeroing):
    begin, end = 500, 700
    table = rand(203, hidden, dtype=dtype)  # three rows of padding
    table[200:] = NAN
    generator = torch.Generator("cuda").manual_seed(rows)
    ids = torch.randint(400, 800, (rows,), generator=generator, device="cuda", dtype=ids_dtype)
    ids[: min(rows, 6)] = torch.tensor([699, 500, 499, 700, -1, 2**31 - 1], device="cuda", dtype=ids_dtype)[:rows]
    before = ids.clone()
    out, zeroed = (torch.full((rows + 1, hidden), NAN, device="cuda", dtype=dtype) for _ in range(2))
    launch_embed(load_embed(BUILD, dtype), ids, table, begin, end, out[:rows], zeroed[:rows] if is_zeroing else None)
    assert torch.equal(bits(out[:rows]), bits(embed(ids, table, begin, end))) and out[rows:].isnan().all()
    assert torch.equal(ids, before)
    assert (not bits(zeroed[:rows]).any()) if is_zeroing else zeroed.isnan().all()
    assert zeroed[rows:].isnan().all()


def test_embed_in_a_graph_reads_the_ids_of_the_kernel_before():
    """Launched early behind kernels that write its ids and read its outputs, hundreds of times."""
    kernel, table = load_embed(BUILD, torch.bfloat16), rand(1000, 4096, dtype=torch.bfloat16)
    ids, steps = torch.zeros(8, dtype=torch.int64, device="cuda"), 50
    out, kept = torch.empty(8, 4096, dtype=torch.bfloat16, device="cuda"), torch.empty(steps, 8, 4096, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for step in range(steps):
            ids.add_(17).remainder_(1000)
            launch_embed(kernel, ids, table, 0, 1000, out)
            kept[step] = out
    start = torch.arange(8, device="cuda") * 100
    for replay in range(4):
        ids.copy_(start + replay)
        kept.fill_(NAN)
        graph.replay()
        wanted = torch.stack([table[(start + replay + 17 * (step + 1)) % 1000] for step in range(steps)]).float()
        assert torch.equal(kept, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(1, 8), (17, 4864), (33, 14784), (5, 3697), (2, 1), (513, 18944)])
@pytest.mark.parametrize("offset", [0, 1])
def test_silu_mul(dtype, rows, width, offset):
    """`offset`: elements after an aligned address, so also halves of a row at any alignment."""
    flat = rand(rows * 2 * width + offset, dtype=dtype, scale=4.0)
    gate_up = flat[offset:].view(rows, 2 * width)
    special = torch.tensor([0.0, -0.0, 90.0, -90.0, float("inf"), NAN, 1e-6], device="cuda").to(dtype)[:width]
    gate_up[0, : special.numel()] = special
    before = flat.clone()
    out = torch.full((rows + 1, width), 7.0, device="cuda", dtype=dtype)
    launch_silu_mul(load_silu_mul(BUILD, dtype), gate_up, out[:rows])
    wanted, eps = silu_mul(gate_up), torch.finfo(dtype).eps
    # The SiLU may round to its neighbour, the product once more.
    torch.testing.assert_close(out[:rows], wanted, rtol=2 * eps, atol=4 * torch.finfo(dtype).tiny, equal_nan=True)
    assert (bits(out[:rows]) == bits(wanted)).float().mean() > (0.99 if dtype != torch.float32 else 0.5)
    assert (out[rows:] == 7.0).all() and torch.equal(bits(flat), bits(before))
