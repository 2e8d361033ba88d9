"""The cost model held against records: which are compared, and that the committed ones are met."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from engine.cost.check import compare, load_measured
from engine.cost.gpus import gpu_of
from engine.model_cost import main
from tests.cpu.cost_case import RESULTS, TABLE, estimate


def measured(time_ms: float, bench: str = "decode", **changes) -> dict:
    case = {"model": "qwen2.5-7b", "tp": 1, "ranks_per_gpu": 1, "dtype": "bf16", "batch": 1, "prompt": 512, "output": 129,
            "backend": "graph", "comm": "none"}  # fmt: skip
    device = changes.pop("device", "1 x NVIDIA H200")
    metrics = {"tpot_ms" if bench == "decode" else "ttft_ms": time_ms}
    return {"bench": bench, "kind": "measured", "device": device, "metrics": metrics, "case": {**case, **changes}}


def test_comparison():
    tpot, ttft = estimate().tpot_ms, estimate().ttft_ms
    alone = estimate(tp=8, has_peers=False).tpot_ms
    records = [
        measured(tpot / 1.09), measured(tpot / 1.11), measured(tpot / 0.89), measured(ttft, "prefill", output=1),
        measured(alone, tp=8, comm="loopback"), measured(estimate(tp=2).tpot_ms, tp=2, comm="ipc"),
    ]  # fmt: skip
    found = [comparison for record in records for comparison in compare([record], TABLE)]
    assert [comparison.is_off for comparison in found] == [False, True, True, False, False, False]
    assert [comparison.deviation for comparison in found] == pytest.approx([0.09, 0.11, -0.11, 0, 0, 0])
    assert "+11.0 %  OFF by more than 10 %" in found[1].line
    skipped = [
        (measured(1, ranks_per_gpu=4), "share a GPU"), (measured(1, backend="eager"), "eager backend"),
        (measured(1, dtype="fp32"), "fp32"), (measured(1, model="tiny"), "not a public shape"),
        (measured(1, tp=2, comm="nccl"), "nccl"), (measured(1, device="1 x GTX 1080"), "GTX 1080"),
        (measured(1, "prefill", backend="eager"), "eager backend"), (measured(1, fp8_products="widened"), "are widened"),
        (measured(1, "prefill", step="kernels"), "replays a graph by now"),
    ]  # fmt: skip
    for record, why in skipped:
        (only,) = compare([record], TABLE)
        assert why in only.why_not and not only.is_off and "not compared" in only.line
    launched = measured(estimate(step="kernels", prompt=64).ttft_ms, "prefill", prompt=64, step="kernels", graph_tokens=0)
    (found,) = compare([launched], TABLE)
    assert found.deviation == pytest.approx(0)  # it was asked for
    assert gpu_of("8 x NVIDIA H100 80GB HBM3").name == "H100"


def test_the_last_record_of_a_case_counts():
    old, new = ({**measured(time_ms), "commit": commit} for time_ms, commit in ((9.0, "a"), (estimate().tpot_ms, "b")))
    others = [measured(estimate(batch=2).tpot_ms, batch=2), measured(estimate().ttft_ms, "prefill")]
    found = compare([old, *others, new], TABLE)
    assert found[0].why_not == "superseded by a newer record of the same case (b)" and not found[0].is_off
    assert not any(comparison.why_not or comparison.is_off for comparison in found[1:])
    assert compare([new, old], TABLE)[1].is_off  # by the order in the file


def run(*arguments: str):
    return CliRunner().invoke(main, [*arguments])


def test_check_command(tmp_path):
    (tmp_path / "all_reduce.jsonl").write_text((RESULTS / "all_reduce.jsonl").read_text())
    done = run("--check", "--results", str(tmp_path))
    assert done.exit_code == 0 and "no measured decode or prefill record" in done.output
    path = tmp_path / "decode.jsonl"
    path.write_text(json.dumps(measured(estimate().tpot_ms)) + "\n" + json.dumps({**measured(1.0), "kind": "projected"}) + "\n")
    speculated = {"bench": "speculate", "kind": "measured", "case": {"batch": 8, "requests": 32}, "metrics": {"speedup": 0.9}}
    (tmp_path / "speculate.jsonl").write_text(json.dumps(speculated) + "\n")
    done = run("--check", "--results", str(tmp_path))
    assert done.exit_code == 0 and "0 of 1 predictions" in done.output and "1 records read" in done.output
    path.write_text(path.read_text() + json.dumps(measured(3.0, batch=2)) + "\n")
    done = run("--check", "--results", str(tmp_path))
    assert done.exit_code == 1 and "1 of 2 predictions" in done.output
    path.write_text('{"bench": "decode", "kind": "measured"}\n')
    done = run("--check", "--results", str(tmp_path))
    assert done.exit_code == 2 and "decode.jsonl, line 1, is not a record" in done.output


def test_what_is_committed_is_predicted():
    """Every measured record that the model has words for, within the limit; and not because few of them are compared."""
    found = compare(load_measured(RESULTS), TABLE)
    assert not [comparison.line for comparison in found if comparison.is_off]
    assert sum(comparison.predicted_ms is not None for comparison in found) >= 20
