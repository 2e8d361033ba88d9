"""What an all-reduce accepts, and the one order in which it sums. Shared by all of them, so that they agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

FLOAT_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def check_operand(x: torch.Tensor) -> None:
    """Refuse what an all-reduce cannot sum in place.

    *Raises* `TypeError` for a dtype that fp32 cannot hold exactly, `ValueError` for memory that is not contiguous. Both
    are mistakes of the caller's code, not of the user.
    """
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"all_reduce sums float32, bfloat16 or float16, not {x.dtype}")
    if not x.is_contiguous():
        raise ValueError(f"all_reduce needs a contiguous tensor, not strides {x.stride()} for shape {tuple(x.shape)}")


def sum_in_rank_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of `parts` (one a rank, flat, of `out`'s dtype, none overlapping `out`) to `out`.

    *Numbers*: fp32, in the order given, rounded once. It starts from the first part, not from zero: 0.0 + -0.0 is 0.0,
    and a sum of negative zeros must stay one.
    """
    if out.dtype == torch.float32 and len(parts) > 1:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        return
    total = parts[0].float() if out.dtype != torch.float32 else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    out.copy_(total)
