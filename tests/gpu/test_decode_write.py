"""The kernel before an attention that only attends, and our attention behind it, on one GPU.

`python -m pytest -q tests/gpu/test_decode_write.py`
"""

from __future__ import annotations

import pytest
import torch

from kernels.build import Build, default_cache_folder
from kernels.decode_attention import DecodeAttention, decode_attention, load_decode_attention
from kernels.decode_write import decode_write, launch_decode_write, load_decode_write
from kernels.rotary_write import launch_rotary_write, load_rotary_write
from tests.gpu.attention_case import AttentionCase, Step

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
TOLERANCE = {BF16: 4e-2, FP16: 5e-3, FP32: 5e-5}  # of attention: as in `test_decode_attention.py`
# Of heads of about 1 that were normalised: two roundings to the neighbour, which the rotation adds; fp32: sums in another order.
NORM_ROUNDING = {BF16: 8 * torch.finfo(BF16).eps, FP16: 8 * torch.finfo(FP16).eps, FP32: 5e-6}
BUILD = Build(default_cache_folder())
BORDERS = (0, 1, 7, 15, 16, 17, 31, 32, -1, 63, 64, 65, 255, 256, 257, 1024, -1)
POISON = -3.0  # what no head is
HEADS = ((28, 4), (7, 1), (5, 5))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({4: torch.int32, 2: torch.int16}[x.element_size()]) if x.is_floating_point() else x


class Write:
    """Operands of a step. `is_whole`: keys and values are wanted beside the queries."""

    def __init__(self, case: AttentionCase, is_whole: bool, seed: int):
        self.step, self.case = Step(case, DEVICE, seed), case
        rows, num_heads = len(case.positions), case.num_q + 2 * case.num_kv * is_whole
        self.heads = torch.full((rows, num_heads, case.head_dim), POISON, dtype=case.dtype, device=DEVICE)
        self.lengths = None if is_whole else torch.full((rows,), -7, dtype=torch.int32, device=DEVICE)

    def operands(self) -> tuple:
        x = self.step
        operands = x.qkv, x.turns, x.positions, x.page_table, self.heads, x.keys, x.values, self.lengths
        return *operands, x.case.page_size, x.norms

    def outputs(self) -> list[torch.Tensor]:
        return [self.heads, self.step.keys, self.step.values] + [self.lengths] * (self.lengths is not None)

    def run_separately(self) -> None:
        """A sum in order, a rounding, and the kernel that rotates elements: what `launch_decode_write` is one launch for."""
        x, size, is_row = self.step, self.case.page_size, self.step.positions >= 0
        parts = list(x.qkv) if self.case.parts else [x.qkv]
        qkv = sum(parts[1:], parts[0]).to(self.case.dtype).contiguous()
        qkv = qkv.clone() if qkv is x.qkv else qkv
        at = x.positions.clamp(min=0).long()
        slots = x.page_table.long().gather(1, at[:, None] // size)[:, 0] * size + at % size
        slots = torch.where(is_row, slots, -1)
        launch_rotary_write(load_rotary_write(BUILD, self.case.dtype), qkv, x.turns[at], slots, x.keys, x.values)
        self.heads[is_row] = qkv[is_row, : self.heads.shape[1]]
        if self.lengths is not None:
            self.lengths.copy_(x.positions + 1).clamp_(min=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("parts", range(9))
def test_the_bits_are_those_of_separate_kernels(parts, head_dim, dtype):
    kernel = load_decode_write(BUILD, dtype)
    for seed, (num_q, num_kv) in enumerate(HEADS):
        for is_whole in (False, True):
            page_size, is_wide = ((16, False), (64, True), (1, True))[seed]
            case = AttentionCase(BORDERS, num_q, num_kv, head_dim, dtype, page_size, parts, has_bias=False, is_wide=is_wide)
            found, wanted, twin = (Write(case, is_whole, seed + 10 * parts) for _ in range(3))
            before = found.step.qkv.clone()
            launch_decode_write(kernel, *found.operands())
            wanted.run_separately()
            decode_write(*twin.operands())
            for own, right, plain in zip(found.outputs(), wanted.outputs(), twin.outputs()):
                assert torch.equal(bits(own), bits(right))
                if dtype == FP32:  # torch rounds the product with the sine, too
                    torch.testing.assert_close(own, plain, atol=2e-6, rtol=2e-6, equal_nan=True)
                else:
                    assert torch.equal(bits(own), bits(plain))
            assert torch.equal(bits(found.step.values), bits(twin.step.values))
            padding = found.step.positions < 0
            assert (found.heads[padding] == POISON).all() and not (found.heads[~padding] == POISON).all(-1).any()
            assert torch.equal(bits(found.step.qkv), bits(before))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", (64, 128))
def test_norms(head_dim, dtype):
    """Squares are summed in another order than torch's, so a result may be the neighbour of the twin's, and few are."""
    for seed, (num_q, num_kv) in enumerate(HEADS):
        for parts in (0, 1, 5):
            case = AttentionCase(BORDERS, num_q, num_kv, head_dim, dtype, parts=parts, has_bias=False, has_norms=True)
            found, wanted = (Write(case, True, seed) for _ in range(2))
            launch_decode_write(load_decode_write(BUILD, dtype), *found.operands())
            decode_write(*wanted.operands())
            rounding = NORM_ROUNDING[dtype]
            for own, right in zip(found.outputs(), wanted.outputs()):
                torch.testing.assert_close(own, right, atol=rounding, rtol=rounding, equal_nan=True)
            if dtype != FP32:
                assert (bits(found.heads) == bits(wanted.heads)).float().mean() > 0.98
            assert torch.equal(bits(found.step.values), bits(wanted.step.values))


@pytest.mark.parametrize("parts", (0, 4))
def test_nothing_but_padding(parts):
    write = Write(AttentionCase((-1,) * 5, parts=parts, has_bias=False), True, 0)
    launch_decode_write(load_decode_write(BUILD, BF16), *write.operands())
    assert (write.heads == POISON).all() and write.step.keys.isnan().all() and write.step.values.isnan().all()


class Chain:
    """`width` tokens of each row, one behind the other, in a layer of its own."""

    def __init__(self, case: AttentionCase, width: int, seed: int):
        self.step, self.width = Step(case, DEVICE, seed), width
        rows, heads = len(case.positions) * width, case.num_q + 2 * case.num_kv
        generator = torch.Generator().manual_seed(seed)
        self.qkv = torch.randn(case.parts, rows, heads, case.head_dim, generator=generator).to(DEVICE)
        self.page_table = self.step.page_table.repeat_interleave(width, 0)
        self.out = torch.full((rows, case.num_q, case.head_dim), float("nan"), dtype=case.dtype, device=DEVICE)

    def attend_one_by_one(self, positions: torch.Tensor) -> torch.Tensor:
        """By the twin: the first token of each row, then the second..."""
        x, wanted = self.step, torch.full_like(self.out, float("nan"))
        for idx in range(self.width):
            out = torch.empty_like(wanted[idx :: self.width])
            operands = (self.qkv[:, idx :: self.width], positions[idx :: self.width], x.page_table, x.keys, x.values, out)
            decode_attention(*operands, x.turns, x.case.page_size, norms=x.norms, window=x.case.window)
            wanted[idx :: self.width] = out
        return wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norms", (False, True))
@pytest.mark.parametrize("window", (None, 20))
def test_layers_of_a_graph_that_makes_its_own_positions(window, has_norms, dtype):
    """Each layer's attention waits for its write, which waits for the attention before, whose heads lay where its own shall; all
    wait for the positions, which later layers read early."""
    width, ends = 5, (60, 404, -1, 1030)
    case = AttentionCase(ends, 14, 2, 128, dtype, parts=4, has_bias=False, has_norms=has_norms, window=window)
    layers, wanted = ([Chain(case, width, seed) for seed in range(6)] for _ in range(2))
    step = layers[0].step
    num_sms, rows = torch.cuda.get_device_properties(DEVICE).multi_processor_count, len(ends) * width
    kernel = load_decode_attention(BUILD, dtype, case.head_dim)
    attention = DecodeAttention(kernel, case.num_q, case.num_kv, 16, step.turns, rows, step.max_context, num_sms)
    write = load_decode_write(BUILD, dtype)
    heads = torch.empty(layers[0].qkv.shape[1:], dtype=dtype, device=DEVICE)
    starts = torch.tensor([end - width + 1 if end >= 0 else -1 for end in ends], device=DEVICE)
    places, source = torch.arange(width, device=DEVICE), starts.clone()

    def run() -> None:
        heads.fill_(POISON)
        positions = torch.where(source[:, None] < 0, -1, source[:, None] + places).flatten()
        for idx, layer in enumerate(layers):
            x = layer.step
            operands = positions, layer.page_table, x.keys, x.values
            launch_decode_write(
                write, layer.qkv, x.turns, *operands[:2], heads, *operands[2:], None, 16, x.norms, is_early=idx > 0
            )  # fmt: skip
            attention.launch(heads, *operands, layer.out, window=window, is_early=False, is_rotated=True)

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        source.fill_(-1)
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            run()
        # Backwards, so that what a replay must not read, of the replay before, differs and is there.
        for back in (4, 0, 3, 1):
            source.copy_(torch.where(starts < 0, -1, starts - back))
            for layer in layers:
                layer.out.fill_(float("nan"))
            graph.replay()
            stream.synchronize()
            positions = torch.where(source[:, None] < 0, -1, source[:, None] + places).flatten()
            for layer, right in zip(layers, wanted):
                right_out = right.attend_one_by_one(positions)
                torch.testing.assert_close(layer.out, right_out, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
                assert not layer.out[positions < 0].any()
                rounding = NORM_ROUNDING[dtype]
                for own, other in ((layer.step.keys, right.step.keys), (layer.step.values, right.step.values)):
                    torch.testing.assert_close(own, other, atol=rounding, rtol=rounding, equal_nan=True)


def test_positions_of_the_kernel_just_before_are_waited_for():
    case = AttentionCase((900, 64, -1), parts=3, has_bias=False)
    found, wanted = (Write(case, True, 0) for _ in range(2))
    decode_write(*wanted.operands())
    right = found.step.positions.clone()
    found.step.positions.fill_(-1)
    kernel = load_decode_write(BUILD, BF16)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)
    found.step.positions.copy_(right)
    launch_decode_write(kernel, *found.operands())
    for own, other in zip(found.outputs(), wanted.outputs()):
        assert torch.equal(bits(own), bits(other))
