"""Sampling rules of the rows of a burst, on the device, with what each row has said so far.

The counts of a row stay where they are as long as it takes part: its slot is its own, a step counts the token that it computes,
and the host adds only what it chose between two bursts. Uploads go through torch's pinned memory, which is not used again before
it has been copied; no upload waits.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy
import torch

from engine.sequence import Sequence
from kernels.filter_logits import (
    FREE_FROM,
    FREQUENCY,
    MAX_BIASES,
    MAX_FORBIDDEN,
    MIN_P,
    PRESENCE,
    REPETITION,
    RULE_WORDS,
    SEEN_SLOT,
    TOP_K,
    TOP_P,
    FilterOptions,
)
from kernels.upload import upload

NOBODY = 0  # slot of the rows whose counts do not matter


@dataclass
class Counted:
    """The slot of a row, and how many of its tokens, from the first on, are counted in it."""

    slot: int
    num_tokens: int = 0


class RowRules:
    """Of up to `max_rows` rows over `full_vocab` ids. *Cost*: 4 bytes an id and row."""

    def __init__(self, max_rows: int, full_vocab: int, device: torch.device):
        self._device = device
        self._rules = torch.zeros(max_rows, RULE_WORDS, dtype=torch.int64, device=device)
        self._bias_ids = torch.full((max_rows, MAX_BIASES), -1, dtype=torch.int64, device=device)
        self._biases = torch.zeros(max_rows, MAX_BIASES, dtype=torch.float32, device=device)
        self._forbidden_ids = torch.full((max_rows, MAX_FORBIDDEN), -1, dtype=torch.int64, device=device)
        self._seen = torch.zeros(max_rows + 1, full_vocab, dtype=torch.int32, device=device)
        self._free_slots = list(range(max_rows, NOBODY, -1))
        self._counted: dict[Sequence, Counted] = {}
        self._has_lists = False

    def options(self, count: int) -> FilterOptions:
        """The first `count` rows, as views."""
        lists = (self._bias_ids[:count], self._biases[:count], self._forbidden_ids[:count])
        return FilterOptions(self._rules[:count], *lists, self._seen)

    def begin(self, sequences: list[Sequence]) -> None:
        """Put the rules of `sequences`, each with one token to compute, in the place of those before."""
        for gone in self._counted.keys() - set(sequences):
            self._free_slots.append(self._counted.pop(gone).slot)
        penalised = [sequence for sequence in sequences if sequence.rules.is_penalised]
        for sequence in penalised:
            self._count(sequence)
        words = numpy.zeros((self._rules.shape[0], RULE_WORDS), numpy.int64)
        numbers = words.view(numpy.float64)
        numbers[:, [TOP_P, REPETITION]] = 1.0
        for row, sequence in enumerate(sequences):
            rules, counted = sequence.rules, self._counted.get(sequence)
            words[row, TOP_K] = rules.top_k
            words[row, FREE_FROM] = sequence.num_prompt + rules.min_tokens - 1
            words[row, SEEN_SLOT] = NOBODY if counted is None else counted.slot
            numbers[row, [TOP_P, MIN_P, REPETITION]] = rules.top_p, rules.min_p, rules.repetition_penalty
            numbers[row, [PRESENCE, FREQUENCY]] = rules.presence_penalty, rules.frequency_penalty
        self._rules.copy_(self._upload(words))
        self._write_lists(sequences)

    def advance(self, num_steps: int) -> None:
        """`num_steps` steps of the rows have been launched, each of which counts a token."""
        for counted in self._counted.values():
            counted.num_tokens += num_steps

    def _count(self, sequence: Sequence) -> None:
        """Count what is not counted yet, but for the last token, which the next step counts."""
        counted, num_known = self._counted.get(sequence), sequence.num_tokens - 1
        if counted is None:
            counted = self._counted[sequence] = Counted(self._free_slots.pop())
            self._seen[counted.slot].zero_()
        first, counted.num_tokens = counted.num_tokens, num_known
        if first > num_known:
            raise RuntimeError(f"{first} tokens of a row are counted, which has {num_known}")
        if first < num_known > len(sequence.token_ids):
            raise RuntimeError(f"{num_known - first} tokens of a row are to be counted that only the device knows")
        words = Counter[int]() if first else Counter(set(sequence.token_ids[: sequence.num_prompt]))
        if num_known < sequence.num_prompt:
            words[sequence.token_ids[-1]] -= 2  # the step takes its token for one of the output
        for token_id in sequence.token_ids[max(first, sequence.num_prompt) : num_known]:
            words[token_id] += 2
        if words:
            pairs = self._upload(numpy.array([list(words), list(words.values())], numpy.int64))
            self._seen[counted.slot].index_add_(0, pairs[0], pairs[1].to(torch.int32))

    def _write_lists(self, sequences: list[Sequence]) -> None:
        has_lists = any(sequence.rules.logit_bias or sequence.rules.forbidden_ids for sequence in sequences)
        if not has_lists and not self._has_lists:
            return
        self._has_lists = has_lists
        lists = numpy.full((self._rules.shape[0], MAX_BIASES + MAX_FORBIDDEN), -1, numpy.int64)
        biases = numpy.zeros(self._biases.shape, numpy.float32)
        for row, sequence in enumerate(sequences):
            rules = sequence.rules
            for idx, (token_id, bias) in enumerate(rules.logit_bias):
                lists[row, idx], biases[row, idx] = token_id, bias
            lists[row, MAX_BIASES : MAX_BIASES + len(rules.forbidden_ids)] = rules.forbidden_ids
        ids = self._upload(lists)
        self._bias_ids.copy_(ids[:, :MAX_BIASES])
        self._forbidden_ids.copy_(ids[:, MAX_BIASES:])
        self._biases.copy_(self._upload(biases))

    def _upload(self, values: numpy.ndarray) -> torch.Tensor:
        return upload(torch.from_numpy(values), self._device)
