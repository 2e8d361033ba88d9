"""Does a communicator do on this machine, now, what it is meant to do? Asked once at start, against the slow one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from comm.communicator import Communicator
from launch.errors import PeerLost

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
    over `max_bytes`; values are random, and every kind of zero, infinity and NaN. Each communicator does all its work
    before the other starts and whatever it finds, so that no fault on one rank leaves another waiting in the wrong
    place.
    """
    generator = torch.Generator().manual_seed(candidate.rank)
    samples = [
        _sample(num_elements, dtype, generator).to(device)
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for num_elements in (*sizes, max_bytes // dtype.itemsize + 3)
    ]
    fault, results = None, None
    try:
        results = _run(candidate, samples)
    except PeerLost as error:
        fault = str(error)
    expected = _run(reference, samples)
    return fault if results is None else _difference(results, expected)


def _run(communicator: Communicator, samples: list[torch.Tensor]) -> _Results:
    sums = [communicator.all_reduce(x.clone()) for x in samples]
    rows = torch.arange(3 * 1001, dtype=torch.float32, device=samples[0].device).view(3, 1001)
    gathered = communicator.gather(rows + communicator.rank)
    ints = communicator.broadcast_ints(_INTS if communicator.rank == 0 else None)
    communicator.barrier()
    return _Results(sums, gathered, ints)


def _difference(results: _Results, expected: _Results) -> str | None:
    for ours, theirs in zip(results.sums, expected.sums):
        if not _same_bits(ours, theirs):
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


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, but any NaN for any NaN: their payloads depend on how a loop was compiled."""
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    is_nan = a.isnan()
    return torch.equal(is_nan, b.isnan()) and torch.equal(a[~is_nan].view(bits), b[~is_nan].view(bits))
