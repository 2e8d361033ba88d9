"""Worlds of their own for a bench: a module as a fresh process, or torchrun with several, that prints its result and ends.

What such a world leaves behind (memory of a GPU, connections, a peer that fails) cannot touch the next one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence

END_S = 30.0  # for a run that is told to end


def world_command(module: str, tp: int, options: Mapping[str, object]) -> list[str]:
    """The command that starts `module` on `tp` ranks, with `options` by their names on the command line."""
    torchrun = [] if tp == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    return [sys.executable, *torchrun, "-m", module, *(f"--{name}={value}" for name, value in options.items())]


def run_world(command: Sequence[str], timeout_s: float, wanted: str, variables: Mapping[str, str] | None = None) -> dict:
    """Start `command`, wait for its end, and return the JSON object that is the last line it printed.

    `wanted`: what it is for, in words; `variables`: its environment, None for this process's own. *Raises* SystemExit if it
    failed, which it has said itself, or took longer than `timeout_s` seconds.
    """
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun passes it on to its ranks
            try:
                process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            sys.exit(f"a run had no {wanted} after {timeout_s:g} s")
    if process.returncode:
        sys.exit(process.returncode)
    return json.loads(printed.splitlines()[-1])
