"""Does a communicator do on this machine, now, what it is meant to do? Asked once at start, against the slow one."""

from __future__ import annotations

import math

import torch

from comm.communicator import Communicator
from launch.errors import PeerLost

_SPECIAL = (-0.0, 0.0, math.nan, math.inf, -math.inf)


def self_test(candidate: Communicator, reference: Communicator, max_bytes: int) -> str | None:
    """Compare every collective of `candidate` with `reference`; None, or one clause that says what differs here.

    *Collective*: all ranks, which then must agree on a verdict. Sizes go from one element, by odd ones, to a little
    over `max_bytes`; values are random, and every kind of zero, infinity and NaN.
    """
    rank, size = candidate.rank, candidate.size
    generator = torch.Generator().manual_seed(rank)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for num_elements in (1, 7, 1025, max_bytes // dtype.itemsize + 3):
                x = _sample(num_elements, dtype, generator)
                if not _same_bits(candidate.all_reduce(x.clone()), reference.all_reduce(x.clone())):
                    return f"its sum of {num_elements} {str(dtype).removeprefix('torch.')} values is wrong"
        x = torch.arange(3 * 1001, dtype=torch.float32).view(3, 1001) + rank
        gathered = candidate.gather(x)
        if rank == 0 and not torch.equal(gathered, torch.cat([x + peer for peer in range(size)], dim=-1)):
            return "its gather is wrong"
        numbers = list(range(-5, 20_000))
        if candidate.broadcast_ints(numbers if rank == 0 else None) != numbers:
            return "its broadcast is wrong"
        candidate.barrier()
    except PeerLost as error:
        return str(error)
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
