"""Built kernels on disk, shared by all processes of a user: written once, read by all, never half there.

An entry is published by renaming a complete file, carries its length and digest, and is built under a lock of the
kernel's (`flock`), which a process that dies gives up. Everything here is an optimisation: a folder that cannot be
written, a full disk or a lock that is not given up in time costs time, said once, and never the result.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MAGIC = b"DRBLKRN1"
_HEADER = struct.Struct("<8sQQ32s")  # magic, bytes of cubin, bytes of log, SHA-256 of name, cubin and log
_LEFTOVER_S = 3600.0  # a temporary file this old was left by a process that died; no build takes an hour
_POLL_S = 0.02


@dataclass(frozen=True)
class Built:
    """A compiled source: `cubin` (ELF image) and the compiler's `log`, with the resources that each kernel uses."""

    cubin: bytes
    log: str

    def pack(self, name: str) -> bytes:
        """The bytes of the entry `name`."""
        log = self.log.encode()
        return _HEADER.pack(_MAGIC, len(self.cubin), len(log), _digest(name, self.cubin, log)) + self.cubin + log

    @classmethod
    def unpack(cls, name: str, data: bytes) -> Built | None:
        """What `pack` made, or None when `data` is anything else: cut short, damaged, another entry, another format."""
        if len(data) < _HEADER.size:
            return None
        magic, cubin_bytes, log_bytes, digest = _HEADER.unpack_from(data)
        body = data[_HEADER.size :]
        if magic != _MAGIC or len(body) != cubin_bytes + log_bytes:
            return None
        cubin, log = body[:cubin_bytes], body[cubin_bytes:]
        return cls(cubin, log.decode()) if digest == _digest(name, cubin, log) else None


def _digest(name: str, cubin: bytes, log: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(cubin)
    digest.update(log)
    return digest.digest()


class BuildCache:
    """Entries in `folder`, created on the first write; None keeps nothing.

    `deadline_s`: how long to wait for another process that builds the same entry before building it here as well.
    `say`: receives one line, once, if entries cannot be kept.
    """

    def __init__(self, folder: Path | None, deadline_s: float, say: Callable[[str], None]):
        self.folder, self.deadline_s = folder, deadline_s
        self._say = say
        self._is_silent = False

    def get(self, name: str, make: Callable[[], Built]) -> Built:
        """The entry `name`, made by `make()` if it is not there or not sound. Processes that ask at once make it once."""
        if self.folder is None:
            return make()
        path = self.folder / f"{name}.kernel"
        found = _read(path, name)
        if found is not None:
            return found
        with self._lock(path):
            found = _read(path, name)  # the process that we waited for may have made it
            if found is None:
                found = make()
                self._publish(path, found.pack(name))
            return found

    @contextmanager
    def _lock(self, path: Path) -> Iterator[None]:
        """Hold the entry's lock, or after the deadline go on without it: publishing is atomic, so that is only slower."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._complain(error)
            yield
            return
        try:
            self._acquire(lock)
            yield
        finally:
            # Unlocked by name: closing alone would leave the lock with a child that was forked in the meantime.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)

    def _acquire(self, lock: int) -> None:
        end = time.monotonic() + self.deadline_s
        while time.monotonic() < end:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL_S)
            except OSError:
                return  # a file system without locks

    def _publish(self, path: Path, data: bytes) -> None:
        temporary = ""
        try:
            _sweep(path.parent)
            handle, temporary = tempfile.mkstemp(prefix=f"{path.stem}-", suffix=".tmp", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())  # before the rename: else a power cut may publish an empty file
            os.replace(temporary, path)
        except OSError as error:
            if temporary:
                Path(temporary).unlink(missing_ok=True)
            self._complain(error)

    def _complain(self, error: OSError) -> None:
        if not self._is_silent:
            self._is_silent = True
            self._say(
                f"kernels cannot be kept in {self.folder} ({error.strerror}), so every start compiles them again; "
                "set XDG_CACHE_HOME to a folder that can be written"
            )


def _read(path: Path, name: str) -> Built | None:
    try:
        return Built.unpack(name, path.read_bytes())
    except OSError:
        return None


def _sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    for path in folder.glob("*.tmp"):
        try:
            if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                path.unlink()
        except OSError:
            continue  # another process swept it
