"""Rank 0's side of the loop: let rows in, choose tokens, notice the end of rows, and write the next message.

The leader never touches the schedule; it only reads what its own replica scheduled and answers with a `StepMessage`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import islice

import torch

from engine.completion import Completion, TokenLogprob
from engine.detokenizer import Detokenizer
from engine.drafts.speculation import Speculation
from engine.graph.burst import Burst
from engine.graph.row_state import Speculable
from engine.graph.token_ring import NO_TOKEN
from engine.request import Request, Sample
from engine.sampler import SamplerState, sample, stream_key, top_logprobs
from engine.scheduler import ScheduledRow
from engine.sequence import NO_LIMIT, Sequence
from engine.step_message import StepMessage
from engine.stop_strings import StopStrings
from engine.text import Text
from engine.token_rules import TokenRules
from engine.trial import Trial

NOT_A_NUMBER = "the model's logits are not finite numbers"


class Leader:
    """Turns requests into sequences and logits into tokens.

    `text`: tokenizer of the model. `max_tokens_total`: most tokens a row may have, prompt included. `num_used_ids`: ids from here
    on exist in the logits but not in the tokenizer and are never chosen. `speculation`: None for one token a step.
    """

    def __init__(self, text: Text, max_tokens_total: int, num_used_ids: int, speculation: Speculation | None = None):
        self.text, self.max_tokens_total, self.num_used_ids = text, max_tokens_total, num_used_ids
        self.speculation = speculation
        self.samples: dict[int, Sample] = {}
        self._message = StepMessage()
        self._burst_tokens: dict[int, list[int]] = {}
        self._steps_read = 0
        self._bound: set[int] = set()  # rows whose tokens only rank 0 can choose
        self._past: set[int] = set()  # rows of which a token has been chosen
        self._leaving: set[int] = set()  # rows that the schedule has lost, and whose last tokens are still to be read
        self._next_id = 0

    @property
    def num_open(self) -> int:
        return len(self.samples)

    def add(self, request: Request) -> None:
        """Let a row join at the next step, with `params.n` sequences; the later ones reuse the first one's prompt pages."""
        first_id = None
        for sample_idx in range(request.params.n):
            state = self._sampler_state(request, sample_idx)
            sequence = Sequence(
                seq_id=self._next_id,
                token_ids=list(request.prompt_ids),
                num_prompt=len(request.prompt_ids),
                max_tokens_total=self.max_tokens_total,
                wants_prompt_logits=request.params.prompt_logprobs is not None,
                after=first_id,
                temperature=0.0 if state.is_greedy else request.params.temperature,
                stream_key=state.stream_key,
                rules=TokenRules.of(request.params, state.is_greedy, state.forbidden_ids),
                max_output=NO_LIMIT if request.params.max_tokens is None else request.params.max_tokens,
            )
            self._next_id += 1
            first_id = sequence.seq_id if first_id is None else first_id
            self._message.added.append(sequence)
            if request.params.logprobs is not None or sequence.wants_prompt_logits or not sequence.rules.is_small:
                self._bound.add(sequence.seq_id)
            self.samples[sequence.seq_id] = self._open_sample(request, sample_idx, sequence, state)

    def _sampler_state(self, request: Request, sample_idx: int) -> SamplerState:
        return SamplerState(
            params=request.params,
            stream_key=stream_key(request.seed, request.row_key, sample_idx),
            prompt_ids=request.prompt_ids,
            forbidden_ids=tuple(sorted(request.stop_ids)),
        )

    def _open_sample(self, request: Request, sample_idx: int, sequence: Sequence, state: SamplerState) -> Sample:
        detokenizer = Detokenizer(self.text, request.params.skip_special_tokens, context=request.prompt_ids)
        stops = StopStrings(request.stop_strings, include=request.params.include_stop_str)
        return Sample(request, sample_idx, sequence, state, detokenizer, stops)

    def take_message(
        self, exit_code: int | None = None, burst_steps: int = 0, num_drafts: int = 0, is_chosen_alone: bool = False,
        is_continued: bool = False, is_ahead: bool = False,
    ) -> list[int]:  # fmt: skip
        """The message for the next step. Tokens and rows named in it are not named again."""
        message, self._message = self._message, StepMessage()
        message.burst_steps, message.num_drafts, message.is_continued = burst_steps, num_drafts, is_continued
        message.tokens += self._burst_tokens.items()
        message.steps_read, self._steps_read = self._steps_read, 0
        message.is_chosen_alone, message.is_ahead = is_chosen_alone, is_ahead
        self._burst_tokens = {}
        if exit_code is not None:
            message.exit_code = exit_code
        return message.encode()

    @property
    def has_news(self) -> bool:
        return bool(self._message.tokens or self._burst_tokens or self.has_change)

    @property
    def has_change(self) -> bool:
        """Rows join or leave with the next message."""
        return bool(self._message.finished or self._message.added)

    def num_drafts_alone(self, speculable: Speculable | None, max_batch: int, running: int | None = None) -> int:
        """How many guesses a row the device is to make and verify in each step of the next burst, or of the one that has
        `running`; 0 for none. `speculable`: what such bursts may be; `max_batch`: most rows that run at once, those that have
        been here longest."""
        num_rows = min(len(self.samples), max_batch)
        if speculable is None or self.speculation is None or not 0 < num_rows <= speculable.max_rows:
            return 0
        if any(sample.sequence.rules.is_penalised for sample in islice(self.samples.values(), num_rows)):
            return 0
        return min(self.speculation.choose_for_burst(num_rows, running), speculable.max_drafts)

    def steps_alone(self, num_drafts: int = 0, running: Iterable[Sequence] = ()) -> int:
        """How many steps every row past its prompt still needs, if all of its tokens can be chosen without rank 0; 0 if they
        cannot, or if drafts are made between the steps. With `num_drafts` in each, as many as it takes at the present rate.
        `running`: rows that are past their prompt though nothing of them has been read."""
        if self.speculation is not None and self.speculation.drafter is not None:
            return 0
        past = self._past | {sequence.seq_id for sequence in running if sequence.seq_id in self.samples}
        num_tokens = min((self._tokens_alone(self.samples[seq_id]) for seq_id in past), default=0)
        return num_tokens if num_drafts == 0 else math.ceil(num_tokens / self.speculation.expected_tokens(num_drafts))

    def _tokens_alone(self, current: Sample) -> int:
        if current.request.params.logprobs is not None or not current.sequence.rules.is_small:
            return 0
        return self._tokens_left(current)

    def _tokens_left(self, current: Sample) -> int:
        """How many more tokens a row may have."""
        params, num_tokens = current.request.params, len(current.token_ids)
        room = self.max_tokens_total - current.sequence.num_prompt - num_tokens
        return room if params.max_tokens is None else min(room, params.max_tokens - num_tokens)

    def is_chosen_alone(self) -> bool:
        """Whether all tokens of the open rows can be chosen without rank 0, their first ones too, and no drafts are made of them
        on rank 0."""
        return not self._bound and (self.speculation is None or self.speculation.drafter is None)

    def is_any_open(self, sequences: list[Sequence]) -> bool:
        return any(sequence.seq_id in self.samples for sequence in sequences)

    def steps_ahead(self, burst: Burst) -> int | None:
        """How many steps without rank 0 and without guesses there may be behind all that have been launched of `burst`, before
        these are read; 0 if the next step is one that prefills. None if they have to be read first, or if nothing would be left
        to compute."""
        if not self.is_chosen_alone():
            return None
        left = [self._tokens_left(sample) - burst.num_unread for sample in self._open(burst)]
        staying = [count for count in left if count > 0]
        return min(staying) if staying else 0 if len(self.samples) > len(left) else None

    def leave_ahead(self, burst: Burst) -> None:
        """Rows that have all their tokens with the launched steps of `burst` leave with the next message, though not all of them
        have been read."""
        gone = [sample.sequence.seq_id for sample in self._open(burst) if self._tokens_left(sample) <= burst.num_unread]
        self._message.finished += gone
        self._leaving.update(gone)

    def _open(self, burst: Burst) -> list[Sample]:
        """The rows of `burst` that have not ended."""
        return [self.samples[sequence.seq_id] for sequence in burst.sequences if sequence.seq_id in self.samples]

    def receive_burst(
        self, sequences: list[Sequence], chosen: list[list[int]], num_drafts: int = 0, is_last: bool = False
    ) -> int:
        """Take the tokens of one step of a burst, by row, as if they had been chosen here. `is_last`: the step is of the last
        burst, ahead of which the next steps were launched. Returns how many were for rows still open."""
        self._steps_read += not is_last
        if self.speculation is not None and num_drafts == 0:
            self.speculation.note_plain_step()
        num_taken = 0
        for sequence, token_ids in zip(sequences, chosen):
            current = self.samples.get(sequence.seq_id)
            if current is None:  # it ended at an earlier step of the burst
                continue
            num_own = self._take_burst(current, token_ids)
            num_taken += num_own
            if self.speculation is not None:
                self.speculation.record_burst(sequence.seq_id, num_drafts, len(token_ids) - 1, num_own)
        return num_taken

    def _take_burst(self, current: Sample, token_ids: list[int]) -> int:
        """Returns how many tokens were taken: all, or those up to the row's end."""
        seq_id = current.sequence.seq_id
        self._past.add(seq_id)
        for num_taken, token_id in enumerate(token_ids, 1):
            completion = current.fail(NOT_A_NUMBER) if token_id == NO_TOKEN else current.accept(token_id, self.max_tokens_total)
            if completion is not None:
                self._finish(current, completion)
                return num_taken
            if seq_id not in self._leaving:
                self._burst_tokens.setdefault(seq_id, []).append(token_id)
        return len(token_ids)

    def receive(self, rows: list[ScheduledRow], logits: torch.Tensor | None) -> int:
        """Choose the next tokens from a step's `logits` (fp32 `[n, full_vocab]`), and guess at those after them.

        Returns how many tokens were chosen beyond one a row.
        """
        if logits is None:
            return 0
        logits = self._cut_unused(logits)
        trials: list[Trial] = []
        at = 0
        for row in rows:
            block = logits[at : at + row.num_logits]
            at += row.num_logits
            current = self.samples[row.sequence.seq_id]
            if row.num_logits and row.first < row.sequence.num_prompt and row.sequence.wants_prompt_logits:
                self._record_prompt(current, row, block)
            if row.is_sampled:
                trials.append(Trial(current, row, block[-1 - len(row.draft_ids) :]))
        self._choose(trials)
        going_on = [trial for trial in trials if trial.sample.sequence.seq_id in self.samples]
        self._message.tokens += [(trial.sample.sequence.seq_id, trial.token_ids) for trial in going_on]
        if self.speculation is not None and self.speculation.drafter is not None:
            self._record_drafts(trials)
            self._message.drafts = self.speculation.propose([trial.sample for trial in going_on], self.max_tokens_total)
        return sum(max(0, len(trial.token_ids) - 1) for trial in trials)

    def drop_all(self) -> None:
        """Forget every open row."""
        self.samples.clear()
        self._burst_tokens.clear()
        self._leaving.clear()
        self._bound.clear()
        self._past.clear()
        if self.speculation is not None:
            self.speculation.drop_all()

    def _cut_unused(self, logits: torch.Tensor) -> torch.Tensor:
        if self.num_used_ids < logits.shape[-1]:
            logits = logits[:, : self.num_used_ids]
        return logits

    def _choose(self, trials: list[Trial]) -> None:
        """Position after position, over all rows whose logits are good: one round without drafts, more with them."""
        while trials:
            tokens = sample(torch.stack([trial.next_logits for trial in trials]), [trial.sample.state for trial in trials])
            trials = [trial for trial, token_id in zip(trials, tokens) if self._take(trial, token_id)]

    def _take(self, trial: Trial, token_id: int | None) -> bool:
        """Give a row its next token. Returns whether the step knows the logits of the one after it."""
        current, params = trial.sample, trial.sample.request.params
        if token_id is None:
            self._finish(current, current.fail(NOT_A_NUMBER))
            return False
        if params.logprobs is not None:
            current.logprobs.append(self._logprob(trial.next_logits, token_id, params.logprobs))
        trial.token_ids.append(token_id)
        self._past.add(current.sequence.seq_id)
        completion = current.accept(token_id, self.max_tokens_total)
        if completion is not None:
            self._finish(current, completion)
            return False
        return trial.is_good and len(trial.token_ids) < len(trial.logits)

    def _record_drafts(self, trials: list[Trial]) -> None:
        for trial in trials:
            if trial.row.is_decode:
                seq_id, num_drafts = trial.sample.sequence.seq_id, len(trial.row.draft_ids)
                self.speculation.record(seq_id, num_drafts, trial.num_accepted, len(trial.token_ids))

    def _finish(self, current: Sample, completion: Completion) -> None:
        seq_id = current.sequence.seq_id
        if seq_id in self._leaving:
            self._leaving.remove(seq_id)
        else:
            self._message.finished.append(seq_id)
        self._bound.discard(seq_id)
        self._past.discard(seq_id)
        del self.samples[seq_id]
        if self.speculation is not None:
            self.speculation.drop(seq_id)
        current.request.finish_sample(current.sample_idx, completion)

    def _record_prompt(self, current: Sample, row: ScheduledRow, block: torch.Tensor) -> None:
        """Logits at position p speak about token p + 1; a row that was preempted computes some positions twice."""
        num_top = current.request.params.prompt_logprobs or 0
        for offset in range(block.shape[0]):
            target = row.first + offset + 1
            if len(current.prompt_logprobs) == target < row.sequence.num_prompt:
                token_id = row.sequence.token_ids[target]
                current.prompt_logprobs.append(self._logprob(block[offset], token_id, num_top))

    def _logprob(self, logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprob:
        chosen, top = top_logprobs(logits, token_id, num_top)
        return self._entry(token_id, chosen, tuple(self._entry(other, value) for other, value in top))

    def _entry(self, token_id: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        token_bytes = self.text.token_bytes[token_id]
        return TokenLogprob(token_bytes.decode("utf-8", "replace"), token_id, logprob, token_bytes, top)
