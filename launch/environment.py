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
