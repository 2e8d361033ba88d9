"""Decode on GPUs, through the engine as a user gets it: ms a token, the share of HBM's rate that this is, and host waits.

Random weights of a public shape, random prompts, greedy, no end before the last token. A decode step reads every weight once, so
at small batches its floor is bytes / bandwidth; what is left of it a layer is what kernels, handshakes and the host cost.

TPOT is (time of OUTPUT tokens - time of 1 token) / (OUTPUT - 1): prefill and decode never share a number. Start it with torchrun
for TP above 1. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from engine.api import Engine
from engine.bench.records import Record, commit
from engine.loading import Blueprint
from engine.loop import RunStats
from engine.memory import page_bytes
from engine.weights import shard_bytes
from launch.environment import Environment
from launch.errors import DoorbellError

DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp32": "float32"}
DATASHEET_TB_S, READ_TB_S = 4.8, 4.59  # H200's HBM as sold, and the fastest read measured on it (bulk copies)
MAX_STEP_TOKENS = 32768  # a step's activations must fit beside the weights; longer prefills go in chunks
VLLM = "vLLM 0.26.0, CUDA graphs"
# Its TPOT in ms on the same machines with 129 tokens: by (model, tp, dtype, batch), then by prompt.
VLLM_TPOT_MS = {
    ("qwen2.5-0.5b", 1, "bf16", 1): {128: 2.20, 512: 2.30, 2048: 1.91},
    ("qwen2.5-7b", 1, "bf16", 1): {128: 4.76, 512: 4.71, 2048: 4.74},
    ("qwen2.5-7b", 1, "fp8", 1): {128: 3.42, 512: 3.37, 2048: 3.41},
    ("qwen2.5-7b", 1, "bf16", 32): {512: 5.21},
    ("qwen2.5-72b", 2, "bf16", 1): {128: 20.13, 512: 20.01, 2048: 20.21},
    ("qwen2.5-72b", 2, "fp8", 1): {128: 13.03, 512: 13.02, 2048: 13.13},
}


@dataclass(frozen=True)
class Case:
    """What is measured. `tp`: ranks of the world, present or (`--shard-of`) not. `output`: tokens a row, at least 2."""

    model: str
    tp: int
    ranks_per_gpu: int
    dtype: str
    batch: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Reads:
    """Bytes that one decode step reads on one GPU: all weights but the embedding (a few rows of it), and keys and values at the
    mean length of the run."""

    weight_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, case: Case, blueprint: Blueprint) -> Reads:
        config, plan, dtype = blueprint.config, blueprint.plan, blueprint.dtype
        weights = shard_bytes(config, plan, dtype, blueprint.is_fp8)
        if not config.is_tied:
            weights -= plan.local_vocab * config.hidden_size * dtype.itemsize
        mean_tokens = case.batch * (case.prompt + case.output / 2)
        kv = int(mean_tokens * page_bytes(config, plan, dtype, page_size=1))
        return cls(case.ranks_per_gpu * weights, case.ranks_per_gpu * kv)

    @property
    def total(self) -> int:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True)
class Timing:
    """`tpot_ms` of a step; `num_waits` of the host for the device in the steps of a run after the first, None if unknown."""

    tpot_ms: float
    num_waits: int | None


def make_prompts(case: Case, vocab: int, seed: int = 0) -> list[list[int]]:
    """Distinct random prompts."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(case.prompt)] for _ in range(case.batch)]


def run_once(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> RunStats:
    """One run of `num_tokens` a row, from fresh counters. *Collective*. *Raises* SystemExit if it gave more or fewer tokens."""
    engine.stats = RunStats()
    params = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "repetition_penalty": 1.0}
    results = engine.generate(prompts, params)
    found = [len(result.completions[0].token_ids) for result in results]
    if found != [num_tokens] * len(prompts):
        sys.exit(f"{len(prompts)} rows of {num_tokens} tokens were asked for, and the engine gave {found}")
    return engine.stats


def time_decode(engine: Engine, case: Case, repeats: int) -> Timing:
    """The median of `repeats` after one warm-up. *Collective*; the times are rank 0's."""
    prompts = make_prompts(case, engine.blueprint.config.full_vocab)
    seconds: dict[int, list[float]] = {1: [], case.output: []}
    waits: dict[int, int | None] = {}
    for repeat in range(1 + repeats):
        for num_tokens, times in seconds.items():
            waits[num_tokens] = run_once(engine, prompts, num_tokens).num_waits
            if repeat > 0:
                times.append(engine.run_s)
    first, whole = (statistics.median(times) for times in seconds.values())
    num_waits = None if waits[case.output] is None else waits[case.output] - waits[1]
    return Timing(1e3 * (whole - first) / (case.output - 1), num_waits)


def make_record(case: Case, timing: Timing, reads: Reads, num_layers: int, backend: str, comm: str) -> Record:
    """The record of a case on GPUs. Waits and the residual are those of a step."""
    tpot_s, floor_s = timing.tpot_ms / 1e3, reads.total / (DATASHEET_TB_S * 1e12)
    metrics = {
        "tpot_ms": timing.tpot_ms,
        "decode_tok_s": case.batch / tpot_s,
        "hbm_tb_s": reads.total / tpot_s / 1e12,
        "layer_residual_us": 1e6 * (tpot_s - reads.weight_bytes / (READ_TB_S * 1e12)) / num_layers,
    }
    if timing.num_waits is not None:
        metrics["host_syncs_per_token"] = timing.num_waits / (case.output - 1)
    peer: dict[str, object] = {}
    tpot_ms = VLLM_TPOT_MS.get((case.model, case.tp, case.dtype, case.batch), {}).get(case.prompt)
    if tpot_ms is not None and case.ranks_per_gpu == 1 and comm != "loopback":
        peer = {"name": VLLM, "tpot_ms": tpot_ms, "decode_tok_s": round(1e3 * case.batch / tpot_ms, 1)}
    ceiling = {"tpot_ms": 1e3 * floor_s, "decode_tok_s": case.batch / floor_s, "hbm_tb_s": DATASHEET_TB_S}
    return Record("decode", {**vars(case), "backend": backend, "comm": comm}, metrics, ceiling, peer, checked=True)


def describe(record: Record, reads: Reads) -> list[str]:
    """What a person wants to know of it."""
    case, metrics, ceiling = record.case, record.metrics, record.ceiling
    peer = f"; {record.peer['name']}: {record.peer['tpot_ms']} ms" if record.peer else ""
    waits = metrics.get("host_syncs_per_token")
    return [
        f"{case['model']} {case['dtype']}, TP={case['tp']} ({case['ranks_per_gpu']} a GPU, {case['comm']}), {case['backend']}; "
        f"batch {case['batch']}, prompts of {case['prompt']}, {case['output']} tokens each",
        f"  TPOT      {metrics['tpot_ms']:.3f} ms, floor {ceiling['tpot_ms']:.3f} at {DATASHEET_TB_S} TB/s{peer}",
        f"  decode    {metrics['decode_tok_s']:.1f} tok/s of {ceiling['decode_tok_s']:.1f}",
        f"  HBM       {metrics['hbm_tb_s']:.2f} TB/s, {100 * metrics['hbm_tb_s'] / DATASHEET_TB_S:.0f} % of {DATASHEET_TB_S}: "
        f"{reads.weight_bytes / 1e9:.2f} GB of weights and {reads.kv_bytes / 1e9:.3f} GB of keys and values a step and GPU",
        f"  residual  {metrics['layer_residual_us']:.2f} us a layer beyond the weights at {READ_TB_S} TB/s",
        f"  waits     {'not counted' if waits is None else f'{waits:.3f} of the host a step'}",
    ]


def open_engine(case: Case, model: str, device: str, shard_of: int | None = None, is_eager: bool = False) -> Engine:
    """The engine for `case` with random weights. `model`: the shape or folder that the case names.

    *Collective*. *Raises* `DoorbellError`.
    """
    settings: dict[str, object] = {"is_eager": is_eager}
    return Engine(
        model,
        load_format="dummy",
        device=device,
        dtype=DTYPES[case.dtype],
        is_gpu_sharing=case.ranks_per_gpu > 1,
        shard_of=shard_of,
        max_batch=case.batch,
        max_model_len=case.prompt + case.output,
        max_step_tokens=min(MAX_STEP_TOKENS, case.batch * case.prompt),
        is_prefix_reuse=False,
        **settings,
    )


@click.command()
@click.option("--model", default="qwen2.5-7b", show_default=True, help="A shape, qwen2.5-0.5b to qwen2.5-72b, or a model folder.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--batch", type=click.IntRange(1, 256), default=1, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(2), default=129, show_default=True, help="Tokens of an answer.")
@click.option("--shard-of", type=click.IntRange(1), help="Measure rank 0 of so many in one process, without communication.")
@click.option("--eager", is_flag=True, help="Plain torch steps instead of graphs.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: a dry run.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the record to.")
def main(
    model: str, dtype: str, batch: int, prompt: int, output: int, shard_of: int | None, eager: bool, device: str, repeats: int,
    record: Path | None,
) -> None:  # fmt: skip
    """Time decode steps of one case on all ranks of this world."""
    if record is not None and device == "cpu":
        raise click.UsageError("--record keeps numbers of GPUs; a run with --device cpu is a trial")
    commit()
    environment = Environment.read()
    num_ranks, num_gpus = environment.world_size, torch.cuda.device_count()
    ranks_per_gpu = -(-num_ranks // num_gpus) if device == "cuda" and num_gpus else 1
    case = Case(Path(model).name, shard_of or num_ranks, ranks_per_gpu, dtype, batch, prompt, output)
    try:
        with open_engine(case, model, device, shard_of, eager) as engine:
            timing = time_decode(engine, case, repeats)
            blueprint, backend, comm = engine.blueprint, engine.backend, engine.comm.name
    except DoorbellError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    if environment.rank != 0:
        return
    if device == "cpu":
        click.echo(f"{timing.tpot_ms:.3f} ms a step of {batch} rows")
        return
    reads = Reads.of(case, blueprint)
    result = make_record(case, timing, reads, blueprint.config.num_layers, backend, comm)
    click.echo("\n".join(describe(result, reads)))
    if record is not None:
        gpus = 1 if shard_of else min(num_ranks, num_gpus)
        result.append_to(record, f"{gpus} x {torch.cuda.get_device_name()}", "engine.bench.decode", num_ranks)


if __name__ == "__main__":
    main()
