"""Decode on GPUs, through the engine as a user gets it: ms a token, the share of HBM's rate that this is, and host waits.

Random weights of a public shape, random prompts, greedy, no end before the last token. A decode step reads every weight once, so
at small batches its floor is bytes / bandwidth; what is left of it a layer is what kernels, handshakes and the host cost.

TPOT is (time of OUTPUT tokens - time of 1 token) / (OUTPUT - 1): prefill and decode never share a number. Start it with torchrun
for TP above 1. `--shard-of N` measures one rank of N without its peers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
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
from engine.bench.roof import DATASHEET_TB_S, READ_TB_S, Reads
from engine.profile.host_syncs import count_host_copies, count_host_syncs
from launch.environment import Environment

# vLLM's TPOT in ms with 129 tokens: by (model, tp, dtype, batch), then by prompt.
VLLM_TPOT_MS = {
    ("qwen2.5-0.5b", 1, "bf16", 1): {128: 2.20, 512: 2.30, 2048: 1.91},
    ("qwen2.5-7b", 1, "bf16", 1): {128: 4.76, 512: 4.71, 2048: 4.74},
    ("qwen2.5-7b", 1, "fp8", 1): {128: 3.42, 512: 3.37, 2048: 3.41},
    ("qwen2.5-7b", 1, "bf16", 32): {512: 5.21},
    ("qwen2.5-72b", 2, "bf16", 1): {128: 20.13, 512: 20.01, 2048: 20.21},
    ("qwen2.5-72b", 2, "fp8", 1): {128: 13.03, 512: 13.02, 2048: 13.13},
}

PROFILED_TOKENS = 17  # of a row, while copies are counted: torch's profiler takes far longer for a kernel than the GPU


@dataclass(frozen=True)
class Timing:
    """`tpot_ms` of a step. `num_waits` of the engine for the device in the steps of a run after the first. Of such a step, on
    average: `step_syncs` of the host inside torch, `step_copies` from the device to the host. None where not known."""

    tpot_ms: float
    num_waits: int | None
    step_syncs: float | None = None
    step_copies: float | None = None


def time_decode(engine: Engine, case: Case, repeats: int) -> Timing:
    """The median of `repeats` after one warm-up. *Collective*; the times are rank 0's."""
    prompts = make_prompts(case, engine.blueprint.config.full_vocab)
    seconds: dict[int, list[float]] = {1: [], case.output: []}
    waits: dict[int, int | None] = {}
    for repeat in range(1 + repeats):
        for num_tokens, times in seconds.items():
            waits[num_tokens] = run_once(engine, prompts, [num_tokens] * case.batch).stats.num_waits
            if repeat > 0:
                times.append(engine.run_s)
    first, whole = (statistics.median(times) for times in seconds.values())
    num_waits = None if waits[case.output] is None else waits[case.output] - waits[1]

    def count_a_step(count: Callable[[Callable[[], object]], int | None], num_tokens: int) -> float | None:
        least, most = (count(lambda n=n: run_once(engine, prompts, [n] * case.batch)) for n in (1, num_tokens))
        return None if least is None or most is None else (most - least) / (num_tokens - 1)

    step_syncs = count_a_step(count_host_syncs, case.output)
    step_copies = count_a_step(count_host_copies, min(case.output, PROFILED_TOKENS))
    return Timing(1e3 * (whole - first) / (case.output - 1), num_waits, step_syncs, step_copies)


def make_record(case: Case, timing: Timing, reads: Reads, num_layers: int, backend: str, comm: str) -> Record:
    """The record of a case on GPUs. Waits and the residual are those of a step."""
    tpot_s, floor_s = timing.tpot_ms / 1e3, reads.total / (DATASHEET_TB_S * 1e12)
    metrics = {
        "tpot_ms": timing.tpot_ms,
        "decode_tok_s": case.batch / tpot_s,
        "hbm_tb_s": reads.total / tpot_s / 1e12,
        "layer_residual_us": 1e6 * (tpot_s - reads.weight_bytes / (READ_TB_S * 1e12)) / num_layers,
    }
    waits = None if timing.num_waits is None else timing.num_waits / (case.output - 1)
    for name, number in {"host_syncs": waits, "torch_syncs": timing.step_syncs, "host_copies": timing.step_copies}.items():
        if number is not None:
            metrics[f"{name}_per_token"] = number
    peer: dict[str, object] = {}
    tpot_ms = VLLM_TPOT_MS.get((case.model, case.tp, case.dtype, case.batch), {}).get(case.prompt)
    if tpot_ms is not None and has_peer(case, comm):
        peer = {"name": VLLM, "tpot_ms": tpot_ms, "decode_tok_s": round(1e3 * case.batch / tpot_ms, 1)}
    ceiling = {"tpot_ms": 1e3 * floor_s, "decode_tok_s": case.batch / floor_s, "hbm_tb_s": DATASHEET_TB_S}
    return Record("decode", {**vars(case), "backend": backend, "comm": comm}, metrics, ceiling, peer, checked=True)


def describe(record: Record, reads: Reads) -> list[str]:
    """What a person wants to know of it."""
    case, metrics, ceiling = record.case, record.metrics, record.ceiling
    peer = f"; {record.peer['name']}: {record.peer['tpot_ms']} ms" if record.peer else ""
    names = ("host_syncs_per_token", "torch_syncs_per_token", "host_copies_per_token")
    waits, syncs, copies = (f"{metrics[name]:.3f}" if name in metrics else "not counted" for name in names)
    return [
        describe_case(case),
        f"  TPOT      {metrics['tpot_ms']:.3f} ms, floor {ceiling['tpot_ms']:.3f} at {DATASHEET_TB_S} TB/s{peer}",
        f"  decode    {metrics['decode_tok_s']:.1f} tok/s of {ceiling['decode_tok_s']:.1f}",
        f"  HBM       {metrics['hbm_tb_s']:.2f} TB/s, {100 * metrics['hbm_tb_s'] / DATASHEET_TB_S:.0f} % of {DATASHEET_TB_S}: "
        f"{reads.weight_bytes / 1e9:.2f} GB of weights and {reads.kv_bytes / 1e9:.3f} GB of keys and values a step and GPU",
        f"  residual  {metrics['layer_residual_us']:.2f} us a layer beyond the weights at {READ_TB_S} TB/s",
        f"  waits     of the host a step: {waits}; inside torch: {syncs}; copies to the host a step: {copies}",
    ]


@click.command()
@engine_options
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(2), default=129, show_default=True, help="Tokens of an answer.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
def main(
    model: str, dtype: str, shard_of: int | None, eager: bool, device: str, record: Path | None, batch: int, prompt: int,
    output: int, repeats: int,
) -> None:  # fmt: skip
    """Time decode steps of one case on all ranks of this world."""
    refuse_cpu_record(record, device)
    commit()
    environment = Environment.read()
    case = Case.here(model, device, dtype, batch, prompt, output, shard_of)
    with errors_in_one_line(), open_engine(case, model, device, shard_of, eager) as engine:
        timing = time_decode(engine, case, repeats)
        blueprint, backend, comm = engine.blueprint, engine.backend, engine.comm.name
    if environment.rank != 0:
        return
    if device == "cpu":
        click.echo(f"{timing.tpot_ms:.3f} ms a step of {batch} rows")
        return
    reads = Reads.of(case, blueprint)
    result = make_record(case, timing, reads, blueprint.config.num_layers, backend, comm)
    click.echo("\n".join(describe(result, reads)))
    if record is not None:
        result.append_to(record, device_name(shard_of), "engine.bench.decode", environment.world_size)


if __name__ == "__main__":
    main()
