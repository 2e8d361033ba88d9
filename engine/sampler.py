"""From logits to the next token: penalties, filters, and a draw that depends on nothing but the row.

Runs on rank 0 only; the other ranks receive the token. Bursts choose on the device instead, by the same steps
(`kernels/filter_logits.py`). Order of the steps, as in transformers: repetition penalty (prompt and
output), presence and frequency penalties (output only), logit bias, minimum length, temperature, top-k, top-p, min-p, draw.
Log-probabilities are those of the model, before any of these.

The draw is counter-based: the noise of an id is a hash of (seed, row key, sample index, position, id). So a row's text does not
depend on who shares its batch, on the order of rows, or on where a run was interrupted.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from engine.sampling_params import SamplingParams
from kernels.gumbel import gumbel_noise
from kernels.upload import upload

# Temperatures below this are finite but indistinguishable from greedy in fp32, so they are greedy.
GREEDY_BELOW = 1e-5


@dataclass(eq=False)
class SamplerState:
    """What one sequence has said so far, as far as sampling cares.

    `stream_key` identifies the row and sample (see `stream_key`). `forbidden_ids` are masked until `params.min_tokens` tokens
    are out: the ids that would end the row.
    """

    params: SamplingParams
    stream_key: bytes
    prompt_ids: Sequence[int]
    forbidden_ids: tuple[int, ...] = ()
    output_counts: Counter[int] = field(default_factory=Counter)
    num_output: int = 0
    _penalised_prompt: torch.Tensor | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW or self.params.top_k == 1 or self.params.top_p == 0.0

    @property
    def is_plain(self) -> bool:
        """True if the next token is the arg-max of the untouched logits."""
        return self.is_greedy and self._is_untouched

    @property
    def _is_untouched(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty == 1.0
            and params.presence_penalty == 0.0
            and params.frequency_penalty == 0.0
            and not params.logit_bias
            and not self._is_too_short
        )

    @property
    def _is_too_short(self) -> bool:
        return self.num_output < self.params.min_tokens and bool(self.forbidden_ids)

    def record(self, token_id: int) -> None:
        self.output_counts[token_id] += 1
        self.num_output += 1

    def fork(self) -> SamplerState:
        """A copy that can record tokens of its own: what the row would be if it went on so."""
        return replace(self, output_counts=self.output_counts.copy())


def stream_key(seed: int, row_key: object, sample_idx: int) -> bytes:
    """Key of a row's random stream. `row_key` is None for a row that brought its own seed, else its id or index."""
    return hashlib.blake2b(json.dumps([seed, row_key, sample_idx]).encode(), digest_size=16).digest()


def stream_start(key: bytes, position: int) -> int:
    """Where the noise of the token at `position` (of the output) of a stream begins: a signed 64-bit hash."""
    digest = hashlib.blake2b(position.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def gumbel(key: bytes, position: int, ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise (fp64, like `ids`), one number an id: a pure function of (key, position, id)."""
    return gumbel_noise(stream_start(key, position), ids)


def sample(logits: torch.Tensor, states: Sequence[SamplerState]) -> list[int | None]:
    """Choose one token a row. `logits`: fp32 `[rows, vocabulary]`, unchanged; `states`: one a row.

    None for a row whose logits hold a NaN or an infinity where the maximum should be: there is nothing to choose from. *Stream*:
    waits once for a GPU, whatever the rules of the rows.
    """
    highest, argmax = logits.max(dim=-1)  # a NaN anywhere in the row is its maximum
    others = [idx for idx, state in enumerate(states) if not state.is_plain]
    if others:
        chosen = torch.stack([_sample_row(logits[idx], states[idx]) for idx in others])
        argmax = argmax.index_copy(0, upload(torch.tensor(others), logits.device), chosen)
    found = torch.where(highest.isfinite(), argmax, -1)
    return [None if token_id < 0 else token_id for token_id in found.tolist()]


def _sample_row(logits: torch.Tensor, state: SamplerState) -> torch.Tensor:
    """An id, where the logits are. Waits for nothing."""
    logits = apply_penalties(logits.clone(), state)
    if state.is_greedy:
        return logits.argmax()
    probabilities, ids = filter_logits(logits, state.params)
    is_left = probabilities != 0.0
    if logits.device.type == "cpu" and bool(is_left.any()):  # there it costs nothing to ask, and noise for the others would
        probabilities, ids = probabilities[is_left], ids[is_left]
    return _draw(probabilities, ids, state.stream_key, state.num_output)


def apply_penalties(logits: torch.Tensor, state: SamplerState) -> torch.Tensor:
    """Penalties, bias and minimum length on one row's `logits` (fp32 `[vocabulary]`), in place."""
    params, device = state.params, logits.device
    if params.repetition_penalty != 1.0:
        ids = _seen_ids(state, device)
        picked = logits[ids]
        penalty = torch.full_like(picked, params.repetition_penalty)  # a tensor: a GPU divides by a number inexactly
        logits[ids] = torch.where(picked < 0, picked * penalty, picked / penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_counts:
        ids = upload(torch.tensor(list(state.output_counts)), device)
        counts = upload(torch.tensor(list(state.output_counts.values()), dtype=logits.dtype), device)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = upload(torch.tensor([token_id for token_id, _ in params.logit_bias]), device)
        logits[ids] += upload(torch.tensor([bias for _, bias in params.logit_bias], dtype=logits.dtype), device)
    if state._is_too_short:
        logits[upload(torch.tensor(state.forbidden_ids), device)] = -torch.inf
    return logits


def _seen_ids(state: SamplerState, device: torch.device) -> torch.Tensor:
    if state._penalised_prompt is None:
        state._penalised_prompt = torch.tensor(sorted(set(state.prompt_ids)), dtype=torch.int64)
    output = torch.tensor(list(state.output_counts), dtype=torch.int64)
    return upload(torch.cat([state._penalised_prompt, output]).unique(), device)


def filter_logits(logits: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Temperature, top-k, top-p, min-p. Returns probabilities (fp64, unnormalised; 0 for ids that do not survive) and their ids.

    Ties at a border go to the smaller id, so that the survivors do not depend on the sorting algorithm. Waits for nothing.
    """
    is_top_k = 0 < params.top_k < logits.numel()
    if not is_top_k and params.top_p >= 1.0 and params.min_p <= 0.0:
        probabilities = ((logits - logits.max()).double() / params.temperature).exp()
        return probabilities, torch.arange(logits.numel(), device=logits.device)
    values, ids = torch.sort(logits, descending=True, stable=True)
    if is_top_k:
        values, ids = values[: params.top_k], ids[: params.top_k]
    # Subtracting the maximum first keeps tiny temperatures finite.
    probabilities = ((values - values[0]).double() / params.temperature).exp()
    if params.top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        is_kept = before < params.top_p * probabilities.sum()
        is_kept[:1].fill_(True)  # as an assignment it would be waited for
        probabilities = torch.where(is_kept, probabilities, 0.0)
    if params.min_p > 0.0:
        probabilities = torch.where(probabilities >= params.min_p * probabilities[0], probabilities, 0.0)
    return probabilities, ids


def draw(probabilities: torch.Tensor, ids: torch.Tensor, key: bytes, position: int) -> int:
    """An id drawn from unnormalised `probabilities` (fp64 `[n]`) of `ids`, by the largest of log-probability plus Gumbel noise.

    An id of probability zero is never drawn. The order of the ids does not matter, nor do ids that are not there, so a sharded
    vocabulary can draw by comparing one candidate a shard. Two models that draw with the same noise agree as often as any
    coupling can promise, up to a factor of 1 + their total variation (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    """
    return int(_draw(probabilities, ids, key, position))


def _draw(probabilities: torch.Tensor, ids: torch.Tensor, key: bytes, position: int) -> torch.Tensor:
    return ids.take((probabilities.log() + gumbel(key, position, ids)).argmax())  # an index that is a tensor would be waited for


def top_logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> tuple[float, list[tuple[int, float]]]:
    """Natural log-probability of `token_id`, and of the `num_top` likeliest ids, best first. `logits`: fp32 `[vocabulary]`."""
    logprobs = torch.log_softmax(logits.double(), dim=-1)
    if num_top == 0:
        return float(logprobs[token_id]), []
    values, ids = logprobs.topk(min(num_top, logprobs.numel()))
    return float(logprobs[token_id]), list(zip(ids.tolist(), values.tolist()))
