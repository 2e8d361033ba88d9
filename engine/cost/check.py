"""The predictions held against every measured decode and prefill record."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from engine.bench.load import Case
from engine.cost.all_reduce import AllReduceTable
from engine.cost.estimate import Estimate
from engine.cost.gpus import gpu_of
from engine.cost.setting import GRAPH, KERNELS
from engine.shapes import SHAPES
from launch.errors import UsageError

TIMES = {"decode": "tpot_ms", "prefill": "ttft_ms"}
LIMIT = 0.10  # of the measured time


@dataclass(frozen=True)
class Comparison:
    """A record's time and the predicted one, ms; or `why_not`, where there is nothing to compare."""

    label: str
    measured_ms: float
    predicted_ms: float | None
    why_not: str = ""

    @property
    def deviation(self) -> float:
        """Of the prediction, as a share of the measured time; 0 where there is none."""
        return 0.0 if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1

    @property
    def is_off(self) -> bool:
        return abs(self.deviation) > LIMIT

    @property
    def line(self) -> str:
        if self.predicted_ms is None:
            return f"{self.label}: {self.measured_ms:.3f} ms; not compared: {self.why_not}"
        flag = f"  OFF by more than {100 * LIMIT:.0f} %" if self.is_off else ""
        return f"{self.label}: {self.measured_ms:.3f} ms, predicted {self.predicted_ms:.3f}, {100 * self.deviation:+.1f} %{flag}"


def load_measured(folder: Path) -> list[Mapping[str, Any]]:
    """The measured decode and prefill records in the JSONL files of `folder`. *Raises* `UsageError` naming a bad line."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                if record["bench"] in TIMES and record["kind"] == "measured":
                    _ = record["case"], record["device"], record["metrics"][TIMES[record["bench"]]]
                    found.append(record)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path}, line {number}, is not a record: {error!r}") from None
    return found


def compare(records: Iterable[Mapping[str, Any]], all_reduce: AllReduceTable) -> list[Comparison]:
    """One comparison a record, in their order. Of records of the same case on the same GPUs the last one counts."""
    found = list(records)
    newest = {_key(record): record for record in found}
    return [_compare(record, newest[_key(record)], all_reduce) for record in found]


def _key(record: Mapping[str, Any]) -> str:
    return json.dumps([record["bench"], record["device"], record["case"]], sort_keys=True)


def _compare(record: Mapping[str, Any], newest: Mapping[str, Any], all_reduce: AllReduceTable) -> Comparison:
    case, time = record["case"], TIMES[record["bench"]]
    words = ", ".join(f"{name} {value}" for name, value in case.items() if name != "model")
    label = f"{record['bench']} {case.get('model')} ({words}; {record.get('commit')})"
    measured_ms, why_not = record["metrics"][time], _obstacle(record)
    if not why_not and newest is not record:
        why_not = f"superseded by a newer record of the same case ({newest.get('commit')})"
    if why_not:
        return Comparison(label, measured_ms, None, why_not)
    known = Case(**{field.name: case[field.name] for field in fields(Case)})
    has_peers = known.tp > 1 and case["comm"] != "loopback"

    def estimated(step: str) -> Estimate:
        return Estimate.of(known, known.model, gpu_of(record["device"]), all_reduce, has_peers, step)

    estimate = estimated(case.get("step", ""))
    # Without `graph_tokens` in its case, the engine's rule of that day chose how to start the step.
    if estimate.step == KERNELS and "graph_tokens" not in case and estimated("").step == GRAPH:
        return Comparison(label, measured_ms, None, "launched kernel by kernel, where the engine replays a graph by now")
    return Comparison(label, measured_ms, getattr(estimate, time))


def _obstacle(record: Mapping[str, Any]) -> str:
    """Why the model says nothing about `record`; empty where it does."""
    case = record["case"]
    absent = [name for name in (*(field.name for field in fields(Case)), "backend", "comm") if name not in case]
    if absent:
        return f"its case lacks {', '.join(absent)}"
    rules = (
        (gpu_of(record["device"]) is None, f"no datasheet of {record['device']}"),
        (case["model"] not in SHAPES, "not a public shape"),
        (case["dtype"] not in ("bf16", "fp8"), f"no constants for {case['dtype']}"),
        (case.get("fp8_products", "scaled") != "scaled", f"FP8 matrices are {case.get('fp8_products')}"),
        (case["ranks_per_gpu"] != 1, "ranks share a GPU"),
        (case["backend"] != "graph", f"no constants for the {case['backend']} backend"),
        (case["tp"] > 1 and case["comm"] not in ("ipc", "nvshmem", "loopback"), f"no constants for {case['comm']}"),
    )
    return next((reason for is_true, reason in rules if is_true), "")
