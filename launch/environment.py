"""The one place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from launch.errors import UsageError


@dataclass(frozen=True)
class Environment:
    """What torchrun and the user's shell say about this process.

    `omp_num_threads` is None when torchrun, not the user, chose it (torchrun forces 1 for more than one process).
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    run_id: str = ""
    is_torchrun: bool = False
    num_threads: int | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
        environ = os.environ if environ is None else environ
        size = _integer(environ, "WORLD_SIZE", 1)
        return cls(
            rank=_integer(environ, "RANK", 0),
            world_size=size,
            local_rank=_integer(environ, "LOCAL_RANK", 0),
            local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", size),
            run_id=environ.get("TORCHELASTIC_RUN_ID", ""),
            is_torchrun="TORCHELASTIC_RUN_ID" in environ,
            num_threads=_integer(environ, "DOORBELL_NUM_THREADS", 0) or None,
        )


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"environment variable {name} must be a whole number, not {text!r}") from None
