"""The law of the tokens that steps with drafts give, held against the model's own, worked out in fp64.

Rows of one prompt and one set of options differ in nothing but their noise, so the first `LENGTH` tokens of many of them are
draws from one law over whole texts. Whole texts, because a fault of acceptance may leave each place's own law alone: noise that
two places share makes the second token depend on the first, and shows only there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from comm.vocabulary import DrawOptions
from engine.graph.operators import Operators
from engine.graph.row_state import DeviceRows
from engine.graph.step import BurstBackend
from engine.sampler import stream_key
from engine.sequence import Sequence
from engine.token_rules import TokenRules
from tests.cpu.tiny import make_model

NUM_IDS, LENGTH, NUM_DRAFTS = 8, 3, 3
PROMPT = 5
LEAST_EXPECTED = 5.0  # of a cell: below, the statistic is not distributed as chi-square
Text = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """Sampling options of a row."""

    temperature: float = 1.0
    rules: TokenRules = field(default_factory=TokenRules)


BIAS = ((1, 1.5), (4, -2.0))
PLAIN = {"temperature 1": Kind(), "temperature 0.6": Kind(0.6)}
FILTERED = {
    "top_k": Kind(rules=TokenRules(top_k=3)),
    "top_p": Kind(rules=TokenRules(top_p=0.7)),
    "min_p": Kind(rules=TokenRules(min_p=0.25)),
    "bias": Kind(rules=TokenRules(logit_bias=BIAS)),
    "min_tokens": Kind(rules=TokenRules(min_tokens=2, forbidden_ids=(2, 3, 6))),
    "hot, top_k, top_p": Kind(1.4, TokenRules(top_k=5, top_p=0.85)),
    "cold, top_p, min_p": Kind(0.8, TokenRules(top_p=0.95, min_p=0.1)),
    "all": Kind(1.2, TokenRules(top_k=6, top_p=0.93, min_p=0.04, logit_bias=BIAS, min_tokens=1, forbidden_ids=(3,))),
}


def make_pair(**shape: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target over `NUM_IDS` ids, none of which is certain, and a draft that often says the same but has another law."""
    # A logit's variance grows with the width: scaled, so that laws are as flat whatever the shape.
    target, draft = (make_model("qwen2", seed=3, vocab_size=NUM_IDS, **shape) for _ in range(2))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
        for model in (target, draft):
            model.lm_head.weight *= 8 / math.sqrt(model.config.hidden_size)
    return target, draft


@torch.no_grad()
def law_of(model: PreTrainedModel, kind: Kind) -> dict[Text, float]:
    """The probability of each text of `LENGTH` ids behind `PROMPT`; those of probability zero are not there. `model`: fp64."""
    law: dict[Text, float] = {(): 1.0}
    for num_output in range(LENGTH):
        texts = list(law)
        logits = model(torch.tensor([[PROMPT, *text] for text in texts])).logits[:, -1].tolist()
        laws = [filtered(row, kind.temperature, kind.rules, num_output) for row in logits]
        law = {
            (*text, token_id): law[text] * p
            for text, row in zip(texts, laws) for token_id, p in enumerate(row) if p > 0
        }  # fmt: skip
    return law


def filtered(logits: list[float], temperature: float, rules: TokenRules, num_output: int) -> list[float]:
    """The law that sampling options make of a row's logits, written out anew, without penalties. `num_output`: tokens before."""
    bias, num_ids = dict(rules.logit_bias), len(logits)
    logits = [value + bias.get(token_id, 0.0) for token_id, value in enumerate(logits)]
    if num_output < rules.min_tokens:
        logits = [-math.inf if token_id in rules.forbidden_ids else value for token_id, value in enumerate(logits)]
    highest = max(logits)
    weights = [math.exp((value - highest) / temperature) for value in logits]
    order = sorted(range(num_ids), key=lambda token_id: (-weights[token_id], token_id))[: rules.top_k or num_ids]
    total, before, kept = sum(weights[token_id] for token_id in order), 0.0, []
    for token_id in order:
        if before < rules.top_p * total and weights[token_id] >= rules.min_p:
            kept.append(token_id)
        before += weights[token_id]
    mass = sum(weights[token_id] for token_id in kept)
    return [weights[token_id] / mass if token_id in kept else 0.0 for token_id in range(num_ids)]


@torch.inference_mode()
def count_texts(
    backend: BurstBackend, kinds: Mapping[str, Kind], num_rows: int, num_texts: int
) -> tuple[dict[str, Counter], float]:
    """How often rows of each of `kinds` said what, at least `num_texts` texts each, and the share of the drafts that held.

    Every burst has up to `num_rows` rows, of all kinds side by side. The noise is that of the rows' numbers: the same each time.
    """
    counts: dict[str, Counter] = {name: Counter() for name in kinds}
    names = [name for _ in range(num_rows // len(kinds)) for name in kinds]
    num_held = num_steps = 0
    for burst_idx in range(-(-num_texts * len(kinds) // len(names))):
        sequences = [
            Sequence(
                row, [PROMPT], 1, 1 + LENGTH * (NUM_DRAFTS + 1), pages=[row], temperature=kinds[name].temperature,
                stream_key=stream_key(burst_idx, row, 0), rules=kinds[name].rules,
            )
            for row, name in enumerate(names)
        ]  # fmt: skip
        burst = backend.begin(sequences, NUM_DRAFTS)
        backend.launch(burst, LENGTH)
        said: list[list[int]] = [[] for _ in names]
        for _ in range(LENGTH):
            for text, token_ids in zip(said, backend.read(burst)):
                text += token_ids
                num_held += len(token_ids) - 1
                num_steps += 1
        backend.end(burst)
        for name, text in zip(names, said):
            counts[name][tuple(text[:LENGTH])] += 1
    return counts, num_held / (num_steps * NUM_DRAFTS)


def chi_square(counts: Mapping[Text, int], law: Mapping[Text, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare texts share a cell. Infinite if there is a text that the law has not."""
    number = sum(counts.values())
    if any(text not in law for text in counts):
        return math.inf, len(law)
    cells = [(counts.get(text, 0), number * p) for text, p in law.items()]
    rare = [cell for cell in cells if cell[1] < LEAST_EXPECTED]
    cells = [cell for cell in cells if cell[1] >= LEAST_EXPECTED]
    if sum(expected for _, expected in rare) >= LEAST_EXPECTED:
        cells.append((sum(count for count, _ in rare), sum(expected for _, expected in rare)))
    return sum((count - expected) ** 2 / expected for count, expected in cells), len(cells) - 1


def limit_of(freedom: int) -> float:
    """The 99.9 % point of chi-square, by Wilson and Hilferty. The rows' noise is fixed: what is below it once stays below."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def excess(counts: Mapping[Text, int], law: Mapping[Text, float]) -> float:
    """The statistic over its limit: above 1 the tokens have another law."""
    statistic, freedom = chi_square(counts, law)
    assert freedom > 0, "a law of one text shows nothing"
    return statistic / limit_of(freedom)


def take_every_draft(operators: Operators) -> None:
    """Drafts hold whatever the model chose, so the tokens have the draft's law. Wrong, as are the next two."""
    accept = operators.accept

    def accept_all(rows, history, drafts, ids, values):
        taken = torch.cat((drafts, ids.view(len(rows), -1)[:, -1:]), 1)
        accept(rows, history, drafts, taken.flatten(), values)

    operators.accept = accept_all


def share_noise(operators: Operators) -> None:
    """All places of a row's step draw with the noise of the first: each has its own law, but not beside the others."""

    def first_noise(rows: DeviceRows) -> DeviceRows:
        return replace(rows, draw=DrawOptions(rows.draw.temperatures, rows.draw.starts, _first_places(rows)))

    _choose_by(operators, first_noise)


def filter_by_first_place(operators: Operators) -> None:
    """All places of a row's step are filtered as the first: a minimum length holds too long."""
    _choose_by(operators, lambda rows: replace(rows, positions=_first_places(rows)))


def _choose_by(operators: Operators, change: Callable[[DeviceRows], DeviceRows]) -> None:
    choose = operators.choose
    operators.choose = lambda rows, logits: choose(change(rows), logits)


def _first_places(rows: DeviceRows) -> torch.Tensor:
    return rows.positions.view(-1, NUM_DRAFTS + 1)[:, :1].expand(-1, NUM_DRAFTS + 1).flatten()


# Acceptance that is wrong, and of which rows the texts then are.
BROKEN = {
    take_every_draft: ("temperature 1", "temperature 0.6"),
    share_noise: ("temperature 1", "temperature 0.6"),
    filter_by_first_place: ("min_tokens",),
}


def all_laws(model: PreTrainedModel) -> dict[str, dict[Text, float]]:
    """By name of `PLAIN` and `FILTERED`. `model` becomes fp64."""
    model.double()
    laws = {name: law_of(model, kind) for name, kind in (PLAIN | FILTERED).items()}
    assert all(abs(sum(law.values()) - 1) < 1e-9 for law in laws.values())
    return laws
