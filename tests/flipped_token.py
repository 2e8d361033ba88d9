"""A fault for tests: one rank's device takes another token than the others, once."""

from __future__ import annotations

import torch

from engine.graph.operators import Operators
from engine.graph.row_state import DeviceRows


def flip_token(operators: Operators, step: int) -> None:
    """From now on, the first row of step number `step` goes on with another token than was chosen; can be captured."""
    advance = operators.advance

    def advance_wrongly(rows: DeviceRows, ids: torch.Tensor, values: torch.Tensor) -> None:
        is_due = (torch.arange(ids.numel(), device=ids.device) == 0) & (rows.step == step)
        advance(rows, torch.where(is_due, torch.where(ids > 0, ids - 1, 1), ids), values)

    operators.advance = advance_wrongly
