"""What rank 0 tells the other ranks between two steps, as one list of integers.

Rank 0 alone reads input, samples and writes output. Everything the others need to run the same schedule is here: the tokens it
chose, the rows that ended, the rows that arrived, its guesses at the tokens to come, and whether this was the last step.
"""

from __future__ import annotations

from collections.abc import Sequence as Ints
from dataclasses import dataclass, field

from engine.sequence import Sequence

NO_SEQUENCE = -1
GO_ON = -1


@dataclass
class StepMessage:
    """`tokens`: (seq_id, ids chosen for it in the last step, in order). `finished`: seq_ids that leave. `added`: rows that join,
    not yet computed. `drafts`: (seq_id, ids that may follow its tokens), good for one step.

    `exit_code` is `GO_ON`, or the code every rank leaves the loop with.
    """

    tokens: list[tuple[int, list[int]]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
    exit_code: int = GO_ON
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)

    def encode(self) -> list[int]:
        ints = [self.exit_code, len(self.tokens), len(self.finished), len(self.added), len(self.drafts)]
        for seq_id, token_ids in (*self.tokens, *self.drafts):
            ints += (seq_id, len(token_ids), *token_ids)
        ints += self.finished
        for new in self.added:
            after = NO_SEQUENCE if new.after is None else new.after
            ints += (new.seq_id, new.num_prompt, new.max_tokens_total, int(new.wants_prompt_logits), after)
            ints += new.token_ids
        return ints

    @classmethod
    def decode(cls, ints: Ints[int]) -> StepMessage:
        message = cls(exit_code=ints[0])
        num_tokens, num_finished, num_added, num_drafts = ints[1:5]
        message.tokens, at = _decode_runs(ints, 5, num_tokens)
        message.drafts, at = _decode_runs(ints, at, num_drafts)
        message.finished = list(ints[at : at + num_finished])
        at += num_finished
        for _ in range(num_added):
            seq_id, num_prompt, max_tokens_total, wants_prompt_logits, after = ints[at : at + 5]
            at += 5
            token_ids = list(ints[at : at + num_prompt])
            at += num_prompt
            after_id = None if after == NO_SEQUENCE else after
            message.added.append(
                Sequence(seq_id, token_ids, num_prompt, max_tokens_total, bool(wants_prompt_logits), after_id)
            )
        return message


def _decode_runs(ints: Ints[int], at: int, count: int) -> tuple[list[tuple[int, list[int]]], int]:
    """`count` runs of (seq_id, length, ids) from `at` on, and where they end."""
    runs: list[tuple[int, list[int]]] = []
    for _ in range(count):
        seq_id, length = ints[at : at + 2]
        at += 2
        runs.append((seq_id, list(ints[at : at + length])))
        at += length
    return runs, at
