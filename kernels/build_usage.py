"""What each kernel of a cubin takes of an SM, read from the compiler's log."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass(frozen=True)
class KernelUsage:
    """One kernel: `num_registers` a thread; bytes a thread of stack, and of registers spilled to it (stores and loads
    together, as the compiler counts them); `shared_bytes` a block, static only."""

    name: str
    num_registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


def kernel_usages(log: str) -> list[KernelUsage]:
    """The kernels that ptxas reports in `log` (option `--ptxas-options=--verbose`), in the order of their names.

    Functions that are not inlined have properties of their own in the log; their spills count for the kernel above.
    *Raises* `ValueError` when a report is not of the form known here.
    """
    head, *reports = _ENTRY.split(log)
    usages = []
    for name, report in zip(reports[::2], reports[1::2]):
        frames, used, shared = _STACK.findall(report), _REGISTERS.search(report), _SHARED.search(report)
        if not frames or used is None:
            raise ValueError(f"the compiler's report on {name} is not understood: {report.strip()!r}")
        stack = max(int(frame[0]) for frame in frames)
        spills = sum(int(frame[1]) + int(frame[2]) for frame in frames)
        usages.append(KernelUsage(name, int(used[1]), stack, spills, int(shared[1]) if shared else 0))
    return sorted(usages, key=lambda usage: usage.name)
