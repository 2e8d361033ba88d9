"""From files to a GPU: pinned buffers that take turns, so that one is read into while the other travels."""

from __future__ import annotations

import torch

STAGING_BYTES = 64 << 20  # of one buffer: a millisecond of PCIe, long against the cost of a copy


class Staging:
    """Two pinned buffers of `STAGING_BYTES` for copies to `device`. One thread, one stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._departures = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def put(self, out: torch.Tensor, block: torch.Tensor) -> None:
        """Copy `block`, in host memory, to `out` on the GPU, of the same shape. Either may be of any dtype and strides.

        *Stream*: queued on torch's current stream; `block` may be reused at once, `out` only on that stream. *Numbers*: converted
        on the GPU, rounded to nearest even.
        """
        if block.numel() * block.element_size() > STAGING_BYTES:  # a single row; see BLOCK_BYTES of engine/checkpoint.py
            out.copy_(block)
            return
        self._turn ^= 1
        departure = self._departures[self._turn]
        departure.synchronize()  # what was last in this buffer has left
        pinned = self._buffers[self._turn][: block.numel() * block.element_size()].view(block.dtype).view(block.shape)
        pinned.copy_(block)
        out.copy_(pinned.to(self._device, non_blocking=True))
        departure.record()
