"""What a step says about the next tokens of one row, while rank 0 chooses them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from engine.request import Sample
from engine.scheduler import ScheduledRow


@dataclass(eq=False)
class Trial:
    """What a step says about the next tokens of a row: fp32 `logits` `[1 + number of drafts, num_used_ids]`, in order.

    `token_ids` are the tokens chosen so far. The next logits are good as long as these are the drafts.
    """

    sample: Sample
    row: ScheduledRow
    logits: torch.Tensor
    token_ids: list[int] = field(default_factory=list)

    @property
    def next_logits(self) -> torch.Tensor:
        return self.logits[len(self.token_ids)]

    @property
    def num_accepted(self) -> int:
        """Drafts that were chosen."""
        return sum(token_id == draft_id for token_id, draft_id in zip(self.token_ids, self.row.draft_ids))

    @property
    def is_good(self) -> bool:
        return self.num_accepted == len(self.token_ids)
