"""What the GPU collectives refuse, in one sentence and before a kernel is launched. The tensors only claim to be on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from comm.device_collectives import DeviceCollectives, layout_for
from comm.device_watch import WatchParams

SUMS = ("all_reduce_lamport", "all_reduce_sentinel", "all_reduce_one_shot", "all_reduce_two_shot")
BF16 = torch.bfloat16


class OnGpu(torch.Tensor):
    """A tensor in host memory that says it is on a GPU."""

    is_cuda = True


def on_gpu(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> torch.Tensor:
    """Zeros; `offset` elements after an aligned address."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + offset, dtype=dtype)[offset:].view(shape).as_subclass(OnGpu)


class FakeHeap:
    """Addresses of nothing."""

    rank, size, layout = 0, 2, layout_for(2)

    def address(self, peer: int, name: str) -> int:
        return (peer + 1 << 40) + self.layout.offsets[name]

    def fill(self, name: str, byte: int) -> None:
        pass


@pytest.fixture
def launches() -> list[tuple]:
    return []


@pytest.fixture
def collectives(launches, monkeypatch) -> DeviceCollectives:
    class Kernels:
        def __getitem__(self, key):
            return SimpleNamespace(launch=lambda *args, **options: launches.append((key, args, options)))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return DeviceCollectives(FakeHeap(), SimpleNamespace(params=WatchParams()), Kernels())


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
    "x, out, error, sentence",
    [
        (torch.zeros(8, dtype=BF16), None, TypeError, "on a GPU, not on cpu"),
        (on_gpu(8), torch.zeros(8, dtype=BF16), TypeError, "on a GPU, not on cpu"),
        (on_gpu(8, dtype=torch.int64), None, TypeError, "bf16, fp16 or fp32, not torch.int64"),
        (on_gpu(8, dtype=torch.float64), None, TypeError, "bf16, fp16 or fp32, not torch.float64"),
        (on_gpu(8), on_gpu(8, dtype=torch.float32), TypeError, "one dtype, not torch.bfloat16 and torch.float32"),
        (on_gpu(8, 8).t(), None, TypeError, r"contiguous tensors, not strides \(1, 8\)"),
        (on_gpu(16)[::2], None, TypeError, r"contiguous tensors, not strides \(2,\)"),
        (on_gpu(8), on_gpu(9), ValueError, "sum of 8 elements does not fit an output of 9"),
        (on_gpu(9), on_gpu(8), ValueError, "sum of 9 elements does not fit an output of 8"),
    ],
)
def test_a_sum_refuses(collectives, launches, name, x, out, error, sentence):
    with pytest.raises(error, match=sentence):
        getattr(collectives, name)(x, out)
    assert launches == []


@pytest.mark.parametrize("name", SUMS[:2])
@pytest.mark.parametrize("threads", [0, 16, 96, 1024])
def test_threads_that_overrun_a_buffer_are_refused(collectives, launches, name, threads):
    with pytest.raises(ValueError, match=f"a power of two, not {threads}"):
        getattr(collectives, name)(on_gpu(8), threads=threads)
    assert launches == []


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_odd_sizes_and_unaligned_tensors_are_summed(collectives, launches, name, dtype):
    getattr(collectives, name)(on_gpu(7, dtype=dtype, offset=1), on_gpu(7, dtype=dtype))
    ((key, (ctas, *_, params, _), _),) = [(key, args, options) for key, args, options in launches]
    assert (key, ctas, params[0].num_elems, params[0].is_aligned) == ((name, dtype), 1, 7, 0)


def norm_tensors(rows: int, hidden: int, dtype: torch.dtype = BF16, offset: int = 0) -> dict[str, torch.Tensor]:
    rest = {name: on_gpu(rows, hidden, dtype=dtype, offset=offset) for name in ("x", "residual", "normed")}
    return {**rest, "weight": on_gpu(hidden, dtype=dtype, offset=offset)}


@pytest.mark.parametrize("changed", ["x", "residual", "normed", "weight"])
@pytest.mark.parametrize(
    "change, error, sentence",
    [
        (lambda t: t.cpu().as_subclass(torch.Tensor), TypeError, "on a GPU, not on cpu"),
        (lambda t: t.float(), TypeError, "one dtype, not torch"),
        (lambda t: t.repeat_interleave(2, dim=-1)[..., ::2], TypeError, "contiguous tensors"),
        (lambda t: t[..., :64].contiguous(), ValueError, r"weight \[hidden\], not \["),
        (lambda t: t.unsqueeze(0), ValueError, r"weight \[hidden\], not \["),
        (lambda t: on_gpu(*t.shape, offset=1), ValueError, "aligned to 8 bytes"),
    ],
)
def test_the_norm_refuses(collectives, launches, changed, change, error, sentence):
    tensors = norm_tensors(2, 128)
    tensors[changed] = change(tensors[changed])
    with pytest.raises(error, match=sentence):
        collectives.all_reduce_lamport_norm(eps=1e-6, **tensors)
    assert launches == []


@pytest.mark.parametrize("shape, offset", [((3, 2, 64), 0), ((3, 1, 128), 0), ((0, 2, 128), 0), ((3, 2, 128), 1)])
def test_the_norm_refuses_parts_that_do_not_fit(collectives, launches, shape, offset):
    tensors = {**norm_tensors(2, 128), "x": on_gpu(*shape, dtype=torch.float32, offset=offset)}
    with pytest.raises(ValueError, match=r"parts of x are \[num_parts, \*\[2, 128\]\], aligned to 16 bytes"):
        collectives.all_reduce_lamport_norm(eps=1e-6, **tensors)
    assert launches == []


def test_the_norm_takes_parts_of_all_rows_in_chunks(collectives, launches):
    tensors = {**norm_tensors(40, 128), "x": on_gpu(3, 40, 128, dtype=torch.float32)}
    collectives.all_reduce_lamport_norm(eps=1e-6, **tensors)
    first, second = (args[2][0] for _, args, _ in launches)
    assert (first.num_parts, first.part_pitch, first.parts) == (3, 40 * 128, tensors["x"].data_ptr())
    assert second.parts - first.parts == 32 * 128 * 4 and second.part_pitch == first.part_pitch


@pytest.mark.parametrize("hidden, dtype", [(130, torch.bfloat16), (129, torch.float16), (65, torch.float32)])
def test_the_norm_refuses_rows_of_broken_units(collectives, launches, hidden, dtype):
    with pytest.raises(ValueError, match=f"multiple of 8 bytes, not {hidden} elements"):
        collectives.all_reduce_lamport_norm(eps=1e-6, **norm_tensors(1, hidden, dtype))
    assert launches == []


@pytest.mark.parametrize(
    "hidden, dtype, options, fits",
    [
        (32768, torch.bfloat16, {}, True),
        (32772, torch.bfloat16, {}, False),
        (16384, torch.float32, {}, True),
        (16386, torch.float32, {}, False),
        # A thread holds four units in registers: eight would be four, and the rest of the row untouched.
        (16384, torch.bfloat16, {"threads": 128}, True),
        (32768, torch.bfloat16, {"threads": 128}, False),
    ],
)
def test_the_longest_row(collectives, launches, hidden, dtype, options, fits):
    tensors = norm_tensors(1, hidden, dtype)
    if fits:
        collectives.all_reduce_lamport_norm(eps=1e-6, **tensors, **options)
        assert len(launches) == 1
        return
    with pytest.raises(ValueError, match=f"a row of {hidden * dtype.itemsize} bytes is too long"):
        collectives.all_reduce_lamport_norm(eps=1e-6, **tensors, **options)
    assert launches == []
