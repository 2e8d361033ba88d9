"""Counter-based Gumbel noise, torch twin: one number an id, a hash and nothing else. In CUDA: `comm/cuda/vocabulary.cuh`."""

from __future__ import annotations

import torch

# splitmix64's odd constants as signed 64-bit numbers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def gumbel_noise(start: int | torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of `ids` (any integer dtype and shape) in the stream that begins at `start`; fp64, like `ids`.

    `start`: signed 64 bits, or an int64 tensor that broadcasts against `ids`.
    *Source*: the bits are those of a splitmix64 stream (Steele, Lea and Flood 2014), number id + 1 of it.
    """
    # int64 arithmetic wraps around, which is what the generator wants of its unsigned 64 bits.
    bits = (ids.long() + 1) * _GOLDEN + start
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    bits = bits ^ _shift_right(bits, 31)
    # 53 bits and a half: strictly between 0 and 1, so that both logarithms are finite.
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    return -(-uniform.log()).log()


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical, not arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
