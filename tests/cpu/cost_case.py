"""Estimates of the cost model in few words, and files of all-reduce records for it."""

from __future__ import annotations

import json
from pathlib import Path

from engine.bench.load import Case
from engine.cost.all_reduce import AllReduceTable
from engine.cost.estimate import Estimate
from engine.cost.gpus import GPUS

RESULTS = Path(__file__).resolve().parents[2] / "results"
TABLE = AllReduceTable.load(RESULTS / "all_reduce.jsonl")


def estimate(
    model: str = "qwen2.5-7b", gpu: str = "H200", has_peers: bool | None = None, step: str = "", table: AllReduceTable = TABLE,
    **changes,
) -> Estimate:  # fmt: skip
    case = {"model": model, "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512, "output": 129, **changes}
    return Estimate.of(Case(**case), model, GPUS[gpu], table, has_peers, step)


def all_reduce_file(path: Path, rows) -> Path:
    lines = [
        {"case": {"algorithm": name, "bytes": size, "world": world, "ranks_per_gpu": 1 if world == 2 else 4, "dtype": dtype,
                  "heap": "ipc"},
         "metrics": {"all_reduce_us": us}, "kind": kind, "checked": True}
        for name, size, world, us, dtype, kind in rows
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


GOOD = [(f"all_reduce_lamport{norm}", 1000, world, us, "bf16", "measured")
        for norm, world, us in (("", 2, 2.0), ("", 8, 4.0), ("_norm", 2, 3.0), ("_norm", 8, 9.0))]  # fmt: skip
