"""CUDA IPC, really tried: one process a GPU, each maps every other's memory, reads it and writes into it.

The driver's answers promise peer access; whether handles cross processes also depends on containers, virtual machines
and permissions, which only a trial shows. The trial does what the IPC heap does, in its order: one raw allocation of
2 MiB (smaller ones share their 2 MiB with strangers), handle, open, use, close by everyone, and only then free.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

from launch.probe_facts import IpcTrial
from launch.probe_gpus import ProbeFailed, ask, load_driver

_NUM_BYTES = 2 << 20
_SLOT_BYTES = 256  # a rank's own place in everybody's memory
_GRACE_S = 2.0  # for a process that was told to end; it has little more to do than to leave


class DeviceMemory(Protocol):
    """Memory of one device that other processes can map. Addresses are plain numbers; `fill` and `read` are 32-bit."""

    def allocate(self, num_bytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def open(self, handle: bytes) -> int: ...
    def close(self, address: int) -> None: ...
    def fill(self, address: int, word: int, num_words: int) -> None: ...
    def read(self, address: int, num_words: int) -> list[int]: ...


class CudaMemory:
    """`DeviceMemory` on GPU `index`, in the process's primary context. `cuMemAlloc` is what `cudaMalloc` calls."""

    def __init__(self, index: int):
        self._driver = driver = load_driver()
        device = ask(driver.cuDeviceGet, index)
        ask(driver.cuCtxSetCurrent, ask(driver.cuDevicePrimaryCtxRetain, device))

    def allocate(self, num_bytes: int) -> int:
        return int(ask(self._driver.cuMemAlloc, num_bytes))

    def free(self, address: int) -> None:
        ask(self._driver.cuMemFree, address)

    def export(self, address: int) -> bytes:
        handle = ask(self._driver.cuIpcGetMemHandle, address)
        return ctypes.string_at(handle.getPtr(), 64)  # CU_IPC_HANDLE_SIZE

    def open(self, handle: bytes) -> int:
        copy = self._driver.CUipcMemHandle()
        ctypes.memmove(copy.getPtr(), handle, len(handle))
        flag = self._driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(ask(self._driver.cuIpcOpenMemHandle, copy, int(flag)))

    def close(self, address: int) -> None:
        ask(self._driver.cuIpcCloseMemHandle, address)

    def fill(self, address: int, word: int, num_words: int) -> None:
        ask(self._driver.cuMemsetD32, address, word, num_words)
        ask(self._driver.cuCtxSynchronize)  # a memset of device memory does not wait for itself

    def read(self, address: int, num_words: int) -> list[int]:
        words = (ctypes.c_uint32 * num_words)()
        ask(self._driver.cuMemcpyDtoH, ctypes.addressof(words), address, 4 * num_words)
        return list(words)


def try_ipc(
    devices: Sequence[int], deadline_s: float = 60.0, open_memory: Callable[[int], DeviceMemory] = CudaMemory
) -> IpcTrial:
    """Run the trial with one process for each of `devices` (visible indices; twice the same for a single GPU).

    `deadline_s`: for everything; then the processes are killed. `open_memory`: made in each process from its device,
    importable there. Never raises for what the trial meets: the reason is in the result.
    """
    spawn = multiprocessing.get_context("spawn")  # a forked process could not use CUDA
    pipes = [spawn.Pipe() for _ in devices]
    workers = []
    try:
        for rank, device in enumerate(devices):
            arguments = (rank, len(devices), device, open_memory, pipes[rank][1])
            worker = spawn.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            workers.append(worker)
            pipes[rank][1].close()  # so that the death of the worker ends the wait for it
        _lead([parent for parent, _ in pipes], devices, time.monotonic() + deadline_s)
    except ProbeFailed as error:
        return IpcTrial(tuple(devices), False, str(error))
    finally:
        for parent, child in pipes:
            parent.close()
            child.close()
        _end(workers)
    return IpcTrial(tuple(devices), True, f"{len(devices)} processes mapped, read and wrote each other's 2 MiB")


def _lead(pipes: Sequence[Connection], devices: Sequence[int], end: float) -> None:
    """Take all workers through the phases together: nobody frees before everybody has closed."""
    handles = [_receive(pipe, device, end, "share its memory") for pipe, device in zip(pipes, devices)]
    for phase, message in (("use its peers' memory", handles), ("see its peers' writes", None)):
        for pipe, device in zip(pipes, devices):
            _send(pipe, device, message)
        for pipe, device in zip(pipes, devices):
            _receive(pipe, device, end, phase)


def _receive(pipe: Connection, device: int, end: float, phase: str) -> Any:
    if not pipe.poll(max(0.0, end - time.monotonic())):
        raise ProbeFailed(f"the process on GPU {device} did not {phase} in time")
    try:
        is_fine, value = pipe.recv()
    except (EOFError, OSError):
        raise ProbeFailed(f"the process on GPU {device} died when it should {phase}") from None
    if not is_fine:
        raise ProbeFailed(f"GPU {device}: {value}")
    return value


def _send(pipe: Connection, device: int, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError:
        raise ProbeFailed(f"the process on GPU {device} died") from None


def _end(workers: Sequence[Any]) -> None:
    end = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.join(max(0.0, end - time.monotonic()))
        if worker.is_alive():
            worker.kill()
            worker.join()


def _work(rank: int, size: int, device: int, open_memory: Callable[[int], DeviceMemory], pipe: Connection) -> None:
    try:
        memory = open_memory(device)
        mine = memory.allocate(_NUM_BYTES)
        memory.fill(mine, _word(rank, rank), _NUM_BYTES // 4)
        pipe.send((True, memory.export(mine)))
        for peer, handle in enumerate(pipe.recv()):
            if peer != rank:
                _visit(memory, handle, rank, peer)
        pipe.send((True, None))
        pipe.recv()  # everybody has closed
        for peer in range(size):
            _expect(memory, mine + peer * _SLOT_BYTES, _word(rank, peer), f"what process {peer} wrote is not there")
        memory.free(mine)
        pipe.send((True, None))
    except EOFError:
        return  # the leader gave up
    except Exception as error:
        pipe.send((False, str(error) or repr(error)))


def _visit(memory: DeviceMemory, handle: bytes, rank: int, peer: int) -> None:
    theirs = memory.open(handle)
    own_slot = theirs + peer * _SLOT_BYTES  # which only the peer itself writes
    _expect(memory, own_slot, _word(peer, peer), f"the memory of process {peer} does not hold what it wrote")
    memory.fill(theirs + rank * _SLOT_BYTES, _word(peer, rank), _SLOT_BYTES // 4)
    memory.close(theirs)


def _expect(memory: DeviceMemory, address: int, word: int, complaint: str) -> None:
    if memory.read(address, _SLOT_BYTES // 4) != [word] * (_SLOT_BYTES // 4):
        raise ProbeFailed(complaint)


def _word(owner: int, writer: int) -> int:
    """What `writer` leaves in the memory of `owner`: different for each pair, and never zero."""
    return 0x50000000 | owner << 8 | writer
