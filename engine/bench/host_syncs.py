"""How often the host waits for the GPU inside torch's own calls: copies from the device, `.item()`, and the like."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

_TEXT = "called a synchronizing CUDA operation"  # torch warns with these words, once a call, in its debug mode


def count_host_syncs(body: Callable[[], object]) -> int | None:
    """Run `body` in torch's synchronisation debug mode and count the waits of this process. None if CUDA is not in use.

    Waits on memory that a kernel writes, and on events, are not torch's and not counted. Slow: never time `body` here.
    """
    if not torch.cuda.is_initialized():
        body()
        return None
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            body()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum(_TEXT in str(warning.message) for warning in caught)
