"""Rank 0's side of the loop: let rows in, choose tokens, notice the end of rows, and write the next message.

The leader never touches the schedule; it only reads what its own replica scheduled and answers with a `StepMessage`.
"""

from __future__ import annotations

import torch

from engine.completion import Completion, TokenLogprob
from engine.detokenizer import Detokenizer
from engine.request import Request, Sample
from engine.sampler import SamplerState, sample, stream_key, top_logprobs
from engine.scheduler import ScheduledRow
from engine.sequence import Sequence
from engine.step_message import StepMessage
from engine.stop_strings import StopStrings
from engine.text import Text

NOT_A_NUMBER = "the model's logits are not finite numbers"


class Leader:
    """Turns requests into sequences and logits into tokens.

    `text`: tokenizer of the model. `max_tokens_total`: most tokens a row may have, prompt included. `num_used_ids`: ids from here
    on exist in the logits but not in the tokenizer and are never chosen.
    """

    def __init__(self, text: Text, max_tokens_total: int, num_used_ids: int):
        self.text, self.max_tokens_total, self.num_used_ids = text, max_tokens_total, num_used_ids
        self.samples: dict[int, Sample] = {}
        self._message = StepMessage()
        self._next_id = 0

    @property
    def num_open(self) -> int:
        return len(self.samples)

    def add(self, request: Request) -> None:
        """Let a row join at the next step, with `params.n` sequences; the later ones reuse the first one's prompt pages."""
        first_id = None
        for sample_idx in range(request.params.n):
            sequence = Sequence(
                seq_id=self._next_id,
                token_ids=list(request.prompt_ids),
                num_prompt=len(request.prompt_ids),
                max_tokens_total=self.max_tokens_total,
                wants_prompt_logits=request.params.prompt_logprobs is not None,
                after=first_id,
            )
            self._next_id += 1
            first_id = sequence.seq_id if first_id is None else first_id
            self._message.added.append(sequence)
            self.samples[sequence.seq_id] = self._open_sample(request, sample_idx, sequence)

    def _open_sample(self, request: Request, sample_idx: int, sequence: Sequence) -> Sample:
        state = SamplerState(
            params=request.params,
            stream_key=stream_key(request.seed, request.row_key, sample_idx),
            prompt_ids=request.prompt_ids,
            forbidden_ids=tuple(sorted(request.stop_ids)),
        )
        detokenizer = Detokenizer(self.text, request.params.skip_special_tokens, context=request.prompt_ids)
        stops = StopStrings(request.stop_strings, include=request.params.include_stop_str)
        return Sample(request, sample_idx, sequence, state, detokenizer, stops)

    def take_message(self, exit_code: int | None = None) -> list[int]:
        """The message for the next step. Tokens and rows named in it are not named again."""
        message, self._message = self._message, StepMessage()
        if exit_code is not None:
            message.exit_code = exit_code
        return message.encode()

    @property
    def has_news(self) -> bool:
        return bool(self._message.tokens or self._message.finished or self._message.added)

    def receive(self, rows: list[ScheduledRow], logits: torch.Tensor | None) -> int:
        """Choose the next tokens from a step's `logits` (fp32 `[n, full_vocab]`). Returns how many were chosen."""
        if logits is None:
            return 0
        logits = self._cut_unused(logits)
        sampled: list[tuple[Sample, torch.Tensor]] = []
        at = 0
        for row in rows:
            block = logits[at : at + row.num_logits]
            at += row.num_logits
            current = self.samples[row.sequence.seq_id]
            if row.num_logits and row.first < row.sequence.num_prompt and row.sequence.wants_prompt_logits:
                self._record_prompt(current, row, block)
            if row.is_sampled:
                sampled.append((current, block[-1]))
        if sampled:
            self._choose(sampled)
        return len(sampled)

    def _cut_unused(self, logits: torch.Tensor) -> torch.Tensor:
        if self.num_used_ids < logits.shape[-1]:
            logits = logits[:, : self.num_used_ids]
        return logits

    def _choose(self, sampled: list[tuple[Sample, torch.Tensor]]) -> None:
        logits = torch.stack([row for _, row in sampled])
        tokens = sample(logits, [current.state for current, _ in sampled])
        for idx, (current, token_id) in enumerate(zip((current for current, _ in sampled), tokens)):
            if token_id is None:
                self._finish(current, current.fail(NOT_A_NUMBER))
                continue
            params = current.request.params
            if params.logprobs is not None:
                current.logprobs.append(self._logprob(logits[idx], token_id, params.logprobs))
            completion = current.accept(token_id, self.max_tokens_total)
            if completion is not None:
                self._finish(current, completion)
            else:
                self._message.tokens.append((current.sequence.seq_id, token_id))

    def _finish(self, current: Sample, completion: Completion) -> None:
        self._message.finished.append(current.sequence.seq_id)
        del self.samples[current.sequence.seq_id]
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
