"""Offline throughput on GPUs: many requests of mixed lengths handed over at once, continuous batching, output tokens a second.

Prompts have PROMPT/2 to 3/2 PROMPT tokens and answers OUTPUT/2 to 3/2 OUTPUT, drawn once and for all: the default load is, row by
row, the one that vLLM was timed with. Greedy, no end before the last token, no reuse of prefixes, random weights. The time is
that of the whole call: it holds the filling of the batch and its draining, and the text of the answers (vLLM's does not).

Drift is the fastest of the tenths of the run over the slowest, the first two and the last two left out, where the batch fills and
drains. A tenth is a tenth of the output tokens. Start it with torchrun for TP above 1.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click

from engine.api import Engine
from engine.bench.load import (
    MAX_BATCH,
    VLLM,
    Case,
    describe_case,
    device_name,
    engine_options,
    errors_in_one_line,
    has_peer,
    open_engine,
    refuse_cpu_record,
    run_once,
)
from engine.bench.records import Record, commit
from engine.bench.roof import floor_s, num_operations, token_bytes, weight_bytes
from engine.loading import Blueprint
from engine.run_stats import RunStats
from engine.scheduler import ScheduledRow
from launch.environment import Environment

# vLLM's output and total tokens a second: by (model, tp, dtype, requests, prompt, output).
VLLM_TOK_S = {
    ("qwen2.5-7b", 1, "bf16", 1024, 512, 128): {"output_tok_s": 6927.0, "total_tok_s": 34161.0},
    ("qwen2.5-0.5b", 1, "bf16", 2048, 512, 128): {"output_tok_s": 16624.0},
}
SEED, WARM_UP_REQUESTS = 0, 16
FIRST_ID, END_ID = 100, 150_000  # token ids of the prompts
TENTHS = 10
STEADY = slice(2, 8)


@dataclass(frozen=True)
class Requests:
    """`prompts`, and how many tokens each answer has."""

    prompts: tuple[list[int], ...]
    outputs: tuple[int, ...]

    @classmethod
    def draw(cls, rng: random.Random, count: int, prompt: int, output: int, vocab: int) -> Requests:
        """`count` requests with ids below `vocab`; means of `prompt` and `output` tokens, each at least 2."""
        end = min(END_ID, vocab)
        prompts = tuple(
            [rng.randrange(FIRST_ID, end) for _ in range(rng.randrange(prompt // 2, prompt * 3 // 2))] for _ in range(count)
        )
        return cls(prompts, tuple(rng.randrange(output // 2, output * 3 // 2) for _ in range(count)))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.outputs)


@dataclass
class TokenLog(RunStats):
    """`marks`: after every step, the time and the output tokens so far."""

    marks: list[tuple[float, int]] = field(default_factory=list)

    def add_step(self, rows: list[ScheduledRow], seconds: float, num_extra: int = 0, is_waited: bool = True) -> None:
        super().add_step(rows, seconds, num_extra, is_waited)
        self._mark(sum(row.is_sampled for row in rows) + num_extra)

    def add_burst_step(self, num_tokens: int, seconds: float) -> None:
        super().add_burst_step(num_tokens, seconds)
        self._mark(num_tokens)

    def _mark(self, num_tokens: int) -> None:
        self.marks.append((time.perf_counter(), num_tokens + (self.marks[-1][1] if self.marks else 0)))


@dataclass(frozen=True)
class Timing:
    """`seconds` of the whole run; `tenths_tok_s`: output tokens a second in each tenth."""

    seconds: float
    tenths_tok_s: tuple[float, ...]

    @property
    def drift_percent(self) -> float:
        steady = self.tenths_tok_s[STEADY]
        return 100 * (max(steady) / min(steady) - 1)


def tenths_tok_s(started: float, marks: Sequence[tuple[float, int]]) -> tuple[float, ...]:
    """Rates of ten parts with equal numbers of tokens; a step that is in two of them is shared out in proportion."""
    times, counts = [started, *(at for at, _ in marks)], [0, *(count for _, count in marks)]

    def time_of(tokens: float) -> float:
        i = bisect_left(counts, tokens)
        share = (tokens - counts[i - 1]) / (counts[i] - counts[i - 1])
        return times[i - 1] + share * (times[i] - times[i - 1])

    ends = [started, *(time_of(counts[-1] * k / TENTHS) for k in range(1, TENTHS + 1))]
    return tuple(counts[-1] / TENTHS / (end - begin) for begin, end in zip(ends, ends[1:]))


def time_throughput(engine: Engine, warm_up: Requests, requests: Requests) -> Timing:
    """One run, after that of `warm_up`. *Collective*; the times are rank 0's, the other ranks have no tenths."""
    run_once(engine, warm_up.prompts, warm_up.outputs)
    log, started = TokenLog(), time.perf_counter()
    seconds = run_once(engine, requests.prompts, requests.outputs, log).seconds
    return Timing(seconds, tenths_tok_s(started, log.marks) if log.marks else ())


def throughput_floor_s(case: Case, requests: Requests, blueprint: Blueprint) -> float:
    """Seconds at the least: all tokens but the last of each row are computed, every output token needs the head; a step, of at
    most `case.batch` rows with one output token each, reads the weights once, and the keys and values of rows that decode."""
    lengths = [len(prompt) + output - 1 for prompt, output in zip(requests.prompts, requests.outputs)]
    operations = num_operations(blueprint.config, lengths, requests.output_tokens)
    num_steps = max(-(-requests.output_tokens // case.batch), max(requests.outputs))
    num_read = sum(sum(range(len(prompt) + 1, length + 1)) for prompt, length in zip(requests.prompts, lengths))
    num_bytes = num_steps * weight_bytes(case, blueprint) + num_read * token_bytes(case, blueprint)
    return floor_s(case, operations, num_bytes)


def make_record(case: Case, requests: Requests, timing: Timing, floor: float, backend: str, comm: str) -> Record:
    """The record of a case on GPUs. `floor`: seconds."""
    num_output, num_total = requests.output_tokens, requests.output_tokens + requests.prompt_tokens
    count = len(requests.outputs)
    metrics = {
        "output_tok_s": num_output / timing.seconds,
        "total_tok_s": num_total / timing.seconds,
        "seconds": timing.seconds,
        "drift_percent": timing.drift_percent,
    }
    metrics |= {f"tenth_{index}_tok_s": rate for index, rate in enumerate(timing.tenths_tok_s, 1)}
    ceiling = {"output_tok_s": num_output / floor, "total_tok_s": num_total / floor, "seconds": floor}
    peer: dict[str, object] = {}
    rates = VLLM_TOK_S.get((case.model, case.tp, case.dtype, count, case.prompt, case.output))
    if rates is not None and has_peer(case, comm):
        peer = {"name": VLLM, **rates}
    whole = {**vars(case), "requests": count, "backend": backend, "comm": comm}
    return Record("throughput", whole, metrics, ceiling, peer, checked=True)


def describe(record: Record, requests: Requests) -> list[str]:
    """What a person wants to know of it."""
    metrics, ceiling, count = record.metrics, record.ceiling, len(requests.outputs)
    peer = f"; {record.peer['name']}: {record.peer['output_tok_s']:.0f}" if record.peer else ""
    tenths = " ".join(f"{metrics[f'tenth_{k}_tok_s']:.0f}" for k in range(1, TENTHS + 1))
    return [
        f"{describe_case(record.case)} on average",
        f"  load      {count} requests, {requests.prompt_tokens} tokens in (mean {requests.prompt_tokens / count:.0f}) and "
        f"{requests.output_tokens} out (mean {requests.output_tokens / count:.0f}), in {metrics['seconds']:.2f} s",
        f"  output    {metrics['output_tok_s']:.0f} tok/s of {ceiling['output_tok_s']:.0f}{peer}",
        f"  total     {metrics['total_tok_s']:.0f} tok/s of {ceiling['total_tok_s']:.0f}",
        f"  tenths    {tenths} output tok/s; drift {metrics['drift_percent']:.1f} % between the third and the eighth",
    ]


@click.command()
@engine_options
@click.option("--requests", "count", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=MAX_BATCH, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a prompt, on average.")
@click.option("--output", type=click.IntRange(2), default=128, show_default=True, help="Tokens of an answer, on average.")
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, count: int, batch: int,
    prompt: int, output: int,
) -> None:  # fmt: skip
    """Time a batch of requests on all ranks of this world; fails if any answer has not exactly the tokens asked for."""
    refuse_cpu_record(record, device)
    commit()
    environment = Environment.read()
    case = Case.here(model, device, dtype, batch, prompt, output, shard_of)
    longest = {"max_model_len": prompt * 3 // 2 + output * 3 // 2, "max_step_tokens": None}  # None: the engine's own choice
    with errors_in_one_line(), open_engine(case, model, device, shard_of, eager, **longest) as engine:
        rng, vocab = random.Random(SEED), engine.blueprint.config.full_vocab
        warm_up, requests = (Requests.draw(rng, n, prompt, output, vocab) for n in (WARM_UP_REQUESTS, count))
        timing = time_throughput(engine, warm_up, requests)
        floor, backend, comm = throughput_floor_s(case, requests, engine.blueprint), engine.backend, engine.comm.name
    if environment.rank != 0:
        return
    if device == "cpu":
        click.echo(f"{requests.output_tokens / timing.seconds:.1f} output tok/s of {count} requests")
        return
    result = make_record(case, requests, timing, floor, backend, comm)
    click.echo("\n".join(describe(result, requests)))
    if record is not None:
        result.append_to(record, device_name(shard_of), "engine.bench.throughput", environment.world_size)


if __name__ == "__main__":
    main()
