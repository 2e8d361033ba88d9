"""How often the host waits for the GPU inside torch's own calls (`.item()`, `torch.cuda.synchronize` and the like), and how often
the GPU copies to it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

_COPY = "Memcpy DtoH"  # how the profiler names a copy from the device to the host, by whatever call, also in a graph
_TEXT = "called a synchronizing CUDA operation"  # torch warns with these words, once a call, in its debug mode


class HostSyncCount:
    """Counts the waits of this process from now until `stop`, in torch's synchronisation debug mode.

    That mode passes over `torch.cuda.synchronize`, so its calls are counted beside it. Waits on memory that a kernel writes, and
    on events, are not torch's and not counted. What waits gets slower meanwhile: its times are not to be used.
    """

    def __init__(self) -> None:
        self._before = torch.cuda.get_sync_debug_mode()
        self._catcher = warnings.catch_warnings(record=True)
        self._caught = self._catcher.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        self._synchronize, self._num_whole = torch.cuda.synchronize, 0
        torch.cuda.synchronize = self._counted_synchronize

    def stop(self) -> int:
        """The waits. Puts the mode, the warnings and torch's function back as they were."""
        torch.cuda.synchronize = self._synchronize
        torch.cuda.set_sync_debug_mode(self._before)
        self._catcher.__exit__(None, None, None)
        return self._num_whole + sum(_TEXT in str(warning.message) for warning in self._caught)

    def _counted_synchronize(self, device: Any = None) -> None:
        self._num_whole += 1
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")  # so that no torch counts it twice
        try:
            self._synchronize(device)
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def count_host_syncs(body: Callable[[], object]) -> int | None:
    """Run `body` and count its waits. None if CUDA is not in use. Never time `body` here."""
    if not torch.cuda.is_initialized():
        body()
        return None
    count = HostSyncCount()
    try:
        body()
    finally:
        num_syncs = count.stop()
    return num_syncs


def count_host_copies(body: Callable[[], object]) -> int | None:
    """Run `body` under torch's profiler and count the copies from the GPU to the host. None if CUDA is not in use, or where the
    profiler does not see copies, which is tried on one of its own.

    What kernels write to the host's memory themselves is no copy. Slow: never time `body` here.
    """
    if not torch.cuda.is_initialized():
        body()
        return None
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        torch.ones(1, device="cuda").cpu()
        body()
        torch.cuda.synchronize()
    num_copies = sum(event.name.startswith(_COPY) for event in profiler.events())
    return num_copies - 1 if num_copies else None
