"""From a row to a request: tokenize, check against the model, settle the seed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from engine.options import check_token_ids
from engine.refused import Refused
from engine.request import Request
from engine.rows import Row
from engine.sampling_params import SamplingParams
from engine.settings import DEFAULT_MAX_TOKENS
from engine.text import Text


@dataclass(frozen=True)
class RowPreparer:
    """Everything a row meets on its way to the engine, fixed for a run.

    `eos_ids` end every row that does not set `ignore_eos`. `num_ids`: ids the model and the tokenizer both have.
    `max_tokens_total`: most tokens of a row, prompt included. `run_seed`: for rows without a seed of their own.
    `is_chat`: what to do with plain prompts; None leaves them raw.
    """

    text: Text
    eos_ids: frozenset[int]
    num_ids: int
    max_tokens_total: int
    run_seed: int
    is_chat: bool = False

    def prompt_ids(self, row: Row) -> list[int]:
        """Token ids of the row's prompt. *Raises* `Refused` if it cannot be rendered or tokenized."""
        if row.prompt_token_ids is not None:
            return list(row.prompt_token_ids)
        if row.messages is not None:
            return self.text.encode_chat(row.messages, continue_final=row.continue_final_message)
        if self.is_chat:
            return self.text.encode_chat(self.messages(row))
        return self.text.encode(row.prompt)

    def rendered(self, row: Row) -> str | None:
        """The prompt as text, after the chat template; None for a row of token ids."""
        if row.prompt_token_ids is not None:
            return None
        if row.messages is not None:
            return self.text.render_chat(row.messages, continue_final=row.continue_final_message)
        return self.text.render_chat(self.messages(row)) if self.is_chat else row.prompt

    def messages(self, row: Row) -> list[dict[str, str]]:
        system = [{"role": "system", "content": row.system}] if row.system else []
        return [*system, {"role": "user", "content": row.prompt}]

    def request(self, row: Row) -> Request:
        """The row as a request, without callbacks.

        *Raises* `Refused` with a code and a sentence: the row cannot be answered by this model.
        """
        prompt_ids = self.prompt_ids(row)
        if not prompt_ids:
            raise Refused("empty_prompt", "the prompt is empty: it gives no tokens to continue")
        check_token_ids(row.params, self.num_ids, prompt_ids)
        if len(prompt_ids) >= self.max_tokens_total:
            raise Refused(
                "prompt_too_long",
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room for an answer: "
                f"prompt and answer together may have {self.max_tokens_total}",
            )
        params = fill_defaults(row.params)
        stop_strings, special_ids = self.text.split_stops(params.stop)
        eos_ids = frozenset() if params.ignore_eos else self.eos_ids
        return Request(
            prompt_ids=prompt_ids,
            params=params,
            seed=self.run_seed if params.seed is None else params.seed,
            row_key=row.index if params.seed is None else None,
            stop_ids=eos_ids | frozenset(params.stop_token_ids) | frozenset(special_ids),
            stop_strings=tuple(stop_strings),
            kept_stops={self.text.token_id(stop): stop for stop in params.stop if stop not in stop_strings}
            if params.include_stop_str
            else {},
        )


def fill_defaults(params: SamplingParams) -> SamplingParams:
    """`params` with `max_tokens` set: the documented default if nobody asked, and never less than `min_tokens`."""
    if params.max_tokens is not None:
        return params
    return replace(params, max_tokens=max(DEFAULT_MAX_TOKENS, params.min_tokens))


def fresh_seed() -> int:
    """A seed for a run that was given none; it is printed and stored, so the run can be repeated."""
    return secrets.randbits(31)
