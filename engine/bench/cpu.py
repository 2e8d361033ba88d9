"""Doorbell against transformers `generate` on a CPU: one process, the same threads, the same model, fp32, greedy, in one run.

Prefill and decode are kept apart. transformers' prefill is timed as a call that makes one token; its decode is what the whole
call takes beyond that. Both sides are timed in turn, several times, and compared by medians: on a machine with neighbours the
seconds wander, their ratio in one run does not.

Batch 8 comes twice. With equal lengths both sides do the same work, and the ratio is that of their steps. With mixed lengths it
is what a batch user has: rows of mixed prompt and answer lengths, more of them than fit at once. transformers pads each batch of
8 to its longest prompt and computes until its longest answer ends; only the tokens that were asked for are counted, on both
sides. Every answer is compared before anything is timed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from transformers import AutoModelForCausalLM

from engine.api import Engine
from engine.bench.records import Record, commit, cpu_device
from engine.run_stats import RunStats


@dataclass(frozen=True)
class Case:
    """`rows`: (prompt ids, tokens wanted); `batch` of them at a time."""

    batch: int
    rows: tuple[tuple[tuple[int, ...], int], ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt, _ in self.rows)

    @property
    def decode_tokens(self) -> int:
        return sum(wanted - 1 for _, wanted in self.rows)


@dataclass(frozen=True)
class Timing:
    """Seconds of prefill and of decode for all rows of a case, and what came out."""

    prefill_s: float
    decode_s: float
    tokens: tuple[tuple[int, ...], ...]


def make_case(batch: int, num_rows: int, prompt: tuple[int, int], output: tuple[int, int], vocab: int, seed: int = 0) -> Case:
    """Distinct random prompts; lengths uniform in the given ranges."""
    rng = random.Random(seed)

    def row() -> tuple[tuple[int, ...], int]:
        return tuple(rng.randrange(1000, vocab) for _ in range(rng.randint(*prompt))), rng.randint(*output)

    return Case(batch, tuple(row() for _ in range(num_rows)))


def time_doorbell(engine: Engine, case: Case) -> Timing:
    engine.stats = RunStats()
    params = [{"max_tokens": wanted, "ignore_eos": True, "temperature": 0, "repetition_penalty": 1.0} for _, wanted in case.rows]
    results = engine.generate([list(prompt) for prompt, _ in case.rows], params)
    stats = engine.stats
    assert (stats.prefill_tokens, stats.decode_tokens) == (case.prompt_tokens, case.decode_tokens)
    return Timing(stats.prefill_s, stats.decode_s, tuple(result.completions[0].token_ids for result in results))


@torch.inference_mode()
def time_transformers(model: torch.nn.Module, case: Case) -> Timing:
    prefill_s = decode_s = 0.0
    tokens: list[tuple[int, ...]] = []
    for start in range(0, len(case.rows), case.batch):
        rows = case.rows[start : start + case.batch]
        longest = max(len(prompt) for prompt, _ in rows)
        # Left padding, as its users do it: generation goes on at the right end.
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt, _ in rows])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in rows])
        first_s, _ = _timed(lambda ids=ids, mask=mask: _generate(model, ids, mask, 1))
        wanted = max(wanted for _, wanted in rows)
        whole_s, output = _timed(lambda ids=ids, mask=mask, wanted=wanted: _generate(model, ids, mask, wanted))
        prefill_s += first_s
        decode_s += whole_s - first_s
        tokens += [tuple(line[longest : longest + wanted].tolist()) for line, (_, wanted) in zip(output, rows)]
    return Timing(prefill_s, decode_s, tuple(tokens))


def _generate(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return model.generate(
        ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
    )


def _timed(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def count_differences(ours: Timing, theirs: Timing) -> int:
    """Rows whose tokens differ. Rounding differs between the two, so a near-tie may fall the other way, rarely."""
    return sum(a != b for a, b in zip(ours.tokens, theirs.tokens))


@torch.inference_mode()
def read_rate_gb_s(num_bytes: int = 1 << 29) -> float:
    """How fast this CPU reads memory with the threads in use: the ceiling of decode at batch 1."""
    buffer = torch.ones(num_bytes // 4)
    buffer.sum()
    return num_bytes / min(_timed(buffer.sum)[0] for _ in range(5)) / 1e9


def compare(engine: Engine, model: torch.nn.Module, case: Case, repeats: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Metrics of Doorbell, those of transformers, and the number of rows that differ; medians over `repeats` turns."""
    num_different = count_differences(time_doorbell(engine, case), time_transformers(model, case))  # the warm-up as well
    pairs = [(time_doorbell(engine, case), time_transformers(model, case)) for _ in range(repeats)]
    prefill_ratio = statistics.median(theirs.prefill_s / ours.prefill_s for ours, theirs in pairs)
    decode_ratio = statistics.median(theirs.decode_s / ours.decode_s for ours, theirs in pairs)
    rates = []
    for side in zip(*pairs):
        prefill_s = statistics.median(timing.prefill_s for timing in side)
        decode_s = statistics.median(timing.decode_s for timing in side)
        rates.append({"prefill_tok_s": case.prompt_tokens / prefill_s, "decode_tok_s": case.decode_tokens / decode_s})
    return {"decode_ratio": decode_ratio, "prefill_ratio": prefill_ratio, **rates[0]}, rates[1], num_different


@click.command()
@click.option("--model", default="models/smollm2-135m", show_default=True, help="Model folder.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1), help="Timed turns a case.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of both sides.  [default: cores]")
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
def main(model: str, repeats: int, threads: int | None, record: Path | None) -> None:
    """Time both engines at batch 1, at batch 8 with equal lengths, and at batch 8 with mixed lengths."""
    commit()
    settings = {"device": "cpu", "dtype": "float32", "is_prefix_reuse": False, "threads": threads}
    engines = {batch: Engine(model, max_batch=batch, **settings) for batch in (1, 8)}
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    vocab, weight_bytes = reference.config.vocab_size, 4 * sum(p.numel() for p in reference.parameters())
    rate = read_rate_gb_s()
    cases = (
        make_case(1, 2, (128, 128), (64, 64), vocab),
        make_case(8, 8, (128, 128), (48, 48), vocab),
        make_case(8, 24, (16, 256), (16, 64), vocab),
    )
    turns = f"{repeats} turns a case, {3 * repeats} at batch 1"
    print(f"{cpu_device()}; reads memory at {rate:.1f} GB/s; {model}, fp32, prefix reuse off, {turns}")
    for case in cases:
        # A turn at batch 1 is short, so a neighbour's moment weighs more: three times the turns.
        metrics, peer, num_different = compare(engines[case.batch], reference, case, repeats * (3 if case.batch == 1 else 1))
        ceiling = {"decode_tok_s": case.batch * rate * 1e9 / weight_bytes}
        print(
            f"batch {case.batch}: {len(case.rows)} rows, {case.prompt_tokens} prompt and {case.decode_tokens} decode tokens\n"
            f"  decode   {metrics['decode_tok_s']:7.1f} tok/s, transformers {peer['decode_tok_s']:7.1f}: "
            f"{metrics['decode_ratio']:.2f}x (memory ceiling {ceiling['decode_tok_s']:.0f})\n"
            f"  prefill  {metrics['prefill_tok_s']:7.1f} tok/s, transformers {peer['prefill_tok_s']:7.1f}: "
            f"{metrics['prefill_ratio']:.2f}x\n"
            f"  answers that differ: {num_different} of {len(case.rows)}"
        )
        if record is not None:
            Record(
                bench="cpu",
                case={
                    "model": Path(model).name,
                    "batch": case.batch,
                    "versus": "transformers generate",
                    "dtype": "fp32",
                    "rows": len(case.rows),
                    "prompt": sorted({min(len(p) for p, _ in case.rows), max(len(p) for p, _ in case.rows)}),
                    "output": sorted({min(w for _, w in case.rows), max(w for _, w in case.rows)}),
                },
                metrics={**metrics, "answers_different": num_different},
                ceiling=ceiling,
                peer={"name": "transformers generate", **{name: round(value, 4) for name, value in peer.items()}},
                checked=num_different == 0,
            ).append_to(record, cpu_device(), "engine.bench.cpu")
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
