"""A burst: decode steps of the same rows that the device runs one after the other, while the host only reads along.

The tokens of a step are the input of the next one, on the device. Rank 0 reads them in order and treats each as if it had chosen
it itself, so answers do not depend on bursts. What it read goes to the other ranks in its next message, like any token. That
message may *continue* the burst: it is sent when the last few steps still run, so the device never waits for the host. When
anything changes (a row ended or came), rank 0 reads on to the last step that was launched, and the burst is over. What a row that
has ended was computed beyond its end counts nowhere: its tokens are not taken, and its pages are given back.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence

# Steps between two messages. More would save nothing a user can see, and a row that comes or ends waits for them.
MAX_BURST_STEPS = 8
# Steps that still run when a burst is continued: time for the message and the launches of the next.
NUM_STEPS_BEHIND = 2


@dataclass(eq=False)
class Burst:
    """`sequences` from the step number `first_step` on; `positions`: what each computes in that step. `is_filtered`: a row has
    rules beyond a temperature, so all rows take the steps that heed them."""

    sequences: list[Sequence]
    first_step: int
    positions: list[int]
    is_filtered: bool = False
    num_launched: int = 0
    num_read: int = 0

    @property
    def num_unread(self) -> int:
        return self.num_launched - self.num_read

    @property
    def lengths(self) -> dict[Sequence, int]:
        """Tokens that each row has computed once all launched steps are done."""
        return {sequence: first + self.num_launched for sequence, first in zip(self.sequences, self.positions)}
