"""The products of a decode step, one kind at a time: our kernels beside each other and the library's, in TB/s of weights read.

Each kind has as many distinct weights as make 5 GB, so that nothing is read from a cache; a graph runs through them, each product
with programmatic launch behind the one before. One GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import torch
import torch.nn.functional as F

from engine.bench.records import Record, commit
from kernels.build import Build, default_cache_folder
from kernels.gemv import KINDS, Gemv, load_gemv
from kernels.gemv_rows import SHARED_BYTES

BYTES = 5 << 30
PEAK_TB_S = 4.59  # bulk copies from HBM, one kernel reading 16 GiB, as measured on an H200
# Qwen2.5: hidden, query heads, KV heads, head size, MLP width, vocabulary rows of the head.
SIZES = {
    "0.5b": (896, 14, 2, 64, 4864, 151936), "1.5b": (1536, 12, 2, 128, 8960, 151936), "3b": (2048, 16, 2, 128, 11008, 151936),
    "7b": (3584, 28, 4, 128, 18944, 152064), "14b": (5120, 40, 8, 128, 13824, 152064), "32b": (5120, 40, 8, 128, 27648, 152064),
    "72b": (8192, 64, 8, 128, 29568, 152064),
}  # fmt: skip


def shapes_of(model: str, tp: int) -> dict[str, tuple[int, int, bool]]:
    """(out, in, is gate and up) of a rank's products; heads and columns padded to equal shares."""
    hidden, q, kv, dim, ff, vocab = SIZES[model]
    local_q, local_kv, local_ff = -(-q // tp), max(1, kv // tp), -(-ff // tp)
    local_ff = -(-local_ff // 8) * 8
    return {
        "qkv": ((local_q + 2 * local_kv) * dim, hidden, False), "o": (hidden, local_q * dim, False),
        "gate_up": (2 * local_ff, hidden, True), "down": (hidden, local_ff, False), "head": (-(-vocab // tp), hidden, False),
    }  # fmt: skip


def us_of(bodies: list[Callable[[], object]], repeats: int) -> float:
    """us of a body, in one graph that runs them all."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    times = []
    with torch.cuda.stream(stream):
        for body in bodies[:2]:
            body()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for body in bodies:
                body()
        graph.replay()
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(bodies))
    return statistics.median(times)


@click.command()
@click.option("--models", default="0.5b,7b,72b", show_default=True, help=f"Of {', '.join(SIZES)}.")
@click.option("--tps", default="1,2,8", show_default=True)
@click.option("--rows", default="1,8", show_default=True)
@click.option("--dtypes", default="bf16,fp8", show_default=True)
@click.option("--kernels", default=",".join(KINDS), show_default=True, help="rows: 1 and 2 rows only; tiles: up to 16.")
@click.option("--shared-kib", default=SHARED_BYTES >> 10, show_default=True, help="Shared memory of a CTA of the rows kernel.")
@click.option("--repeats", default=7, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), help="JSONL file to append the records to.")
def main(
    models: str, tps: str, rows: str, dtypes: str, kernels: str, shared_kib: int, repeats: int, record: Path | None
) -> None:  # fmt: skip
    """Time the products of decode steps."""
    if unknown := set(kernels.split(",")) - set(KINDS):
        raise click.UsageError(f"--kernels takes {', '.join(KINDS)}, not {', '.join(sorted(unknown))}")
    commit()
    torch.zeros(1, device="cuda")
    built, num_sms = load_gemv(Build(default_cache_folder())), torch.cuda.get_device_properties(0).multi_processor_count
    gemvs = {kind: Gemv(built, num_sms, kinds=(kind,), shared_bytes=shared_kib << 10) for kind in kernels.split(",")}
    device = torch.cuda.get_device_name()
    pool = (torch.randn(BYTES // 2, device="cuda") * 0.02).bfloat16()
    for model in models.split(","):
        for tp in map(int, tps.split(",")):
            for kind, (out, inner, is_gate_up) in shapes_of(model, tp).items():
                for dtype in dtypes.split(","):
                    if dtype == "fp8" and kind == "head":
                        continue
                    elem = 1 if dtype == "fp8" else 2
                    num_bytes = out * inner * elem
                    count = max(1, min(64, BYTES // num_bytes))
                    line = f"{model:>4} tp{tp} {kind:8}{out:7d} x {inner:5d} {dtype}"
                    for n in map(int, rows.split(",")):
                        x = torch.randn(n, inner, device="cuda").bfloat16()
                        if dtype == "fp8":
                            data = pool.view(torch.uint8)[: count * num_bytes].view(count, out, inner)
                            plain = [matrix.view(torch.float8_e4m3fn) for matrix in data]
                            scale = torch.full((out,), 1e-4, device="cuda")
                            weights = [SimpleNamespace(data=matrix, scale=scale) for matrix in plain]
                        else:
                            weights = list(pool[: count * out * inner].view(count, out, inner))
                        measured, peer, line = {}, {}, f"{line}   {n} rows"
                        for name, gemv in gemvs.items():
                            if gemv.takes(x, weights[0], is_gate_up):
                                run = gemv.gate_up if is_gate_up else gemv.linear
                                target = run(x, weights[0])
                                bodies = [lambda w=w, run=run, x=x, target=target: run(x, w, None, target) for w in weights]
                                measured[name] = us = us_of(bodies, repeats)
                                line += f" {name} {us:7.2f} us {num_bytes / us / 1e6:5.2f}"
                        if dtype != "fp8":
                            us = us_of([lambda w=w, x=x: F.linear(x, w) for w in weights], repeats)
                            peer = {"name": "cuBLAS through torch", "product_us": round(us, 4)}
                            line += f" (cuBLAS {us:7.2f} {num_bytes / us / 1e6:5.2f})"
                        for name, us in measured.items() if record is not None else ():
                            case = {"model": f"qwen2.5-{model}", "tp": tp, "product": kind, "out": out, "in": inner, "rows": n,
                                    "dtype": dtype, "kernel": name}  # fmt: skip
                            metrics = {"product_us": us, "hbm_tb_s": num_bytes / us / 1e6}
                            ceiling = {"product_us": num_bytes / PEAK_TB_S / 1e6, "hbm_tb_s": PEAK_TB_S}
                            Record("product", case, metrics, ceiling, peer, True).append_to(record, device, "engine.bench.gemv")
                    print(line, flush=True)


if __name__ == "__main__":
    main()
