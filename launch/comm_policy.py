"""Which communicators there are, in which order they are tried, and what stands in the way of each. Facts in, reasons out.

One policy for two that ask: `launch.probe_choice` with what a probe of the machine found, `comm.choice` with what the ranks see
of each other at start. Opening one and testing it is `comm.candidates`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """`name` as `--comm` takes it; `device` it is for, None for any; `reason` to take it, once nothing better is left.

    `is_automatic`: whether it is ever taken without being asked for by name. `has_algorithms`: whether it has several ways to
    reduce, among which `--all-reduce` can choose.
    """

    name: str
    device: str | None
    reason: str
    is_automatic: bool = True
    has_algorithms: bool = False


CANDIDATES = (
    Candidate("ipc", "cuda", "GPUs reach each other's memory", has_algorithms=True),
    Candidate("nvshmem", "cuda", "GPUs reach each other's memory through NVSHMEM", has_algorithms=True),
    Candidate("nccl", "cuda", "NCCL works with one GPU a rank"),
    Candidate("one_shot", "cpu", "ranks share memory"),
    Candidate("gloo", None, "works everywhere"),
    Candidate("host_loop", None, "the naive version, for comparison", is_automatic=False),
)
NAMES = tuple(candidate.name for candidate in CANDIDATES)
WITH_ALGORITHMS = tuple(candidate for candidate in CANDIDATES if candidate.has_algorithms)


@dataclass(frozen=True)
class Standing:
    """What decides. `device`: `cpu` or `cuda`; `num_gpus`: different GPUs that the ranks use; `ranks_per_gpu`: on the fullest.

    The others say why something is impossible, None where nothing is known against it: `mapping` (some rank reaching another's
    GPU memory), `ipc` (CUDA IPC), `nvshmem`, `shared_memory` (/dev/shm).
    """

    device: str
    num_ranks: int
    num_gpus: int = 0
    ranks_per_gpu: int = 1
    is_single_node: bool = True
    mapping: str | None = None
    ipc: str | None = None
    nvshmem: str | None = None
    shared_memory: str | None = None

    @property
    def is_one_rank_per_gpu(self) -> bool:
        return self.ranks_per_gpu == 1

    @property
    def gpus(self) -> str:
        return f"{self.num_gpus} GPU{'s' * (self.num_gpus != 1)}"


def automatic(device: str) -> tuple[Candidate, ...]:
    """What is tried for ranks that compute on `device`, best first; the last always has a chance."""
    return tuple(candidate for candidate in CANDIDATES if candidate.is_automatic and candidate.device in (None, device))


def obstacle(name: str, standing: Standing) -> str | None:
    """Why the candidate `name` is impossible, as a clause; None if it is worth a try."""
    candidate = CANDIDATES[NAMES.index(name)]
    if candidate.device not in (None, standing.device):
        needs = "it needs GPUs" if candidate.device == "cuda" else "it sums in host memory"
        return f"{needs}, and this run computes on {standing.device}"
    if name in ("ipc", "nvshmem", "one_shot") and not standing.is_single_node:
        return "the ranks are on several machines"
    sharing = None if standing.is_one_rank_per_gpu else f"{standing.num_ranks} ranks on {standing.gpus}"
    obstacles = {
        "ipc": standing.mapping or standing.ipc,
        "nvshmem": standing.mapping or standing.nvshmem,
        "nccl": sharing and f"NCCL refuses {sharing}",
        "one_shot": standing.shared_memory,
    }
    return obstacles.get(name)


def rejections(obstacles: Iterable[tuple[str, str]]) -> list[str]:
    """`not NAME: why` for pairs of name and obstacle, in order; names with the same obstacle share a clause."""
    names: dict[str, list[str]] = {}
    for name, why in obstacles:
        names.setdefault(why, []).append(name)
    return [f"not {' or '.join(group)}: {why}" for why, group in names.items()]
