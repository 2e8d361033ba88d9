"""Prefill on GPUs, through the engine as a user gets it: ms to the first token of every row, beside what the work must cost.

BATCH random prompts of PROMPT tokens are handed over at once, greedy, with one token each; TTFT is the time of the whole call,
on rank 0, until all rows have their token. Random weights, no reuse of prefixes. Short prompts are bound by the reading of the
weights, longer ones by multiplications: the floor is the larger of the two. vLLM was timed in the same way. Host syncs are those
of the prompts and 128 tokens a row more, counted in a run that is not timed. What is timed are calls whose like has come before:
the first ones choose library kernels, capture a graph, and plan cuDNN's attention; the output says where that attends.

Start it with torchrun for TP above 1. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    make_prompts,
    open_engine,
    refuse_cpu_record,
    run_once,
)
from engine.bench.records import Record, commit
from engine.bench.roof import DATASHEET_TB_S, DATASHEET_TFLOP_S, floor_s, num_operations, weight_bytes
from engine.loading import Blueprint
from engine.profile.host_syncs import count_host_syncs
from engine.settings import EngineSettings
from kernels.fp8_linear import WAYS
from launch.environment import Environment

# vLLM's time to the first token in ms: by (model, tp, dtype, batch), then by prompt.
VLLM_TTFT_MS = {
    ("qwen2.5-0.5b", 1, "bf16", 1): {128: 30.9, 512: 24.0, 2048: 18.7},
    ("qwen2.5-7b", 1, "bf16", 1): {128: 30.4, 512: 25.5, 2048: 48.9},
    ("qwen2.5-7b", 1, "fp8", 1): {128: 29.1, 512: 26.9, 2048: 34.4},
    ("qwen2.5-7b", 1, "bf16", 32): {512: 360.0},
    ("qwen2.5-72b", 2, "bf16", 1): {128: 65.9, 512: 94.3, 2048: 251.9},
    ("qwen2.5-72b", 2, "fp8", 1): {128: 100.1, 512: 102.7, 2048: 153.0},
}
DEFAULT_WAYS = {name: getattr(EngineSettings(""), name) for name in ("graph_tokens", "fp8_products")}
# The first call of a shape chooses its library kernels; the second captures its graph, and has cuDNN plan its attention.
WARM_UPS = 2
SYNC_TOKENS = 128  # a row, behind the first: what a request is taken to be where its host syncs are counted


@dataclass(frozen=True)
class Timing:
    """`ttft_ms` of each repeat; `num_syncs` of the host with the device in one call of `SYNC_TOKENS` tokens more, None if they
    were not counted."""

    ttft_ms: tuple[float, ...]
    num_syncs: int | None

    def percentile(self, percent: int) -> float:
        """Of the repeats, in ms, between neighbours in proportion."""
        if len(self.ttft_ms) == 1:
            return self.ttft_ms[0]
        return statistics.quantiles(self.ttft_ms, n=100, method="inclusive")[percent - 1]


def time_prefill(engine: Engine, case: Case, repeats: int) -> Timing:
    """Every repeat has prompts of its own. *Collective*; times and counts are rank 0's. The engine has room for `SYNC_TOKENS`."""

    def run(seed: int, num_tokens: int = 1) -> float:
        prompts = make_prompts(case, engine.blueprint.config.full_vocab, seed)
        return 1e3 * run_once(engine, prompts, [num_tokens] * case.batch).seconds

    for seed in range(WARM_UPS):
        run(seed)
    num_syncs = count_host_syncs(lambda: run(WARM_UPS, 1 + SYNC_TOKENS))
    return Timing(tuple(run(WARM_UPS + 1 + repeat) for repeat in range(repeats)), num_syncs)


def prefill_floor_s(case: Case, blueprint: Blueprint) -> float:
    """Seconds at the least: the weights are read once, and every row asks for the logits of one token."""
    lengths: Sequence[int] = [case.prompt] * case.batch
    return floor_s(case, num_operations(blueprint.config, lengths, case.batch), weight_bytes(case, blueprint))


def make_record(
    case: Case,
    timing: Timing,
    floor: float,
    backend: str,
    comm: str,
    step: str,
    ways: Mapping[str, object] = DEFAULT_WAYS,
) -> Record:
    """The record of a case on GPUs. `floor`: seconds; `step`: of `Engine.prefill_step`; `ways`: settings, of which the case has
    those that are not the default."""
    others = {name: value for name, value in ways.items() if value != DEFAULT_WAYS[name]}
    known = {**vars(case), "backend": backend, "comm": comm, "step": step, **others}
    ttft_ms, num_tokens = timing.percentile(50), case.batch * case.prompt
    metrics = {
        "ttft_ms": ttft_ms,
        "ttft_p10_ms": timing.percentile(10),
        "ttft_p90_ms": timing.percentile(90),
        "prefill_tok_s": 1e3 * num_tokens / ttft_ms,
    }
    if timing.num_syncs is not None:
        metrics["host_syncs_per_request"] = timing.num_syncs / case.batch
    peer: dict[str, object] = {}
    peer_ms = VLLM_TTFT_MS.get((case.model, case.tp, case.dtype, case.batch), {}).get(case.prompt)
    if peer_ms is not None and has_peer(case, comm):
        peer = {"name": VLLM, "ttft_ms": peer_ms, "prefill_tok_s": round(1e3 * num_tokens / peer_ms, 1)}
    ceiling = {"ttft_ms": 1e3 * floor, "prefill_tok_s": num_tokens / floor}
    return Record("prefill", known, metrics, ceiling, peer, checked=True)


def describe(record: Record, attention: str | None = None) -> list[str]:
    """What a person wants to know of it. `attention`: of `Engine.prefill_attention`."""
    metrics, ceiling = record.metrics, record.ceiling
    peer = f"; {record.peer['name']}: {record.peer['ttft_ms']} ms" if record.peer else ""
    syncs = metrics.get("host_syncs_per_request")
    rates = f"{DATASHEET_TFLOP_S[record.case['dtype']]:.0f} TFLOP/s and {DATASHEET_TB_S} TB/s"
    return [
        describe_case(record.case),
        f"  step      {record.case['step']}" + (f", attention by {attention}" if attention else ""),
        f"  TTFT      {metrics['ttft_ms']:.2f} ms (p10 {metrics['ttft_p10_ms']:.2f}, p90 {metrics['ttft_p90_ms']:.2f}), "
        f"floor {ceiling['ttft_ms']:.2f} at {rates}{peer}",
        f"  prefill   {metrics['prefill_tok_s']:.0f} tok/s of {ceiling['prefill_tok_s']:.0f}",
        f"  syncs     {'not counted' if syncs is None else f'{syncs:.1f} of the host a request of {SYNC_TOKENS} tokens more'}",
    ]


@click.command()
@engine_options
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, help="Rows handed over at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--graph-tokens", type=click.IntRange(0),
              help="The longest prompt that takes a graph; 0 for none; as the engine chooses if not given.")
@click.option("--fp8-products", type=click.Choice(WAYS), default="scaled", show_default=True,
              help="How many rows meet FP8 matrices.")
@click.option("--repeats", type=click.IntRange(1), default=21, show_default=True)
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, batch: int, prompt: int,
    graph_tokens: int | None, fp8_products: str, repeats: int,
) -> None:  # fmt: skip
    """Time the first tokens of one case on all ranks of this world."""
    refuse_cpu_record(record, device)
    commit()
    environment = Environment.read()
    case = Case.here(model, device, dtype, batch, prompt, 1, shard_of)
    ways = {"graph_tokens": graph_tokens, "fp8_products": fp8_products}
    sizes = {"max_model_len": prompt + 1 + SYNC_TOKENS, **ways}
    with errors_in_one_line(), open_engine(case, model, device, shard_of, eager, **sizes) as engine:
        timing = time_prefill(engine, case, repeats)
        floor, backend, comm = prefill_floor_s(case, engine.blueprint), engine.backend, engine.comm.name
        step, attention = engine.prefill_step(batch, prompt), engine.prefill_attention(batch, prompt)
    if environment.rank != 0:
        return
    if device == "cpu":
        click.echo(f"{timing.percentile(50):.3f} ms to the first token of {batch} rows")
        return
    result = make_record(case, timing, floor, backend, comm, step, ways)
    click.echo("\n".join(describe(result, attention)))
    if record is not None:
        result.append_to(record, device_name(shard_of), "engine.bench.prefill", environment.world_size)


if __name__ == "__main__":
    main()
