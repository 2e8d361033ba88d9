"""The ways to reduce and to step, one after the other: what the naive way costs, and what is left of it in ours.

`host_loop` waits for the GPU before and after every sum; `nccl` sums by NCCL; `one_shot` and `lamport` by that algorithm of ours,
whatever the size of a message; `auto` as a run does that names none. Each way is timed as the benches of prefill and decode do,
with its host waits and copies counted in runs that are not timed: a request is its prompt and 128 tokens more.

Every way is a world of its own (`engine.bench.one_way`), so none meets memory or connections of another. All answer the same
prompts with the same random weights, greedily. Other sums round otherwise, so near-ties between tokens may fall differently:
how far the answers agree with those of the first way is said, and does not fail.

Start it as one process: it starts torchrun itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from engine.bench.fresh import run_world, world_command
from engine.bench.load import DTYPES, MAX_BATCH, describe_case, record_option, refuse_cpu_record
from engine.bench.records import Record, commit


@dataclass(frozen=True)
class Way:
    """`name` of how it reduces; `comm`, `all_reduce`: that in `EngineSettings`; `steps`: `eager` or `graph`."""

    name: str
    comm: str
    all_reduce: str
    steps: str

    @property
    def label(self) -> str:
        return f"{self.name}-{self.steps}"


WAYS = (
    Way("host_loop", "host_loop", "auto", "eager"),
    Way("nccl", "nccl", "auto", "eager"),
    Way("nccl", "nccl", "auto", "graph"),
    Way("one_shot", "auto", "one_shot", "eager"),
    Way("one_shot", "auto", "one_shot", "graph"),
    Way("lamport", "auto", "lamport", "eager"),
    Way("lamport", "auto", "lamport", "graph"),
    Way("auto", "auto", "auto", "graph"),
)
BY_LABEL = {way.label: way for way in WAYS}
# Of the table, left to right: metric, heading.
COLUMNS = (
    ("ttft_ms", "TTFT ms"),
    ("tpot_ms", "TPOT ms"),
    ("host_syncs_per_request", "waits a request"),
    ("host_syncs_per_token", "steps waited for"),
    ("torch_syncs_per_token", "waits a token"),
    ("host_copies_per_token", "copies a token"),
    ("equal_tokens", "equal tokens"),
)
NOTE = (
    "waits: of the host for the GPU inside torch, in all for a request (its prompt and 128 tokens more) and for a token of each\n"
    "row; steps waited for: the part of decode steps that the engine waits for before it goes on; copies: from the GPU to the\n"
    "host; equal tokens: those before an answer first differs from the first way's, of all rows"
)


def measure_ways(ways: Sequence[Way], measure: Callable[[Way], dict], on_record: Callable[[Record, str], None]) -> list[Record]:
    """The records of those `ways` that there are here; of the others the reason is printed. Each is measured when the one before
    has been handed to `on_record(record, device)`. `measure`: gives what `engine.bench.one_way` prints."""
    records: list[Record] = []
    first: dict | None = None
    for number, way in enumerate(ways, 1):
        click.echo(f"[{number}/{len(ways)}] {way.label}")
        found = measure(way)
        if "absent" in found:
            click.echo(f"  absent: {found['absent']}")
            continue
        first = first or found
        records.append(make_record(way, found, first, records))
        click.echo("\n".join(describe(records[-1])))
        on_record(records[-1], found["device"])
    return records


def make_record(way: Way, found: Mapping, first: Mapping, before: Sequence[Record]) -> Record:
    """The record of `way`. `found`, `first`: what was measured of it and of the first way; `before`: the records so far, among
    which its peer is, the naive way."""
    metrics, ceiling = dict(found["metrics"]), dict(found["ceiling"])
    if found is not first:
        metrics["equal_tokens"] = equal_tokens(first["token_ids"], found["token_ids"])
        ceiling["equal_tokens"] = sum(map(len, first["token_ids"]))
    naive = next((record for record in before if record.case["way"] == "host_loop"), None)
    peer = {} if naive is None else {"name": "host_loop", **{name: naive.metrics[name] for name in ("ttft_ms", "tpot_ms")}}
    return Record("ways", {**found["case"], "way": way.name}, metrics, ceiling, peer, checked=True)


def equal_tokens(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> int:
    """Tokens before the first difference, over all rows."""
    count = 0
    for wanted_row, found_row in zip(wanted, found, strict=True):
        differing = (place for place, pair in enumerate(zip(wanted_row, found_row, strict=True)) if pair[0] != pair[1])
        count += next(differing, len(wanted_row))
    return count


def describe(record: Record) -> list[str]:
    """What a person wants to know of it, while others are to come."""
    metrics, most = record.metrics, record.ceiling.get("equal_tokens")
    lines = [f"  TTFT {metrics['ttft_ms']:.2f} ms, TPOT {metrics['tpot_ms']:.3f} ms"]
    if most is not None and metrics["equal_tokens"] < most:
        lines.append(f"  other tokens than the first way: {metrics['equal_tokens']} of {most} equal before the first difference")
    return lines


def table(records: Sequence[Record]) -> list[str]:
    """All ways as lines of text, with what the columns mean."""
    columns = [(name, heading) for name, heading in COLUMNS if any(name in record.metrics for record in records)]
    rows = [["way", "steps", *(heading for _, heading in columns)]]
    for record in records:
        case = record.case
        rows.append([str(case["way"]), str(case["backend"]), *(_cell(record, name) for name, _ in columns)])
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if idx < 2 else cell.rjust(width) for idx, (cell, width) in enumerate(zip(row, widths)))
             for row in rows]  # fmt: skip
    return [*(line.rstrip() for line in lines), NOTE]


def _cell(record: Record, name: str) -> str:
    value = record.metrics.get(name)
    if value is None:
        return "-"
    if name == "equal_tokens":
        return f"{value} of {record.ceiling[name]}"
    return f"{value:.3f}" if name.endswith(("_ms", "_token")) else f"{value:g}"


@click.command()
@click.option("--model", default="qwen2.5-7b", show_default=True, help="A shape, qwen2.5-0.5b to qwen2.5-72b, or a model folder.")
@click.option("--tp", type=click.IntRange(2, 8), default=2, show_default=True, help="Ranks, each a process.")
@click.option("--dtype", type=click.Choice(list(DTYPES)), default="bf16", show_default=True)
@click.option("--batch", type=click.IntRange(1, MAX_BATCH), default=1, show_default=True, help="Rows computed at once.")
@click.option("--prompt", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(2), default=129, show_default=True, help="Tokens of an answer.")
@click.option("--way", "labels", type=click.Choice(list(BY_LABEL)), multiple=True, show_default="all", help="Any number of them.")
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="cpu: a dry run.")
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--timeout", "timeout_s", type=click.FloatRange(1), default=300, show_default=True, help="Seconds for one way.")
@record_option
def main(
    model: str, tp: int, dtype: str, batch: int, prompt: int, output: int, labels: tuple[str, ...], device: str, repeats: int,
    timeout_s: float, record: Path | None,
) -> None:  # fmt: skip
    """Time every way to reduce, with graphs and without, and count what each asks of the host."""
    refuse_cpu_record(record, device)
    commit()
    ways = [way for way in WAYS if not labels or way.label in labels]
    case = {"model": model, "dtype": dtype, "batch": batch, "prompt": prompt, "output": output}

    def measure(way: Way) -> dict:
        own = {"comm": way.comm, "all-reduce": way.all_reduce, "steps": way.steps}
        command = world_command("engine.bench.one_way", tp, {**case, **own, "device": device, "repeats": repeats})
        return run_world(command, timeout_s, f"numbers of {way.label}")

    def keep(result: Record, where: str) -> None:
        if record is not None:
            result.append_to(record, where, "engine.bench.ways")

    records = measure_ways(ways, measure, keep)
    if not records:
        sys.exit("none of these ways can be had here")
    comms = ", ".join(dict.fromkeys(str(each.case["comm"]) for each in records))
    click.echo("\n".join(["", describe_case({**records[0].case, "comm": comms, "backend": "all ways"}), *table(records)]))


if __name__ == "__main__":
    main()
