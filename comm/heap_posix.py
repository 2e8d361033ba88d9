"""A symmetric heap in POSIX shared memory: one file in /dev/shm per rank, mapped by all ranks of one machine.

A file has a name only between its creation and the moment all ranks have mapped it, so a run that is killed later
leaves nothing behind. One that dies within that moment leaves a file whose creator's lock is gone; the next start
sweeps it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path

import torch

from comm.agreement import Exchange, agree
from comm.heap import Layout, SymmetricHeap
from comm.words import Words
from launch.errors import DoorbellError, HeapExhausted

SHM_FOLDER = Path("/dev/shm")
_PREFIX = "doorbell-"


class PosixHeap(SymmetricHeap):
    """`SymmetricHeap` of the ranks of one machine.

    *Collective*: all ranks construct it, with equal `layout`. Either all succeed or all raise.
    *Raises* `HeapExhausted` when /dev/shm is too small, `DoorbellError` when the ranks do not share a /dev/shm.
    *Source*: unlink-after-map and locks that the kernel drops are old Unix practice.
    """

    kind = "posix"

    def __init__(
        self, rank: int, size: int, run_id: str, layout: Layout, exchange: Exchange, folder: Path = SHM_FOLDER
    ):
        self.rank, self.size, self.layout = rank, size, layout
        self._maps: list[mmap.mmap] = []
        sweep(folder)
        segment: _Segment | None = None
        failure: Exception | None = None
        try:
            segment = _Segment.create(folder, run_id, rank, layout.num_bytes, size)
        except (OSError, HeapExhausted) as error:
            failure = error
        try:
            agree(exchange, failure)
            paths = exchange(str(segment.path))
            try:
                self._maps = [
                    segment.map if peer == rank else _map(Path(path), layout.num_bytes)
                    for peer, path in enumerate(paths)
                ]
            except OSError as error:
                failure = DoorbellError(f"rank {rank} cannot see another rank's shared memory ({error.strerror})")
            agree(exchange, failure)
        finally:
            if segment is not None:
                segment.unlink()

    def tensor(self, peer: int, name: str) -> torch.Tensor:
        span = self.layout.span(name)
        return torch.frombuffer(self._maps[peer], dtype=torch.uint8, offset=span.start, count=span.stop - span.start)

    def words(self, peer: int, name: str) -> Words:
        """Region `name` of rank `peer` as signal words."""
        return Words(memoryview(self._maps[peer])[self.layout.span(name)])

    def close(self) -> None:
        # The mappings go with the last tensor or word array over them: unmapping under a live view would be a crash.
        self._maps = []


class _Segment:
    """A locked, allocated and mapped file of ours that still has its name."""

    def __init__(self, path: Path, fd: int, mapping: mmap.mmap):
        self.path, self.map, self._fd = path, mapping, fd

    @classmethod
    def create(cls, folder: Path, run_id: str, rank: int, num_bytes: int, size: int) -> _Segment:
        path, fd = _create_locked(folder, run_id, rank)
        try:
            # Writing to a hole in a full tmpfs is SIGBUS; allocating up front makes it an error with a number in it.
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(path, fd, mmap.mmap(fd, num_bytes))
        except OSError as error:
            path.unlink(missing_ok=True)
            os.close(fd)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
                raise HeapExhausted(_exhausted(folder, num_bytes, size)) from None
            raise

    def unlink(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._fd)


def _exhausted(folder: Path, num_bytes: int, size: int) -> str:
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return (
        f"shared memory in {folder} is too small: {size} ranks need {num_bytes} bytes each, {num_bytes * size} in all, "
        f"and {free} are free; give the container more with `docker run --shm-size=1g` (or --ipc=host)"
    )


def _create_locked(folder: Path, run_id: str, rank: int) -> tuple[Path, int]:
    label = re.sub(r"[^A-Za-z0-9]", "", run_id)[:32] or "run"
    while True:
        path = folder / f"{_PREFIX}{label}-{os.getpid()}-{rank}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                return path, fd
        except FileNotFoundError:
            pass  # another start swept the file in the instant before we held its lock: take a new name
        os.close(fd)


def sweep(folder: Path = SHM_FOLDER) -> list[Path]:
    """Remove segments whose creator is gone, and return their paths.

    The creator holds a lock on its file as long as the file has a name, and the kernel drops the lock with the process.
    That holds across containers that share /dev/shm, where a pid in a name says nothing.
    """
    removed = []
    for path in folder.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone already, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass  # its creator lives
        finally:
            os.close(fd)
    return removed


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(fd, num_bytes)
    finally:
        os.close(fd)
