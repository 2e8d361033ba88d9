"""Decode attention of one layer on one GPU, us a launch: launches in one CUDA graph, the median of repeats.

The launches go over the caches of so many layers that they do not stay in L2. Time includes what the kernel does besides: sums of
the qkv parts, rotation, cache write. Of the peers, `flashinfer_step` does the same in two kernels, one of ours that writes and
FlashInfer's that attends over the same pages; `flashinfer` is the second alone, and torch's `sdpa` only attends too, over dense
keys. What is timed was checked before, but for `sdpa`. `--trials` times other ways to share a row too, and prints the fastest:
numbers are those of `SplitGrid`, in its order. `--choices` times our kernel and `flashinfer_step` for all numbers of rows and
tokens that the engine's table tells apart, as an engine would launch them for long rows, and writes that table.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import click
import torch
import torch.nn.functional as F

from engine.bench.records import Record, commit
from kernels.attention_choice import CONTEXT_BUCKETS, FLASHINFER, OWN, ROW_BUCKETS, Heads
from kernels.build import Build, default_cache_folder
from kernels.decode_attention import HEAD_DIMS, DecodeAttention, decode_attention, load_decode_attention
from kernels.decode_write import load_decode_write
from kernels.flashinfer_attention import FlashInferAttention, is_installed
from kernels.launch_kernel import Kernel
from kernels.rotary import rotary_turns
from kernels.split_grid import BLOCK_SHARED_BYTES, SplitGrid, split_grid

# tp, local query and KV heads, elements of a head
SHAPES = {"qwen2.5-7b": (1, 28, 4, 128), "qwen2.5-72b": (2, 32, 4, 128), "qwen2.5-72b/8": (8, 8, 1, 128)}
CHOICE_SHAPES = SHAPES | {"qwen2.5-0.5b": (1, 14, 2, 64), "qwen2.5-7b/2": (2, 14, 2, 128), "qwen2.5-7b/4": (4, 7, 1, 128),
                          "qwen2.5-72b/4": (4, 16, 2, 128)}  # fmt: skip
WORK = ((1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (32, 512), (32, 4096))  # rows, cached tokens of each
PAGE_SIZE, PARTS, DTYPE = 16, 2, torch.bfloat16
LOAD_TB_S = 4.33  # HBM read by ordinary loads, the most that was measured on H200
EMPTY_KERNEL_US = 0.51  # an empty kernel in a graph, as measured
CACHE_BYTES, MAX_LAYERS, MIN_CALLS = 256 << 20, 64, 40
TOLERANCE = 2e-2  # bf16 weights and results near 1
SHOWN, TRIAL_REPEATS = 5, 3


@dataclass(frozen=True)
class Work:
    """`rows` rows of `context` cached tokens for one shape of heads, in as many layers as L2 cannot hold."""

    num_q: int
    num_kv: int
    head_dim: int
    rows: int
    context: int
    room: int = 0  # tokens that a launch must be able to take, if more than there are

    @property
    def layer_bytes(self) -> int:
        return 2 * self.rows * self.context * self.num_kv * self.head_dim * DTYPE.itemsize

    @property
    def num_layers(self) -> int:
        return max(2, min(MAX_LAYERS, -(-CACHE_BYTES // self.layer_bytes)))

    @property
    def row_pages(self) -> int:
        return self.context // PAGE_SIZE + 1

    @property
    def max_context(self) -> int:
        return max(self.room, self.context + 1)


class Tensors:
    """Operands of a `Work` on the GPU, pages scattered."""

    def __init__(self, work: Work):
        rows, heads = work.rows, work.num_q + 2 * work.num_kv
        num_pages, dim = rows * work.row_pages, work.head_dim
        shape = (work.num_layers, num_pages * PAGE_SIZE, work.num_kv, dim)
        self.keys, self.values = (torch.randn(shape, device="cuda", dtype=DTYPE) for _ in range(2))
        self.page_table = torch.zeros(rows, -(-work.max_context // PAGE_SIZE), dtype=torch.int32, device="cuda")
        self.page_table[:, : work.row_pages] = torch.randperm(num_pages, device="cuda").view(rows, -1)
        self.positions = torch.full((rows,), work.context, dtype=torch.int32, device="cuda")
        self.qkv = torch.randn(PARTS, rows, heads, dim, device="cuda") * 2
        self.out = torch.full((rows, work.num_q, dim), float("nan"), dtype=DTYPE, device="cuda")
        inv_freq = 1e6 ** -(torch.arange(0, dim, 2, device="cuda") / dim)
        self.turns = rotary_turns(work.max_context, inv_freq, 1.0, DTYPE)
        self.wanted = torch.empty_like(self.out)
        decode_attention(
            self.qkv, self.positions, self.page_table, self.keys[0], self.values[0], self.wanted, self.turns, PAGE_SIZE
        )  # fmt: skip


def us_per_call(bodies: Sequence[Callable[[], object]], repeats: int) -> float:
    """Of one body, the bodies taken in turn in a graph."""
    turns = -(-MIN_CALLS // len(bodies))
    for body in bodies[:2]:
        body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(turns):
            for body in bodies:
                body()
    times = []
    for _ in range(repeats + 1):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / turns / len(bodies))
    return statistics.median(times[1:])


def ours(work: Work, x: Tensors, kernel: Kernel, grid: SplitGrid, is_pdl: bool) -> list[Callable[[], object]]:
    """A launch for each layer, after the first one's result was found right."""
    attention = DecodeAttention(
        kernel, work.num_q, work.num_kv, PAGE_SIZE, x.turns, work.rows, work.max_context, num_sms(), grid, is_pdl
    )  # fmt: skip

    def launch(layer: int) -> torch.Tensor:
        return attention.launch(x.qkv, x.positions, x.page_table, x.keys[layer], x.values[layer], x.out)

    _check(x, lambda: launch(0), f"decode attention on {grid}", work)
    return [lambda layer=layer: launch(layer) for layer in range(work.num_layers)]


def _check(x: Tensors, body: Callable[[], torch.Tensor], name: str, work: Work) -> None:
    x.out.fill_(float("nan"))
    found = body()
    if not torch.allclose(found, x.wanted, atol=TOLERANCE, rtol=TOLERANCE):
        sys.exit(f"{name} is wrong for {work}: off by {(found - x.wanted).abs().max().item():g}")


def num_sms() -> int:
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def trial_grids(work: Work) -> list[SplitGrid]:
    """Ways to share a row that leave no SM idle or take little more than each once, with as many clusters as then fit."""
    pairs, grids = work.rows * work.num_kv, []
    for num_warps, num_stages in ((4, 2), (4, 3), (4, 4), (8, 2), (8, 3)):
        for cluster in (1, 2, 4, 8):
            one = SplitGrid(cluster, 1, num_warps, num_stages)
            a_sm = BLOCK_SHARED_BYTES // one.shared_bytes(DTYPE, work.head_dim)
            most = max(1, a_sm * num_sms() // cluster // pairs)
            if cluster > 1 and pairs * cluster > a_sm * num_sms():
                continue
            useful = -(-work.context // (16 * num_warps * cluster))
            shares = [(num, tiles) for num in {most, max(1, most // 2)} for tiles in (1, 2, 4) if num > 1 and useful > 4 * tiles]
            grids += [SplitGrid(cluster, min(num, useful), num_warps, num_stages, 2, tiles) for num, tiles in shares] or [one]
    return grids


def try_grids(work: Work, x: Tensors, kernel: Kernel, grids: Sequence[SplitGrid], is_pdl: bool) -> str:
    times = sorted((us_per_call(ours(work, x, kernel, grid, is_pdl), TRIAL_REPEATS), astuple(grid)) for grid in grids)
    return "".join(f"  {','.join(map(str, grid))} {us:.2f}" for us, grid in times[:SHOWN])


def sdpa(work: Work, x: Tensors) -> list[Callable[[], object]]:
    query = torch.randn(work.rows, work.num_q, 1, work.head_dim, device="cuda", dtype=DTYPE)

    def attend(layer: int) -> torch.Tensor:
        shape = (work.rows, -1, work.num_kv, work.head_dim)
        keys, values = (cache[layer].view(shape)[:, : work.context].transpose(1, 2) for cache in (x.keys, x.values))
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return [lambda layer=layer: attend(layer) for layer in range(work.num_layers)]


def flashinfer(work: Work, x: Tensors, write: Kernel, is_pdl: bool) -> dict[str, list[Callable[[], object]]]:
    """Launches for each layer, with the kernel that writes and without, after the first one's result was found right."""
    attention = FlashInferAttention(write, work.num_q, work.num_kv, PAGE_SIZE, x.turns, work.rows, num_sms(), is_pdl)

    def step(layer: int) -> torch.Tensor:
        return attention.launch(x.qkv, x.positions, x.page_table, x.keys[layer], x.values[layer], x.out)

    def attend(layer: int) -> torch.Tensor:
        return attention.attend(x.page_table, x.keys[layer], x.values[layer], x.out)

    _check(x, lambda: step(0), "FlashInfer's attention", work)
    return {
        name: [lambda layer=layer, body=body: body(layer) for layer in range(work.num_layers)]
        for name, body in (("flashinfer_step", step), ("flashinfer", attend))
    }


def write_choices(
    path: Path, shapes: Sequence[str], kernels: dict[int, Kernel], write: Kernel, repeats: int, is_pdl: bool
) -> None:
    """Time both and write the table, whole after each shape: what is missing from it counts as not measured."""
    from flashinfer import __version__

    made_by = {"device": torch.cuda.get_device_name(), "commit": commit(), "flashinfer": __version__, "pdl": is_pdl}
    table = {}
    for name in shapes:
        _, num_q, num_kv, dim = CHOICE_SHAPES[name]
        heads = Heads(dim, num_q, num_kv, PAGE_SIZE)
        for rows in ROW_BUCKETS:
            for context in CONTEXT_BUCKETS:
                work = Work(num_q, num_kv, dim, rows, context, room=CONTEXT_BUCKETS[-1] + 1)
                x = Tensors(work)
                grid = split_grid(rows, num_kv, num_sms(), work.max_context)
                us = {
                    OWN: us_per_call(ours(work, x, kernels[dim], grid, is_pdl), repeats),
                    FLASHINFER: us_per_call(flashinfer(work, x, write, is_pdl)["flashinfer_step"], repeats),
                }
                table[heads.key(rows, context)] = {backend: round(value, 2) for backend, value in us.items()}
                print(f"{heads.key(rows, context)}: {min(us, key=us.get)}  {us[OWN]:.2f}  {us[FLASHINFER]:.2f}", flush=True)
        path.write_text(json.dumps(made_by | {"us": table}, indent=1) + "\n")


def note(record: Path | None, model: str, tp: int, work: Work, us: float, peers: dict[str, float], is_pdl: bool) -> None:
    if record is None:
        return
    case = {"model": model, "tp": tp, "dtype": "bf16", "batch": work.rows, "context": work.context, "page_size": PAGE_SIZE,
            "pdl": is_pdl}  # fmt: skip
    metrics = {"attention_us": us, "hbm_tb_s": work.layer_bytes / us / 1e6}
    ceiling = {"attention_us": max(EMPTY_KERNEL_US, work.layer_bytes / LOAD_TB_S / 1e6), "hbm_tb_s": LOAD_TB_S}
    peer = {f"{name}_us": round(value, 4) for name, value in peers.items()}
    Record("decode_attention", case, metrics, ceiling, peer, True).append_to(
        record, torch.cuda.get_device_name(), "engine.bench.attention"
    )


@click.command(help=__doc__)
@click.option("--repeats", default=7, show_default=True)
@click.option("--grid", "grids", multiple=True, metavar="NUMBERS", help="Also this way to share a row; may be repeated.")
@click.option("--trials", is_flag=True, help="Also many ways to share a row.")
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(CHOICE_SHAPES)), help="Only these; may be repeated.")
@click.option("--room", default=0, help="Tokens a launch must be able to take, if more than there are: as an engine's would.")
@click.option("--pdl/--no-pdl", default=True, help="Whether a launch may start before the one before has ended.")
@click.option("--peers/--no-peers", "has_peers", default=True, help="Whether to time the peers.")
@click.option("--flashinfer/--no-flashinfer", "has_flashinfer", default=is_installed, help="Beside FlashInfer, which may compile "
              "for a while; default: where it is installed.")
@click.option("--choices", type=click.Path(path_type=Path), help="JSON file to write the engine's table to; nothing else.")
@click.option("--record", type=click.Path(path_type=Path), help="Append the records to this file.")
@torch.inference_mode()
def main(
    repeats: int,
    grids: tuple[str, ...],
    trials: bool,
    shapes: tuple[str, ...],
    room: int,
    pdl: bool,
    has_peers: bool,
    has_flashinfer: bool,
    choices: Path | None,
    record: Path | None,
) -> None:
    commit()
    if choices is not None and not is_installed():
        raise click.UsageError("--choices compares with FlashInfer, which is not installed (extra flashinfer)")
    torch.zeros(1, device="cuda")  # a kernel is loaded in a context that is there
    build = Build(default_cache_folder())
    kernels, write = {dim: load_decode_attention(build, DTYPE, dim) for dim in HEAD_DIMS}, load_decode_write(build, DTYPE)
    if choices is not None:
        return write_choices(choices, shapes or list(CHOICE_SHAPES), kernels, write, repeats, pdl)
    for name in shapes or SHAPES:
        tp, num_q, num_kv, dim = CHOICE_SHAPES[name]
        kernel = kernels[dim]
        for rows, context in WORK:
            work = Work(num_q, num_kv, dim, rows, context, room)
            x = Tensors(work)
            usual = split_grid(rows, num_kv, num_sms(), work.max_context)
            us = us_per_call(ours(work, x, kernel, usual, pdl), repeats)
            line = f"{name:14} {num_q:2}/{num_kv} heads {rows:3} rows {context:6} tokens "
            line += f"{us:8.2f} us {work.layer_bytes / us / 1e6:5.2f} TB/s"
            peers = {"sdpa": us_per_call(sdpa(work, x), repeats)} if has_peers else {}
            if has_peers and has_flashinfer:
                for peer, bodies in flashinfer(work, x, write, pdl).items():
                    peers[peer] = us_per_call(bodies, repeats)
            line += "".join(f"  {peer} {value:8.2f}" for peer, value in peers.items())
            others = [SplitGrid(*map(int, text.split(","))) for text in grids] + (trial_grids(work) if trials else [])
            if others:
                line += f"  [{','.join(map(str, astuple(usual)))}] " + try_grids(work, x, kernel, others, pdl)
            print(line, flush=True)
            note(record, name.split("/")[0], tp, work, us, peers, pdl)


if __name__ == "__main__":
    main()
