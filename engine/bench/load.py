"""The load that a bench of the whole engine puts on it: the case, its prompts, the engine, and one run that is checked."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from engine.api import Engine
from engine.run_stats import RunStats
from launch.environment import Environment
from launch.errors import DoorbellError

DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp32": "float32"}
MAX_BATCH = 256
MAX_STEP_TOKENS = 32768  # a step's activations must fit beside the weights; longer prefills go in chunks
VLLM = "vLLM 0.26.0, CUDA graphs"  # the peer of these benches, on the same machines, weights random as well


@dataclass(frozen=True)
class Case:
    """What is measured. `tp`: ranks of the world, present or (`--shard-of`) not. `batch`: rows at once; `prompt`, `output`:
    tokens of a row."""

    model: str
    tp: int
    ranks_per_gpu: int
    dtype: str
    batch: int
    prompt: int
    output: int

    @classmethod
    def here(
        cls, model: str, device: str, dtype: str, batch: int, prompt: int, output: int, shard_of: int | None = None
    ) -> Case:
        """The case in the world that torchrun made of this process. `model`: a shape or a folder."""
        num_ranks, num_gpus = Environment.read().world_size, torch.cuda.device_count()
        ranks_per_gpu = -(-num_ranks // num_gpus) if device == "cuda" and num_gpus else 1
        return cls(Path(model).name, shard_of or num_ranks, ranks_per_gpu, dtype, batch, prompt, output)


@dataclass(frozen=True)
class Run:
    """`seconds` of one call of `Engine.generate`, the counts of its steps (rank 0's), and the tokens of each answer."""

    seconds: float
    stats: RunStats
    token_ids: list[tuple[int, ...]]


def make_prompts(case: Case, vocab: int, seed: int = 0) -> list[list[int]]:
    """Distinct random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(case.prompt)] for _ in range(case.batch)]


def run_once(
    engine: Engine,
    prompts: Sequence[list[int]],
    num_tokens: Sequence[int],
    stats: RunStats | None = None,
    on_done: Callable[[int], None] | None = None,
) -> Run:
    """Answer `prompts`, greedily, with exactly `num_tokens[i]` tokens each. `stats`: the counters to use instead of fresh ones.
    `on_done`: as `Engine.generate` takes it.

    *Collective*. *Raises* SystemExit if the engine gave other numbers of tokens.
    """
    engine.stats = RunStats() if stats is None else stats
    fixed = {"ignore_eos": True, "temperature": 0, "repetition_penalty": 1.0}
    params = [{"max_tokens": count, **fixed} for count in num_tokens]
    started = time.perf_counter()
    results = engine.generate(prompts, params, on_done=on_done)
    seconds = time.perf_counter() - started
    token_ids = [tuple(result.completions[0].token_ids) for result in results]
    found = [len(ids) for ids in token_ids]
    if len(found) != len(params):
        sys.exit(f"{len(params)} rows were asked for, and the engine gave {len(found)}")
    for row, (wanted, given) in enumerate(zip(num_tokens, found)):
        if given != wanted:
            sys.exit(f"row {row} was to have {wanted} tokens, and the engine gave {given}")
    return Run(seconds, engine.stats, token_ids)


def open_engine(
    case: Case, model: str, device: str, shard_of: int | None = None, is_eager: bool = False, **settings: object
) -> Engine:
    """The engine for `case`, with random weights. `model`: the shape or folder that the case names. `settings`: fields of
    `EngineSettings` that are to be other than the case implies.

    *Collective*. *Raises* `DoorbellError`.
    """
    implied = {
        "load_format": "dummy",
        "device": device,
        "dtype": DTYPES[case.dtype],
        "is_gpu_sharing": case.ranks_per_gpu > 1,
        "shard_of": shard_of,
        "max_batch": case.batch,
        "max_model_len": case.prompt + case.output,
        "max_step_tokens": min(MAX_STEP_TOKENS, case.batch * case.prompt),
        "is_prefix_reuse": False,
        "is_eager": is_eager,
    }
    return Engine(model, **{**implied, **settings})


def engine_options(command: Callable) -> Callable:
    """The options that all benches of the engine have: model, dtype, shard_of, eager, device, record."""
    options = (
        click.option("--model", default="qwen2.5-7b", show_default=True,
                     help="A shape, qwen2.5-0.5b to qwen2.5-72b, or a model folder."),
        click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True),
        click.option("--shard-of", type=click.IntRange(1),
                     help="Measure rank 0 of so many in one process, without communication."),
        click.option("--eager", is_flag=True, help="Plain torch steps instead of graphs."),
        click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: a dry run."),
        record_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def record_option(command: Callable) -> Callable:
    """`--record`, a path."""
    return click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the record to.")(command)


def refuse_cpu_record(record: Path | None, device: str) -> None:
    """*Raises* `click.UsageError` if a trial on a CPU is to be recorded."""
    if record is not None and device == "cpu":
        raise click.UsageError("--record keeps numbers of GPUs; a run with --device cpu is a trial")


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """End the process with the sentence and the exit code of a `DoorbellError` raised inside."""
    try:
        yield
    except DoorbellError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def device_name(shard_of: int | None = None) -> str:
    """The GPUs of this world, for a record."""
    num_gpus = 1 if shard_of else min(Environment.read().world_size, torch.cuda.device_count())
    return f"{num_gpus} x {torch.cuda.get_device_name()}"


def has_peer(case: Case, comm: str) -> bool:
    """Whether the case is one that others can run: all ranks present, each with a GPU of its own."""
    return case.ranks_per_gpu == 1 and comm != "loopback"


def describe_case(case: Mapping[str, object]) -> str:
    """The first line about a record's case, for people."""
    return (
        f"{case['model']} {case['dtype']}, TP={case['tp']} ({case['ranks_per_gpu']} a GPU, {case['comm']}), {case['backend']}; "
        f"batch {case['batch']}, prompts of {case['prompt']}, {case['output']} tokens each"
    )
