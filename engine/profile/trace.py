"""A profile as a file in the Chrome trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A line a kind of step. A step that was timed is a block with its rows and tokens; a profiled one has its stages within, with their
layers. Times are those of the device, in us since the first timed step.
"""

from __future__ import annotations

import json
from pathlib import Path

from engine.profile.profile import Profile
from engine.profile.table import TITLES
from engine.profile.timed_step import KINDS, TimedStep


def trace_events(profile: Profile, rank: int) -> list[dict[str, object]]:
    """Metadata, then a complete event (`ph` "X") a step and a stage. `rank` is the process, the kind of step the thread."""
    events: list[dict[str, object]] = [_metadata("process_name", rank, 0, f"rank {rank}")]
    events += [_metadata("thread_name", rank, KINDS.index(kind), TITLES[kind]) for kind in profile.kinds]
    for step in profile.steps:
        events += _step_events(step, rank)
    return events


def write_trace(profile: Profile, rank: int, path: Path) -> None:
    """With the sums of the profile under `otherData`. *Raises* OSError."""
    document = {"traceEvents": trace_events(profile, rank), "displayTimeUnit": "ns", "otherData": profile.as_record()}
    path.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _step_events(step: TimedStep, pid: int) -> list[dict[str, object]]:
    work = step.work
    place = {"ph": "X", "cat": work.kind, "pid": pid, "tid": KINDS.index(work.kind)}
    step_end = step.start_us + step.wall_us

    def event(name: str, start_us: float, end_us: float, args: dict[str, object]) -> dict[str, object]:
        # Whole ns, or a stage could end after its step, and viewers drop what is not nested.
        first, last = round(1e3 * start_us), round(1e3 * min(end_us, step_end))
        return {**place, "name": name, "ts": first / 1e3, "dur": (last - first) / 1e3, "args": args}

    name = "step" if step.spans else "step without events"
    events = [event(name, step.start_us, step_end, {"rows": work.num_rows, "tokens": work.num_tokens})]
    for span in step.spans:
        start = step.start_us + span.start_us
        events.append(event(span.stage, start, start + span.us, {} if span.layer_idx is None else {"layer": span.layer_idx}))
    return events
