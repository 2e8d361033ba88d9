"""Channels by which rank 0 hands the drafts of a step to every other rank: put-with-signal inside of the step's graph.

They wait in the kernel unless told otherwise. A host that waits for tokens, as the engine's does, and not through
`StreamDeadline.synchronize`, says what it launches (`DeviceSignalChannel.note_launch`): a wait of a stream has no other deadline.
"""

from __future__ import annotations

from typing import Any

from comm.device_signal import DeviceSignalChannel
from comm.device_watch import DeviceWatch
from comm.heap import DeviceHeap, Region
from comm.stream_deadline import StreamDeadline

MAX_DRAFT_BYTES = 2048  # of a message: 16 rows of 16 ids of 8 bytes


def draft_regions(size: int) -> tuple[Region, ...]:
    """What the channels of `size` ranks need of the heap."""
    return tuple(region for peer in range(1, size) for region in DeviceSignalChannel.regions(stem_of(peer), MAX_DRAFT_BYTES))


def open_draft_channels(
    heap: DeviceHeap,
    watch: DeviceWatch,
    kernels: Any,
    is_pdl: bool,
    wait: str = "kernel",
    deadline: StreamDeadline | None = None,
) -> list[DeviceSignalChannel]:
    """On rank 0 one to each other rank, in order; on these the one from rank 0. `kernels`: of `load_signal`.

    `wait`, `deadline`: of `DeviceSignalChannel`, the former equal on all ranks. *Raises* `ValueError` as that does.
    """
    peers = range(1, heap.size) if heap.rank == 0 else (heap.rank,)
    return [
        DeviceSignalChannel(heap, watch, kernels, stem_of(peer), 0, peer, wait, deadline=deadline, is_pdl=is_pdl)
        for peer in peers
    ]


def stem_of(peer: int) -> str:
    """Of the regions of the channel to `peer`."""
    return f"drafts_to_{peer}"
