"""A long run on GPUs: 1,000 prompts through a full batch, the rate of each hundred, and equal tokens on all ranks at every step.

A hundred is a tenth of all prompts, in the order in which they end. To be compared, tenths hold equal work: each has the same
lengths in the same order and other tokens, and the batch is full throughout, because one more tenth runs before the first and one
after the last. Answers have multiples of 16 tokens, so that rows end together and new ones begin together: where that falls at
random, tenths differ by several percent in the number of steps that hold a prefill, on a machine that does not drift at all.
Prompts are of any length.

Each rank hashes the tokens that its own device chose, step by step, and the hashes are compared after the run. Greedy, random
weights. Start it with torchrun; ranks that share a GPU need MPS.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import click

from engine.api import Engine
from engine.bench.load import (
    MAX_BATCH,
    MAX_STEP_TOKENS,
    Case,
    describe_case,
    device_name,
    engine_options,
    errors_in_one_line,
    open_engine,
    refuse_cpu_record,
    run_once,
)
from engine.bench.records import Record, commit
from engine.bench.throughput import FIRST_ID, SEED, TENTHS, Requests, TokenLog, throughput_floor_s
from engine.bench.token_hashes import TokenHashes
from engine.graph.prefill import PrefillStep
from launch.environment import Environment

DRIFT_LIMIT_PERCENT = 2.0
STRIDE = 16  # tokens between the lengths of answers
PARTS = TENTHS + 2  # one before, one after
# A run of the first parts is repeated until none of its steps was captured on the way, so that the run that counts holds few of
# these: each takes as long as ten steps.
WARM_UP_PARTS, MOST_WARM_UPS = 4, 6


def draw_parts(rng: random.Random, count: int, prompt: int, output: int, vocab: int) -> Requests:
    """`PARTS` times `count` requests, with means of `prompt` and `output` tokens: lengths drawn once, ids below `vocab` anew."""
    prompts = [rng.randrange(prompt // 2, prompt * 3 // 2) for _ in range(count)]
    least, most = max(1, output // 2 // STRIDE), max(1, output * 3 // 2 // STRIDE)
    outputs = [STRIDE * rng.randint(least, most) for _ in range(count)]
    drawn = tuple([rng.randrange(min(FIRST_ID, vocab // 2), vocab) for _ in range(length)] for length in prompts * PARTS)
    return Requests(drawn, tuple(outputs * PARTS))


@dataclass
class Finishes:
    """`marks`: of every answer, in order, when it was whole, and the output tokens and steps before the one that ended it."""

    log: TokenLog
    marks: list[tuple[float, int, int]] = field(default_factory=list)

    def note(self, index: int) -> None:
        tokens = self.log.marks[-1][1] if self.log.marks else 0
        self.marks.append((time.perf_counter(), tokens, self.log.num_steps))

    def tenths(self) -> tuple[Tenth, ...]:
        """Of all parts but the first and the last; none on ranks that see no answer end."""
        if not self.marks:
            return ()
        count = len(self.marks) // PARTS
        ends = [self.marks[count * part - 1] for part in range(1, PARTS)]
        return tuple(Tenth(*(b - a for a, b in zip(begin, end))) for begin, end in zip(ends, ends[1:]))


@dataclass(frozen=True)
class Tenth:
    """Between the ends of two answers, a tenth of all apart."""

    seconds: float
    tokens: int
    steps: int

    @property
    def tok_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Drift:
    """`num_hashed`: steps whose tokens were compared over the ranks; `stray`: as `TokenHashes.first_stray`."""

    tenths: tuple[Tenth, ...]
    num_hashed: int
    stray: tuple[int, list[int]] | None = None

    @property
    def tok_s(self) -> float:
        return sum(tenth.tokens for tenth in self.tenths) / sum(tenth.seconds for tenth in self.tenths)

    @property
    def drift_percent(self) -> float:
        rates = [tenth.tok_s for tenth in self.tenths]
        return 100 * (max(rates) / min(rates) - 1)


def warm_up(engine: Engine, requests: Requests) -> None:
    """*Collective*."""
    num_warm = WARM_UP_PARTS * len(requests.outputs) // PARTS
    for _ in range(MOST_WARM_UPS):
        before = num_captured(engine)
        run_once(engine, requests.prompts[:num_warm], requests.outputs[:num_warm])
        if num_captured(engine) == before:
            return


def num_captured(engine: Engine) -> int:
    """Shapes of steps that prefill by a graph."""
    backend = engine.replica.backend
    return backend.num_captured if isinstance(backend, PrefillStep) else 0


def run_long(engine: Engine, requests: Requests) -> Drift:
    """One run, of `draw_parts`. *Collective*; tenths and stray are rank 0's."""
    hashes = None if engine.replica.burst_backend is None else TokenHashes(engine.replica)
    finishes = Finishes(TokenLog())
    run_once(engine, requests.prompts, requests.outputs, finishes.log, finishes.note)
    if hashes is None:
        return Drift(finishes.tenths(), 0)
    stray = hashes.first_stray()
    return Drift(finishes.tenths(), len(hashes.hashes), stray)


def make_record(case: Case, requests: Requests, drift: Drift, floor_s: float, backend: str, comm: str) -> Record:
    """The record of a case on GPUs. `floor_s`: seconds of all `requests` at the least."""
    count = len(requests.outputs) // PARTS
    metrics = {"output_tok_s": drift.tok_s, "drift_percent": drift.drift_percent, "steps_compared": drift.num_hashed,
               "mismatches": 0 if drift.stray is None else 1}  # fmt: skip
    metrics |= {f"tenth_{index}_tok_s": tenth.tok_s for index, tenth in enumerate(drift.tenths, 1)}
    ceiling = {"output_tok_s": requests.output_tokens / floor_s, "drift_percent": DRIFT_LIMIT_PERCENT}
    whole = {**vars(case), "requests": count * TENTHS, "backend": backend, "comm": comm}
    return Record("drift", whole, metrics, ceiling, {}, checked=drift.stray is None)


def describe(drift: Drift, count: int, ranks: int) -> list[str]:
    """What a person wants to know of it. `count`: prompts a tenth."""
    rates, steps = ([f"{getattr(tenth, name):.0f}" for tenth in drift.tenths] for name in ("tok_s", "steps"))
    if drift.stray is not None:
        step, strayed = drift.stray
        hashes = f"DIFFERENT from step {step} on, on ranks {', '.join(map(str, strayed))}"
    else:
        hashes = f"equal on {ranks} ranks at each of {drift.num_hashed} steps" if drift.num_hashed else "none: no bursts"
    return [
        f"  output    {drift.tok_s:.0f} tok/s over {count * TENTHS} prompts; drift {drift.drift_percent:.2f} % "
        f"of at most {DRIFT_LIMIT_PERCENT:g}",
        f"  tenths    {' '.join(rates)} tok/s, of {count} prompts each",
        f"  steps     {' '.join(steps)}",
        f"  tokens    {hashes}",
    ]


@click.command()
@engine_options
@click.option("--requests", "count", type=click.IntRange(10), default=1000, show_default=True, help="Prompts, a multiple of 10.")
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=32, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(2), default=128, show_default=True, help="Tokens of a prompt, on average.")
@click.option("--output", type=click.IntRange(STRIDE), default=128, show_default=True, help="Tokens of an answer, on average.")
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, count: int, batch: int,
    prompt: int, output: int,
) -> None:  # fmt: skip
    """Run many prompts on all ranks of this world; ends with exit code 1 if ranks chose other tokens."""
    refuse_cpu_record(record, device)
    if count % TENTHS or count < TENTHS * batch:
        raise click.UsageError(f"--requests must be a multiple of {TENTHS}, and a tenth no less than --batch; {count} is not")
    commit()
    environment = Environment.read()
    case = Case.here(model, device, dtype, batch, prompt, output, shard_of)
    longest = prompt * 3 // 2
    # All rows that begin together are to prefill in one step.
    settings = {"max_model_len": longest + max(STRIDE, output * 3 // 2), "max_step_tokens": min(MAX_STEP_TOKENS, batch * longest)}
    with errors_in_one_line(), open_engine(case, model, device, shard_of, eager, **settings) as engine:
        rng, vocab = random.Random(SEED), engine.blueprint.config.full_vocab
        requests = draw_parts(rng, count // TENTHS, prompt, output, vocab)
        warm_up(engine, requests)
        drift = run_long(engine, requests)
        floor, backend, comm = throughput_floor_s(case, requests, engine.blueprint), engine.backend, engine.comm.name
    if environment.rank != 0:
        return
    result = make_record(case, requests, drift, floor, backend, comm)
    click.echo(describe_case(result.case) + " on average")
    click.echo("\n".join(describe(drift, count // TENTHS, environment.world_size)))
    if record is not None:
        result.append_to(record, device_name(shard_of), "engine.bench.drift", environment.world_size)
    if drift.stray is not None:
        sys.exit("error: the ranks chose different tokens")


if __name__ == "__main__":
    main()
