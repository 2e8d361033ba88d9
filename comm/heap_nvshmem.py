"""A symmetric heap that NVSHMEM allocates and maps, for machines where CUDA IPC does not work. The only file that calls NVSHMEM.

NVSHMEM serves as an allocator here: it starts, allocates once, and says where the peers' memory is mapped. Our own kernels do the
rest, so no device code of NVSHMEM is linked, and multicast stays off.

It is called through `nvshmem.bindings` of nvshmem4py, not through `nvshmem.core`: that rewires logging to stdout and may ask the
name server while it starts, and takes a failed start for a good one (the library returns success, only its status tells).

Hazards: NVSHMEM ends the process (exit code 255, a line on stderr) on errors that it thinks fatal, such as a missing driver;
what can be looked at is checked before. Its calls wait for all ranks. Its start is given a deadline; allocating, freeing and
finalising hold the interpreter lock and cannot be given one, so all ranks meet right before each of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import ModuleType

import torch

from comm.agreement import Exchange, agreed
from comm.heap import DeviceHeap, Layout
from launch.environment import prepare_nvshmem
from launch.errors import DoorbellError, HeapExhausted

START_DEADLINE_S = 60.0  # a start takes about 4 s
_GRANULE = 512 << 20  # bytes; NVSHMEM takes GPU memory in such steps (its CUMEM_GRANULARITY), one of them for itself


class NvshmemHeap(DeviceHeap):
    """`DeviceHeap` of ranks of one machine. *Collective*: all ranks construct it with equal `layout`.

    `device`: index of this rank's GPU. `deadline_s`: for NVSHMEM's start. Ranks may share GPUs, equally many on each and at equal
    distances (ranks 0 and 2, 1 and 3). Under MPS they run side by side, without it they take turns.

    One heap a process at a time, and not beside torch's own NVSHMEM backend: both would start and end the same library. It may be
    opened again after `close`, not after `abandon`. Either all ranks succeed or all raise.

    *Cost*: GPU memory in steps of 512 MiB, at most two more than the layout fills.
    *Raises* `HeapExhausted` when the GPU has no room, `DoorbellError` when NVSHMEM is missing or in use, does not start, or does
    not map a peer's memory. After a failed start NVSHMEM stays as it is until the end of the process.
    """

    kind = "nvshmem"

    def __init__(
        self,
        rank: int,
        size: int,
        device: int,
        layout: Layout,
        exchange: Exchange,
        deadline_s: float = START_DEADLINE_S,
    ):
        import cupy

        self.rank, self.size, self.layout, self.device = rank, size, layout, device
        self._runtime, self._exchange = cupy.cuda.runtime, exchange
        self._bases: list[int] = [0] * size
        prepare_nvshmem(layout.num_bytes)
        with cupy.cuda.Device(device):
            self._nvshmem = self._agreed(_load_bindings)
            places = exchange(self._agreed(lambda: self._runtime.deviceGetPCIBusId(device)))
            self._agreed(lambda: _check_places(places))
            self._agreed(lambda: self._check_room(places.count(places[rank])))
            unique_id = bytes.fromhex(exchange(self._agreed(self._make_unique_id))[0])
            self._agreed(lambda: _run_within(deadline_s, lambda: self._start(unique_id)))
            self._bases = self._agreed(self._allocate)

    def address(self, peer: int, name: str) -> int:
        return self._bases[peer] + self.layout.offsets[name]

    def close(self) -> None:
        if not any(self._bases):
            return
        import cupy

        with cupy.cuda.Device(self.device):
            self._runtime.deviceSynchronize()
            self._exchange(None)  # nobody's kernels touch the heap from here on, and all are here to free it
            self._nvshmem.free(self._bases[self.rank])
            self._nvshmem.hostlib_finalize()
        self._bases = [0] * self.size

    def fill(self, name: str, byte: int) -> None:
        span = self.layout.span(name)
        self._runtime.memset(self.address(self.rank, name), byte, span.stop - span.start)
        self._runtime.deviceSynchronize()

    def abandon(self) -> None:
        self._bases = [0] * self.size

    def _check_room(self, ranks_here: int) -> None:
        """NVSHMEM would end the process, or leave the peers waiting, where memory is short; so ask before it starts."""
        free, _ = self._runtime.memGetInfo()
        num_bytes = ranks_here * (_GRANULE + -(-self.layout.num_bytes // _GRANULE) * _GRANULE)
        if free < num_bytes:
            sharing = f" of {ranks_here} ranks" if ranks_here > 1 else ""
            raise HeapExhausted(
                f"NVSHMEM heaps{sharing} of {num_bytes >> 20} MiB do not fit GPU {self.device}, which has {free >> 20} MiB free"
            )

    def _make_unique_id(self) -> str:
        """Where the ranks will meet, as hexadecimal; from rank 0, which listens there from now on."""
        if self._nvshmem.init_status() != self._nvshmem.Init_status.STATUS_NOT_INITIALIZED:
            raise DoorbellError("NVSHMEM is in use in this process already, by another heap or by torch's own NVSHMEM backend")
        if self.rank != 0:
            return ""
        unique_id = self._nvshmem.uniqueid()
        self._call(self._nvshmem.get_uniqueid, unique_id.ptr)
        return ctypes.string_at(unique_id.ptr, self._nvshmem.uniqueid_dtype.itemsize).hex()

    def _start(self, unique_id: bytes) -> None:
        """Runs on a thread of its own, which has no current GPU yet."""
        import cupy

        nvshmem = self._nvshmem
        meeting, attributes = nvshmem.uniqueid(), nvshmem.InitAttr()
        ctypes.memmove(meeting.ptr, unique_id, len(unique_id))
        # It comes uninitialised, and the library takes a version and perhaps a GPU from it; zero means the current GPU.
        ctypes.memset(attributes.ptr, 0, nvshmem.init_attr_dtype.itemsize)
        with cupy.cuda.Device(self.device):
            self._runtime.free(0)  # makes the context current, which NVSHMEM asks the driver for
            self._call(nvshmem.set_attr_uniqueid_args, self.rank, self.size, meeting.ptr, attributes.ptr)
            self._call(nvshmem.hostlib_init_attr, nvshmem.Flags.INIT_WITH_UNIQUEID, attributes.ptr)
        if nvshmem.init_status() < nvshmem.Init_status.STATUS_IS_INITIALIZED:
            raise DoorbellError("it did not start; NVSHMEM_DEBUG=INFO makes it say why")

    def _allocate(self) -> list[int]:
        """Zeroed, and mapped by all: the agreement after it is the barrier between zeroing and a peer's first store."""
        self._runtime.free(0)  # as in `_start`, for this thread
        base = self._nvshmem.malloc(self.layout.num_bytes)
        if not base:
            raise HeapExhausted(f"it refused to allocate {self.layout.num_bytes >> 20} MiB on GPU {self.device}")
        bases = [base if peer == self.rank else self._nvshmem.ptr(base, peer) for peer in range(self.size)]
        if 0 in bases:
            raise DoorbellError(f"GPU {self.device} cannot reach the memory of rank {bases.index(0)}")
        self._runtime.memset(base, 0, self.layout.num_bytes)
        self._runtime.deviceSynchronize()
        return bases

    def _call(self, function: Callable[..., None], *args: int) -> None:
        try:
            function(*args)
        except self._nvshmem.NVSHMEMError as error:
            raise DoorbellError(f"{function.__name__}: {error}") from error

    def _agreed(self, attempt: Callable):
        # RuntimeError: of CUDA through cupy, or of the loader that does not find a library or a function in it.
        return agreed(self._exchange, "NVSHMEM", attempt, (RuntimeError,))


def _load_bindings() -> ModuleType:
    """The bindings, with NVSHMEM's library in the process: the copy that torch brought, if it is there already."""
    try:
        import nvshmem.bindings as nvshmem
        from cuda.pathfinder import load_nvidia_dynamic_lib
    except ImportError as error:
        package = f"nvshmem4py-cu{(torch.version.cuda or '13').split('.')[0]}"
        if (error.name or "").split(".")[0] == "nvshmem":
            raise DoorbellError(f"nvshmem4py is not installed: pip install {package}") from error
        raise DoorbellError(f"nvshmem4py cannot be imported ({error}): pip install {package}") from error
    load_nvidia_dynamic_lib("nvshmem_host")
    return nvshmem


def _check_places(places: list[str]) -> None:
    """`places`: each rank's GPU. NVSHMEM makes a team of the ranks of a GPU, and ends the process where it cannot."""
    for place in places:
        ranks = [rank for rank, other in enumerate(places) if other == place]
        steps = {second - first for first, second in zip(ranks, ranks[1:])}
        if len(ranks) != places.count(places[0]) or len(steps) > 1:
            raise DoorbellError("it needs equally many ranks on each GPU, at equal distances")


def _run_within(deadline_s: float, attempt: Callable[[], None]) -> None:
    """Run `attempt` and raise what it raises; *raises* `DoorbellError` after `deadline_s`, and leaves its thread to itself."""
    outcome: list[Exception | None] = []

    def run() -> None:
        try:
            attempt()
            outcome.append(None)
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="nvshmem-start", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if not outcome:
        raise DoorbellError(f"it did not start within {deadline_s:g} s")
    if outcome[0] is not None:
        raise outcome[0]
