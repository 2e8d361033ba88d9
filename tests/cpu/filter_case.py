"""Random rows with random sampling options, for the sampler and for the filters of the device."""

from __future__ import annotations

import random

import torch

from comm.vocabulary import DrawOptions, local_best
from engine.graph.row_rules import RowRules
from engine.sampler import SamplerState, stream_key, stream_start
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.token_rules import TokenRules

CPU = torch.device("cpu")
OPTIONS = {
    "temperature": [0.0, 0.3, 1.0, 2.5],
    "top_k": [0, 0, 2, 7, 30, 10_000],
    "top_p": [1.0, 1.0, 0.95, 0.5, 0.05, 0.0],
    "min_p": [0.0, 0.0, 0.02, 0.5],
    "repetition_penalty": [1.0, 1.0, 1.3, 0.7],
    "presence_penalty": [0.0, 0.0, 0.8],
    "frequency_penalty": [0.0, 0.0, 0.6, -0.3],
    "min_tokens": [0, 0, 3, 9],
}


class Batch:
    """Random rows with random options: as the sampler takes them, and as the device does."""

    def __init__(self, seed: int, num_rows: int, vocab: int, is_tied: bool, device: torch.device = CPU):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.logits = torch.randn(num_rows, vocab, generator=generator) * rng.choice([0.1, 3.0, 12.0])
        if is_tied:
            self.logits = (self.logits * 2).round() / 2
        self.states, self.sequences = [], []
        for row in range(num_rows):
            options = {name: rng.choice(values) for name, values in OPTIONS.items()}
            biases = {rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 4]))}
            params = SamplingParams(**options, logit_bias=tuple(sorted(biases.items())))
            stops = tuple(sorted({rng.randrange(vocab) for _ in range(rng.choice([0, 3]))}))
            prompt, output = ([rng.randrange(vocab) for _ in range(rng.randint(1, 9))] for _ in range(2))
            state = SamplerState(params, stream_key(seed, row, 0), prompt, stops)
            for token_id in output:
                state.record(token_id)
            self.states.append(state)
            temperature = 0.0 if state.is_greedy else params.temperature
            rules = TokenRules.of(params, state.is_greedy, stops)
            computed = len(prompt) + len(output) - 1
            self.sequences.append(Sequence(row, prompt + output, len(prompt), 99, num_computed=computed,
                                           temperature=temperature, stream_key=state.stream_key, rules=rules))  # fmt: skip
        self.logits, self.device = self.logits.to(device), device
        self.token_ids = torch.tensor([sequence.token_ids[-1] for sequence in self.sequences], device=device)
        self.positions = torch.tensor([sequence.num_computed for sequence in self.sequences], device=device)
        temperatures = [sequence.temperature for sequence in self.sequences]
        self.temperatures = torch.tensor(temperatures, dtype=torch.float64, device=device)

    def operands(self):
        """Fresh ones at each call, for the counts change: logits with padding columns behind them, and the rest."""
        rules = RowRules(len(self.states), self.vocab, self.device)
        rules.begin(self.sequences)
        logits = torch.cat([self.logits, torch.full((len(self.states), 3), float("nan"), device=self.device)], 1)
        return logits, self.vocab, self.token_ids, self.positions, self.temperatures, rules.options(len(self.states))

    def drawn(self, filtered: torch.Tensor) -> list[int]:
        starts = [[stream_start(state.stream_key, state.num_output)] for state in self.states]
        starts = torch.tensor(starts, device=self.device)
        return local_best(filtered, 0, self.vocab, DrawOptions(self.temperatures, starts)).ids.tolist()
