"""Made-up records of every bench, for the tests of the page that is made from records."""

from __future__ import annotations

import json
from pathlib import Path

BASE = {
    "peer": {}, "ceiling": {}, "kind": "measured", "checked": True, "device": "1 x Test GPU",
    "versions": {"doorbell": "9.9", "torch": "8.8"}, "commit": "abcdef", "command": "python -m bench", "date": "2030-01-02",
}  # fmt: skip
DECODE = {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512, "output": 129,
          "backend": "graph", "comm": "none"}  # fmt: skip
ALL_REDUCE = {"algorithm": "all_reduce_lamport", "bytes": 16384, "world": 2, "ranks_per_gpu": 1, "dtype": "bf16", "heap": "ipc",
              "threads": 256}  # fmt: skip


def made(bench: str, case: dict, metrics: dict, **more: object) -> dict:
    return {**BASE, "bench": bench, "case": case, "metrics": metrics, **more}


def decode(tpot_ms: float = 5.0, **changes: object) -> dict:
    peer, more = {"name": "vLLM", "tpot_ms": 6.0}, {key: changes.pop(key) for key in list(changes) if key not in DECODE}
    metrics = {"tpot_ms": tpot_ms, "hbm_tb_s": 3.6, "layer_residual_us": 7.5, "host_syncs_per_token": 0.25}
    ceiling = {"tpot_ms": 4.0, "hbm_tb_s": 4.8}
    return made("decode", {**DECODE, **changes}, metrics, **{"ceiling": ceiling, "peer": peer, **more})


def all_reduce(algorithm: str, us: float, **changes: object) -> dict:
    more = {key: changes.pop(key) for key in ("ceiling", "peer") if key in changes}
    case = {**ALL_REDUCE, "algorithm": f"all_reduce_{algorithm}", **changes}
    if algorithm != "lamport":
        del case["threads"]
    peer = {"name": "nccl", "all_reduce_us": 8.0, "flashinfer_us": 3.0}
    return made("all_reduce", case, {"all_reduce_us": us}, **{"ceiling": {"all_reduce_us": 0.5}, "peer": peer, **more})


OTHERS = [
    made("prefill", DECODE, {"ttft_ms": 20, "ttft_p90_ms": 40, "prefill_tok_s": 1000, "host_syncs_per_request": 3},
         ceiling={"ttft_ms": 10}, peer={"name": "vLLM", "ttft_ms": 30}),
    made("ways", {"model": "qwen2.5-7b", "tp": 2, "way": "lamport", "backend": "graph"},
         {"ttft_ms": 10, "tpot_ms": 2.5, "host_syncs_per_request": 2, "torch_syncs_per_token": 0, "equal_tokens": 60},
         ceiling={"ttft_ms": 4, "tpot_ms": 1.5, "equal_tokens": 129}, peer={"name": "host_loop", "ttft_ms": 30, "tpot_ms": 20}),
    made("throughput", {"model": "qwen2.5-7b", "tp": 1, "requests": 1024},
         {"output_tok_s": 9000, "total_tok_s": 1, "drift_percent": 1.5},
         ceiling={"drift_percent": 3}, peer={"name": "vLLM", "output_tok_s": 6000}),
    made("drift", {"model": "qwen2.5-0.5b", "tp": 2, "requests": 1000},
         {"output_tok_s": 900, "drift_percent": 1.5, "steps_compared": 4800, "mismatches": 0,
          **{f"tenth_{i}_tok_s": 900 + i for i in range(1, 11)}},
         ceiling={"output_tok_s": 1800, "drift_percent": 2}),
    made("speculate", {"model": "qwen2.5-72b", "k": 4}, {"speedup": 1.75, "tokens_per_step": 3.1, "acceptance": 0.8},
         ceiling={"tokens_per_step": 5}),
    made("coldstart", {"model": "qwen2.5-7b", "caches": "warm"}, {"first_token_s": 8, "imports_s": 2},
         peer={"name": "vLLM", "first_token_s": 40}),
    made("stages", {"phase": "decode", **DECODE},
         {"qkv_us": 25, "mlp_us": 50, "rest_us": 20, "wall_us": 100, "profile_overhead_ratio": 1.25, "kernel_launches": 9},
         ceiling={"wall_us": 40}),
    made("product", {"model": "qwen2.5-7b", "product": "qkv", "rows": 1}, {"product_us": 10, "hbm_tb_s": 3},
         ceiling={"product_us": 6, "hbm_tb_s": 4.59}, peer={"name": "cuBLAS", "product_us": 9}),
    made("fp8_error", {"model": "smollm2-135m", "dtype": "fp8"},
         {"qkv_error_percent": 2, "kl_nats": 0.01, "perplexity_percent": 0.2},
         ceiling={"perplexity_percent": 1}, peer={"name": "bf16", "qkv_error_percent": 0.25, "kl_nats": 0.001}),
    made("decode_attention", {"batch": 1, "context": 512}, {"attention_us": 5, "hbm_tb_s": 2}, ceiling={"attention_us": 1},
         peer={"sdpa_us": 20, "flashinfer_us": 10}),
    made("put_signal", {"bytes": 64, "wait": "kernel"}, {"hop_us": 2}, ceiling={"hop_us": 0.5},
         peer={"name": "nccl", "hop_us": 16}),
    made("soak", {"world": 8, "ranks_per_gpu": 4}, {"calls": 1000, "mismatches": 0, "drift_percent": 0.5,
         **{f"tenth_{i}_us": 6 + i / 100 for i in range(1, 11)}}, ceiling={"drift_percent": 3}),
    made("cpu", {"model": "smollm2-135m", "batch": 8, "prompt": [41, 250]}, {"decode_ratio": 2.5, "decode_tok_s": 90},
         ceiling={"decode_tok_s": 400}, peer={"name": "transformers", "decode_tok_s": 36}),
    made("novel", {"colour": "red|blue"}, {"laps": 7, "lap_s": 3}, ceiling={"lap_s": 1.5}),
]  # fmt: skip


def write(folder: Path, *records: dict) -> Path:
    """One file a bench, in the given order."""
    for record in records:
        with (folder / f"{record['bench']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return folder
