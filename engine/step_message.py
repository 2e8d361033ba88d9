"""What rank 0 tells the other ranks between two steps, as one list of integers.

Rank 0 alone reads input, samples and writes output. Everything the others need to run the same schedule is here: the tokens it
chose, the rows that ended, the rows that arrived, its guesses at the tokens to come, what the device may do alone, and whether
this was the last step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as Ints
from dataclasses import dataclass, field

from engine.sequence import Sequence
from engine.token_rules import TokenRules

NO_SEQUENCE = -1
GO_ON = -1
_NUM_HEADER, _NUM_ADDED = 11, 9  # integers before the tokens, and of an added row before its rules and tokens


@dataclass
class StepMessage:
    """`tokens`: (seq_id, ids chosen for it in the last step, in order). `finished`: seq_ids that leave. `added`: rows that join,
    not yet computed. `drafts`: (seq_id, ids that may follow its tokens), good for one step.

    `burst_steps`: most decode steps that may run one after the other with no message between them (`engine.graph`), as far as the
    tokens go; 0 for a single step. `is_continued`: they follow those that run already, and no row joins or leaves.
    `is_ahead`: the next step follows those of the running burst before all of their tokens are known; they come with the next
    message, but for rows that are in `finished` now. `num_drafts`: guesses that the device makes and verifies for each row in
    such a step. `steps_read`: steps of the running burst that `tokens` come from, what they hold of the burst before not counted.
    `is_chosen_alone`: the device chooses the next tokens also after a step that prefills.

    `exit_code` is `GO_ON`, or the code every rank leaves the loop with.
    """

    tokens: list[tuple[int, list[int]]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    added: list[Sequence] = field(default_factory=list)
    exit_code: int = GO_ON
    drafts: list[tuple[int, list[int]]] = field(default_factory=list)
    burst_steps: int = 0
    is_continued: bool = False
    num_drafts: int = 0
    steps_read: int = 0
    is_chosen_alone: bool = False
    is_ahead: bool = False

    def encode(self) -> list[int]:
        ints = [self.exit_code, len(self.tokens), len(self.finished), len(self.added), len(self.drafts)]
        ints += (self.burst_steps, int(self.is_continued), self.num_drafts, self.steps_read, int(self.is_chosen_alone))
        ints.append(int(self.is_ahead))
        for seq_id, token_ids in (*self.tokens, *self.drafts):
            ints += (seq_id, len(token_ids), *token_ids)
        ints += self.finished
        for new in self.added:
            after = NO_SEQUENCE if new.after is None else new.after
            ints += (new.seq_id, new.num_prompt, new.max_tokens_total, int(new.wants_prompt_logits), after)
            ints += (new.max_output, *struct.unpack("<3q", struct.pack("<d", new.temperature) + new.stream_key))
            ints += (*new.rules.encode(), *new.token_ids)
        return ints

    @classmethod
    def decode(cls, ints: Ints[int]) -> StepMessage:
        message = cls(
            exit_code=ints[0], burst_steps=ints[5], is_continued=bool(ints[6]), num_drafts=ints[7], steps_read=ints[8],
            is_chosen_alone=bool(ints[9]), is_ahead=bool(ints[10]),
        )  # fmt: skip
        num_tokens, num_finished, num_added, num_guessed = ints[1:5]
        message.tokens, at = _decode_runs(ints, _NUM_HEADER, num_tokens)
        message.drafts, at = _decode_runs(ints, at, num_guessed)
        message.finished = list(ints[at : at + num_finished])
        at += num_finished
        for _ in range(num_added):
            sequence, at = _decode_added(ints, at)
            message.added.append(sequence)
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


def _decode_added(ints: Ints[int], at: int) -> tuple[Sequence, int]:
    """The row that begins at `at`, and where it ends."""
    seq_id, num_prompt, max_tokens_total, wants_prompt_logits, after = ints[at : at + 5]
    max_output, *draws = ints[at + 5 : at + _NUM_ADDED]
    draw = struct.pack("<3q", *draws)
    rules, first = TokenRules.decode(ints, at + _NUM_ADDED)
    end = first + num_prompt
    sequence = Sequence(
        seq_id,
        list(ints[first:end]),
        num_prompt,
        max_tokens_total,
        bool(wants_prompt_logits),
        None if after == NO_SEQUENCE else after,
        temperature=struct.unpack("<d", draw[:8])[0],
        stream_key=draw[8:],
        rules=rules,
        max_output=max_output,
    )
    return sequence, end
