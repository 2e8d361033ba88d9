"""A measured record: one line of `results/<bench>.jsonl`, with all that is needed to run it again."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

import torch
import transformers

from engine.version import VERSION
from launch.machine import cpu_name


@dataclass(frozen=True)
class Record:
    """`case` fixes the work; `metrics` have their units in their names; `ceiling` and `peer` are what to hold them against."""

    bench: str
    case: Mapping[str, object]
    metrics: Mapping[str, float]
    ceiling: Mapping[str, float]
    peer: Mapping[str, object]
    checked: bool
    kind: str = "measured"

    def append_to(self, path: Path, device: str, module: str, num_ranks: int = 1) -> None:
        """Add the record to `path`. `module`, `num_ranks`: how the bench was started, which `sys.argv` does not hold."""
        launcher = "python" if num_ranks == 1 else f"torchrun --standalone --nproc-per-node {num_ranks}"
        record = {
            "bench": self.bench,
            "case": dict(self.case),
            "metrics": {name: round(value, 4) for name, value in self.metrics.items()},
            "ceiling": {name: round(value, 4) for name, value in self.ceiling.items()},
            "peer": dict(self.peer),
            "kind": self.kind,
            "checked": self.checked,
            "device": device,
            "versions": versions(),
            "commit": commit(),
            "command": f"{launcher} -m {module} {shlex.join(sys.argv[1:])}".strip(),
            "date": datetime.now(timezone.utc).date().isoformat(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def versions() -> dict[str, str]:
    return {
        "doorbell": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


@cache
def commit() -> str:
    """The commit that was measured, marked if the tree differs from it; `unknown` outside a checkout.

    Looked up once: a bench calls it at its start, because the tree may move on while it runs.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), capture_output=True, text=True, check=True).stdout.strip()

    try:
        is_changed = bool(git("status", "--porcelain", "--untracked-files=no"))
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if is_changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def cpu_device() -> str:
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
