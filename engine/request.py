"""A row on its way through rank 0: from token ids to finished completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.completion import Completion, TokenLogprob
from engine.sampler import SamplerState
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence


@dataclass(eq=False)
class Request:
    """One row to answer.

    `row_key`: what, beside the seed, the row's random stream depends on; None if the row brought its own seed. `seed` is always
    set. `stop_ids`: every id that ends the row; `kept_stops`: those that the user named as stop strings and wants kept in the
    text. `on_text` gets new text of sample 0 as it becomes final; `on_done` gets the completions of all `params.n` samples,
    once.
    """

    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    row_key: object = None
    kept_stops: dict[int, str] = field(default_factory=dict)
    on_text: Callable[[str], None] | None = None
    on_done: Callable[[list[Completion]], None] | None = None
    completions: dict[int, Completion] = field(default_factory=dict)

    def finish_sample(self, sample_idx: int, completion: Completion) -> None:
        self.completions[sample_idx] = completion
        if len(self.completions) == self.params.n and self.on_done is not None:
            self.on_done([self.completions[idx] for idx in range(self.params.n)])


class Sample:
    """One continuation in the making: text so far, stop strings, log-probabilities. Lives on rank 0."""

    def __init__(self, request: Request, sample_idx: int, sequence: Sequence, state: SamplerState, detokenizer, stops):
        self.request, self.sample_idx, self.sequence, self.state = request, sample_idx, sequence, state
        self._detokenizer, self._stops = detokenizer, stops
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]

    def accept(self, token_id: int, max_tokens_total: int) -> Completion | None:
        """Append one token. Returns the completion if it was the last.

        An id that ends the row is kept in the ids and adds no text. Before `min_tokens` neither ids nor strings end the row.
        """
        params = self.request.params
        self.token_ids.append(token_id)
        self.state.record(token_id)
        may_stop = len(self.token_ids) >= params.min_tokens
        if may_stop and token_id in self.request.stop_ids:
            kept = self.request.kept_stops.get(token_id)
            return self._complete("stop", token_id, kept_stop=kept or "")
        text = self._detokenizer.push(token_id)
        if may_stop:
            text, matched = self._stops.push(text)
            if matched is not None:
                self._emit(text)
                return self._complete("stop", matched, is_text_final=True)
        self._emit(text)
        is_full = params.max_tokens is not None and len(self.token_ids) >= params.max_tokens
        if is_full or self.sequence.num_prompt + len(self.token_ids) >= max_tokens_total:
            return self._complete("length", None)
        return None

    def fail(self, reason: str) -> Completion:
        return self._complete("error", reason)

    def _emit(self, text: str) -> None:
        if text:
            self._text.append(text)
            if self.request.on_text is not None and self.sample_idx == 0:
                self.request.on_text(text)

    def _complete(
        self, finish_reason: str, stop_reason: str | int | None, is_text_final: bool = False, kept_stop: str = ""
    ) -> Completion:
        if not is_text_final:
            text, matched = self._stops.push(self._detokenizer.flush())
            self._emit(text)
            if matched is None:
                self._emit(self._stops.flush() + kept_stop)
            elif finish_reason == "length":
                finish_reason, stop_reason = "stop", matched
        params = self.request.params
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            seed=self.request.seed,
            logprobs=None if params.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=None if params.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
