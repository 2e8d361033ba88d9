"""Speculation under a load that keeps the batch full: up to how many rows it pays.

All requests are there at the start, and a row that ends makes room for the next. Prompts have PROMPT tokens and answers OUTPUT/2
to 3/2 OUTPUT, so rows end apart with drafts and without. The rate is that of the steady part, the third to the eighth tenth of
the output tokens: with three requests a row or more, the batch has been filled before it, and the last request is in after it. It
holds the prefill of new prompts, by the draft model too, and what it costs that a row's end ends a burst. Each load runs once
before it is timed, so that all shapes of steps have come that it has. Of the answers only the lengths are checked.
"""

from __future__ import annotations

import random

from engine.bench.drafted import DraftSource, LoadTiming, Trial
from engine.bench.load import Case, describe_case
from engine.bench.records import Record
from engine.bench.throughput import FIRST_ID, SEED, Requests

MIN_REFILLS = 3  # requests a row; when the last one is in, half of one a row is left: less than two tenths of the tokens
WITHOUT = "without drafts"


def draw_load(case: Case, refills: int, vocab: int) -> Requests:
    """`refills` requests for each row of the batch, with ids below `vocab`; the same every time."""
    rng, count = random.Random(SEED), refills * case.batch
    prompts = tuple([rng.randrange(FIRST_ID, vocab) for _ in range(case.prompt)] for _ in range(count))
    return Requests(prompts, tuple(rng.randrange(case.output // 2, case.output * 3 // 2) for _ in range(count)))


def make_load_record(
    case: Case, requests: Requests, source: DraftSource, trial: Trial, timing: LoadTiming, plain: LoadTiming, backend: str,
    comm: str,
) -> Record:  # fmt: skip
    """The plain rate is the peer's."""
    stats = timing.stats
    metrics = {
        "output_tok_s": timing.output_tok_s,
        "speedup": timing.output_tok_s / plain.output_tok_s,
        "acceptance": stats.acceptance,
        "tokens_per_step": stats.tokens_per_step,
    }
    whole = {**vars(case), "requests": len(requests.outputs), **source.case_of(trial), "backend": backend, "comm": comm}
    return Record("speculate", whole, metrics, {}, {"name": WITHOUT, "output_tok_s": plain.output_tok_s}, checked=True)


def describe_load(record: Record) -> list[str]:
    """What a person wants to know of it."""
    case, metrics = record.case, record.metrics
    return [
        f"{describe_case(case)} on average, {case['requests']} requests, draft {case['draft']} (placement {case['placement']}), "
        f"{case['num_drafts']} drafts right at {case['rate']}",
        f"  output    {metrics['output_tok_s']:.0f} tok/s, {record.peer['output_tok_s']:.0f} without: {metrics['speedup']:.2f} x",
        f"  accepted  {100 * metrics['acceptance']:.1f} %, {metrics['tokens_per_step']:.2f} tokens a step and row",
    ]
