"""The one place that reads or writes environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import UsageError


@dataclass(frozen=True)
class Environment:
    """What torchrun and the user's shell say about this process.

    `omp_num_threads` is None when torchrun, not the user, chose it (torchrun forces 1 for more than one process, and
    leaves a value that the user exported).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    run_id: str = ""
    is_torchrun: bool = False
    num_threads: int | None = None
    omp_num_threads: int | None = None
    has_rendezvous: bool = False
    error_file: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        """Read `environ` (default: the process's own). *Raises* `UsageError` for a value that is not a whole number."""
        environ = os.environ if environ is None else environ
        size = _integer(environ, "WORLD_SIZE", 1)
        local_size = _integer(environ, "LOCAL_WORLD_SIZE", size)
        is_torchrun = "TORCHELASTIC_RUN_ID" in environ
        omp = _integer(environ, "OMP_NUM_THREADS", 0, lenient=True)
        is_forced_by_torchrun = is_torchrun and local_size > 1 and omp == 1
        return cls(
            rank=_integer(environ, "RANK", 0),
            world_size=size,
            local_rank=_integer(environ, "LOCAL_RANK", 0),
            local_world_size=local_size,
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            is_torchrun=is_torchrun,
            num_threads=_integer(environ, "DOORBELL_NUM_THREADS", 0) or None,
            omp_num_threads=None if is_forced_by_torchrun or omp < 1 else omp,
            error_file=environ.get("TORCHELASTIC_ERROR_FILE", ""),
            has_rendezvous=bool(environ.get("MASTER_ADDR")) and bool(environ.get("MASTER_PORT")),
        )


def prefer_loopback(environ: MutableMapping[str, str] | None = None) -> None:
    """Let gloo connect over the loopback interface, unless the user named one.

    Only for a world on one machine: gloo otherwise resolves the host name, which fails on laptops and in containers
    whose name has no address, and may pick an interface that a firewall closes.
    """
    environ = os.environ if environ is None else environ
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


_NVSHMEM_SETTINGS = {
    "NVSHMEM_DISABLE_NVLS": "1",  # else its start creates NVLink multicast objects
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # one machine; the default looks for InfiniBand
    "NVSHMEM_DISABLE_NCCL": "1",  # else it opens NCCL communicators for collectives that we do not call
    "NVSHMEM_DISABLE_LOCAL_ONLY_PROXY": "1",  # else a thread spins for device-side calls that we do not make
    "NVSHMEM_IGNORE_CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "1",  # its own kernels are one block: ranks under MPS need no quota
}


def prepare_nvshmem(heap_bytes: int, environ: MutableMapping[str, str] | None = None) -> None:
    """Settings of NVSHMEM for the ranks of one machine; it reads them when it starts, so call this before.

    `heap_bytes`: what will be allocated, for GPUs where NVSHMEM reserves its heap at start and cannot let it grow. These
    settings replace the user's; the interface its ranks meet on is loopback unless the user named one, and all other
    `NVSHMEM_` variables are left alone (`NVSHMEM_DEBUG=INFO` tells of the start, `NVSHMEM_DISABLE_CUDA_VMM=1` picks the
    heap of `cudaMalloc` and CUDA IPC).
    """
    environ = os.environ if environ is None else environ
    environ.update(_NVSHMEM_SETTINGS)
    environ["NVSHMEM_SYMMETRIC_SIZE"] = str(heap_bytes)
    environ.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")


def forbid_nccl_multicast(environ: MutableMapping[str, str] | None = None) -> None:
    """Keep NCCL from NVLink multicast, whatever the user's shell says. Before the first NCCL communicator of the process.

    Its objects belong to the whole NVLink fabric, which other users of the machine share.
    """
    environ = os.environ if environ is None else environ
    environ["NCCL_NVLS_ENABLE"] = "0"


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Where this user's caches of Doorbell lie; not created here. None when the user has no home folder.

    *Source*: XDG Base Directory Specification: a relative `XDG_CACHE_HOME` is to be ignored.
    """
    environ = os.environ if environ is None else environ
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        home = Path(environ.get("HOME", ""))
        if not home.is_absolute():
            return None
        base = home / ".cache"
    return base / "doorbell"


def with_cache_base(folder: Path, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a process whose `cache_folder` is to lie in `folder`, an absolute path; else that of `environ`.

    For measuring a start without what earlier ones left behind, or with it.
    """
    environ = os.environ if environ is None else environ
    return {**environ, "XDG_CACHE_HOME": str(folder)}


def _integer(environ: Mapping[str, str], name: str, default: int, lenient: bool = False) -> int:
    """`lenient`: another program's variable, whose other spellings (`OMP_NUM_THREADS=4,2`) are not our business."""
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        if lenient:
            return default
        raise UsageError(f"environment variable {name} must be a whole number, not {text!r}") from None
