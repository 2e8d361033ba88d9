"""Does a communicator do on this machine, now, what it is meant to do? Asked once at start, against the slow one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from comm.communicator import Communicator
from launch.errors import DoorbellError

_MAX_INTEGER = 8  # of the samples that any order sums exactly: 8 ranks stay far below bf16's 256
_SPECIAL = (-0.0, 0.0, math.nan, math.inf, -math.inf)
_INTS = list(range(-5, 20_000))


@dataclass(frozen=True)
class _Results:
    """What a communicator made of the samples."""

    sums: list[torch.Tensor]
    gathered: torch.Tensor | None
    ints: list[int]


def self_test(
    candidate: Communicator,
    reference: Communicator,
    max_bytes: int,
    device: torch.device | str = "cpu",
    sizes: tuple[int, ...] = (1, 7, 1025),
) -> str | None:
    """Compare every collective of `candidate` with `reference`; None, or one clause that says what differs here.

    *Collective*: all ranks, which then must agree on a verdict. Tensors on `device`, of `sizes` elements and of a little
    over `max_bytes`; values are random, and every kind of zero, infinity and NaN. Sums are compared bit by bit; those of a
    candidate without `is_rank_order` within the rounding of other orders, and small integers exactly. Each communicator does
    all its work before the other starts and whatever it finds, so that no fault on one rank leaves another waiting in the
    wrong place.
    """
    generator = torch.Generator().manual_seed(candidate.rank)
    samples = [
        sample(num_elements, dtype, generator).to(device)
        for sample in ((_sample,) if candidate.is_rank_order else (_sample, _integers))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for num_elements in (*sizes, max_bytes // dtype.itemsize + 3)
    ]
    fault, results = None, None
    try:
        results = _run(candidate, samples)
    except DoorbellError as error:
        fault = str(error)
    expected = _run(reference, samples)
    checks = [_same_bits] * len(samples)
    if not candidate.is_rank_order:
        randoms = samples[: len(samples) // 2]
        magnitudes = [reference.all_reduce(x.abs()) for x in randoms]  # no partial sum of any order is larger
        checks = [partial(_is_near, magnitude=magnitude, size=candidate.size) for magnitude in magnitudes]
        checks += [torch.equal] * len(randoms)
    return fault if results is None else _difference(results, expected, checks)


def _run(communicator: Communicator, samples: list[torch.Tensor]) -> _Results:
    sums = [communicator.all_reduce(x.clone()) for x in samples]
    rows = torch.arange(3 * 1001, dtype=torch.float32, device=samples[0].device).view(3, 1001)
    gathered = communicator.gather(rows + communicator.rank)
    ints = communicator.broadcast_ints(_INTS if communicator.rank == 0 else None)
    communicator.barrier()
    return _Results(sums, gathered, ints)


def _difference(
    results: _Results, expected: _Results, checks: Sequence[Callable[[torch.Tensor, torch.Tensor], bool]]
) -> str | None:
    for ours, theirs, is_right in zip(results.sums, expected.sums, checks):
        if not is_right(ours, theirs):
            return f"its sum of {ours.numel()} {str(ours.dtype).removeprefix('torch.')} values is wrong"
    if expected.gathered is not None and not torch.equal(results.gathered, expected.gathered):
        return "its gather is wrong"
    if results.ints != expected.ints:
        return "its broadcast is wrong"
    return None


def _sample(num_elements: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(num_elements, generator=generator)
    # Negative zero on all ranks at every other place, whose sum must be one; at the others, random pairs of special
    # values.
    for i in range(min(num_elements, 50)):
        x[i] = _SPECIAL[int(torch.randint(len(_SPECIAL), (), generator=generator))] if i % 2 else -0.0
    return x.to(dtype)


def _integers(num_elements: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-_MAX_INTEGER, _MAX_INTEGER + 1, (num_elements,), generator=generator).to(dtype)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but any NaN for any NaN: their payloads depend on how a loop was compiled."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(a[~is_nan].view(bits), b[~is_nan].view(bits))


def _is_near(a: torch.Tensor, b: torch.Tensor, magnitude: torch.Tensor, size: int) -> bool:
    """NaN for NaN, each infinity for itself, and the rest within half a unit in the last place of `magnitude` for each of the
    `size` - 1 roundings between additions, the reference's one, and that of `magnitude`."""
    is_finite = b.isfinite()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a[b.isinf()], b[b.isinf()]):
        return False
    bound = (size + 1) * torch.finfo(a.dtype).eps / 2 * magnitude[is_finite].float()
    return bool(((a[is_finite].float() - b[is_finite].float()).abs() <= bound).all())
