"""A burst: decode steps of the same rows that the device runs one after the other, while the host only reads along.

The tokens of a step are the input of the next one, on the device. Rank 0 reads them in order and treats each as if it had chosen
it itself, so answers do not depend on bursts. What it read goes to the other ranks in its next message, like any token. That
message may *continue* the burst: it is sent when the last few steps still run, so the device never waits for the host. Nor does
it when rows join or leave: the burst is over then, but the step behind it is launched before the last of its tokens are read, and
takes them from the device (`engine.burst_reader`). Where rank 0 has a part in the choice, where pages are short, and with drafts,
all is read first. What a row that has ended was computed beyond its end counts nowhere: its tokens are not taken, and its pages
are given back.

A step beside bursts, one that lets rows in, is the first of a burst where the device chooses its tokens. The burst goes on at
once if every row has a token and nobody else could join.

With drafts (`engine.graph.speculative_step`) a step gives each row one token or more. How many, the host learns when it reads
them; until then it counts with the most.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence

# Steps between two messages. More would save nothing a user can see, and a row that comes or ends waits for them.
MAX_BURST_STEPS = 8
# Steps that still run when a burst is continued: time for the message and the launches of the next.
NUM_STEPS_BEHIND = 2
# The same where the rows change: a message with prompts in it, uploads, and a step and a burst to launch take several ms, which
# are several steps of a small model. A row that comes meanwhile waits for these steps in any case.
NUM_STEPS_BEHIND_CHANGE = 4
# The same of steps with drafts, which take longer, and of which it is not known how many a row still needs.
MAX_SPECULATIVE_STEPS, NUM_SPECULATIVE_BEHIND = 2, 1


@dataclass(eq=False)
class Burst:
    """`sequences` from the step number `first_step` on. `is_filtered`: a row has rules beyond a temperature, so all rows take the
    steps that heed them. `num_drafts`: guesses that a step makes and verifies for each row. `is_settled`: unless rows join or
    leave, the next step is one of the same rows; not so behind a step beside bursts from which others go on.

    Of its steps `num_launched` were launched; rank 0 has read the tokens of `num_read`, and those of `num_applied` are in the
    sequences, on every rank.
    """

    sequences: list[Sequence]
    first_step: int
    is_filtered: bool = False
    num_drafts: int = 0
    num_launched: int = 0
    num_read: int = 0
    num_applied: int = 0
    is_settled: bool = True

    @property
    def width(self) -> int:
        """Tokens that a step computes of a row, and the most that it may gain."""
        return self.num_drafts + 1

    @property
    def num_unread(self) -> int:
        return self.num_launched - self.num_read

    @property
    def lengths(self) -> dict[Sequence, int]:
        """Tokens that each row has computed once all launched steps are done; with drafts, the most that it may have."""
        ahead = (self.num_launched - self.num_applied) * self.width
        return {sequence: sequence.num_computed + ahead for sequence in self.sequences}
