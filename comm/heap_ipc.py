"""A symmetric heap on GPUs of one machine: a raw `cudaMalloc` slab a rank, shared by CUDA IPC. The only file with IPC handles.

The slab never comes from torch's or cupy's allocator: those hand out interior pointers, pools and expandable segments, none of
which can be exported. Its size is a multiple of 2 MiB, because a smaller allocation may share its block, and IPC shares the
whole block. Raw addresses mean nothing to another process; only handles are exchanged.

Closing is ordered: freeing memory that a peer still has mapped is undefined. `close` says so to the peers and waits for them;
`abandon` is for when they are gone, and leaves the unmapping to the end of the process.
"""

from __future__ import annotations

from comm.agreement import Exchange, agreed
from comm.heap import DeviceHeap, Layout
from launch.errors import HeapExhausted

SLAB_MULTIPLE = 2 << 20


class IpcHeap(DeviceHeap):
    """`DeviceHeap` of ranks that may share a GPU or have one each. *Collective*: all ranks construct it with equal `layout`.

    `device`: index of this rank's GPU. Either all ranks succeed or all raise.
    *Raises* `HeapExhausted` when the GPU has no room, `DoorbellError` when a handle cannot be made or opened (another container,
    no peer access).
    """

    kind = "ipc"

    def __init__(self, rank: int, size: int, device: int, layout: Layout, exchange: Exchange):
        import cupy

        self.rank, self.size, self.layout, self.device = rank, size, layout, device
        self._runtime, self._exchange = cupy.cuda.runtime, exchange
        self._bases: list[int] = [0] * size
        num_bytes = -(-layout.num_bytes // SLAB_MULTIPLE) * SLAB_MULTIPLE
        with cupy.cuda.Device(device):
            errors = (self._runtime.CUDARuntimeError,)
            handle = agreed(exchange, "CUDA IPC", lambda: self._allocate(num_bytes), errors)
            handles = exchange(handle)
            agreed(exchange, "CUDA IPC", lambda: self._open(handles), errors)

    def address(self, peer: int, name: str) -> int:
        return self._bases[peer] + self.layout.offsets[name]

    def close(self) -> None:
        if not any(self._bases):
            return
        self._runtime.deviceSynchronize()
        self._exchange(None)  # nobody's kernels touch the slabs from here on
        for peer, base in enumerate(self._bases):
            if base and peer != self.rank:
                self._runtime.ipcCloseMemHandle(base)
        self._exchange(None)  # every importer has let go
        self._runtime.free(self._bases[self.rank])
        self._bases = [0] * self.size

    def fill(self, name: str, byte: int) -> None:
        span = self.layout.span(name)
        self._runtime.memset(self.address(self.rank, name), byte, span.stop - span.start)
        self._runtime.deviceSynchronize()

    def abandon(self) -> None:
        self._bases = [0] * self.size

    def _allocate(self, num_bytes: int) -> str:
        try:
            base = self._runtime.malloc(num_bytes)
        except self._runtime.CUDARuntimeError as error:
            free, _ = self._runtime.memGetInfo()
            raise HeapExhausted(
                f"a symmetric heap of {num_bytes >> 20} MiB does not fit GPU {self.device}, which has {free >> 20} MiB free"
            ) from error
        self._bases[self.rank] = base
        self._runtime.memset(base, 0, num_bytes)
        self._runtime.deviceSynchronize()
        return self._runtime.ipcGetMemHandle(base).hex()

    def _open(self, handles: list[str]) -> None:
        for peer, handle in enumerate(handles):
            if peer != self.rank:
                self._bases[peer] = self._runtime.ipcOpenMemHandle(bytes.fromhex(handle))
