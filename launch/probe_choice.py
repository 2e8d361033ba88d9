"""Which communication follows from a machine's facts. A pure function; what it names is still self-tested at start.

The order and the obstacles are those of `launch.comm_policy`, which the start of a run follows too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from launch.comm_policy import Candidate, Standing, automatic, obstacle, rejections
from launch.probe_facts import Facts, Link

_SHM_BYTES_A_RANK = 8 << 20  # the POSIX heap's own size: 8 ranks fit into docker's default of 64 MiB


class Choice(NamedTuple):
    """`name`: that of a communicator as `--comm` takes it, or `none`. `reasons`: clauses, the deciding one first."""

    name: str
    reasons: tuple[str, ...]


def choose(facts: Facts, num_ranks: int | None = None) -> Choice:
    """What `num_ranks` ranks (default: one a GPU, two without GPUs) on this machine should talk through.

    Ranks take GPUs in turn: rank r uses GPU r modulo their number.
    """
    if num_ranks is None:
        num_ranks = facts.torch_gpus or 2
    if num_ranks == 1:
        return Choice("none", ("one rank has no peers",))
    standing = _on_gpus(facts, num_ranks) if facts.torch_gpus else _on_cpu(facts, num_ranks)
    obstacles: list[tuple[str, str]] = []
    for candidate in automatic(standing.device):
        why = obstacle(candidate.name, standing)
        if why is None:
            return Choice(candidate.name, (*rejections(obstacles), *_reasons(candidate, facts, standing)))
        obstacles.append((candidate.name, why))
    raise AssertionError("unreachable: nothing stands in the way of the last candidate")


def _on_cpu(facts: Facts, num_ranks: int) -> Standing:
    free, wanted = facts.host.shm_free_bytes, num_ranks * _SHM_BYTES_A_RANK
    lack = None
    if free is None:
        lack = "/dev/shm cannot be used"
    elif free < wanted:
        lack = f"/dev/shm has {free >> 20} MiB free of the {wanted >> 20} MiB wanted"
    return Standing("cpu", num_ranks, shared_memory=lack)


def _on_gpus(facts: Facts, num_ranks: int) -> Standing:
    """A probe must have seen CUDA IPC work to name it: what it does not know counts against it."""
    num_gpus = min(facts.torch_gpus, num_ranks)
    if facts.ipc is None:
        ipc = _unknown(facts, "ipc", "CUDA IPC was not tried")
    else:
        ipc = None if facts.ipc.is_working else f"CUDA IPC does not work: {facts.ipc.reason}"
    return Standing(
        "cuda",
        num_ranks,
        num_gpus,
        ranks_per_gpu=-(-num_ranks // num_gpus),
        mapping=_obstacle_to_mapping(facts, _links(facts, num_gpus), num_gpus),
        ipc=ipc,
        nvshmem=None if facts.nvshmem.is_usable else facts.nvshmem.reason,
    )


def _reasons(candidate: Candidate, facts: Facts, standing: Standing) -> list[str]:
    if candidate.name == "ipc":
        return [f"CUDA IPC works: {facts.ipc.reason}", *_notes(facts, standing)]
    if candidate.name == "nvshmem":
        return [f"NVSHMEM: {facts.nvshmem.reason}", *_link_notes(_links(facts, standing.num_gpus))]
    if standing.device == "cpu":
        why = "torch is a CPU build, so the GPUs are not used" if facts.gpus else "no GPU"
        return [why, candidate.reason]
    return [candidate.reason]


def _links(facts: Facts, num_gpus: int) -> list[Link]:
    return [link for link in facts.links if link.second < num_gpus]


def _obstacle_to_mapping(facts: Facts, links: Iterable[Link], num_gpus: int) -> str | None:
    """Why some rank cannot reach another's memory, if that is so."""
    if len(facts.gpus) < num_gpus:
        return _unknown(facts, "gpus", "the GPUs could not be asked")
    pairs = {(link.first, link.second): link for link in links}
    for second in range(num_gpus):
        for first in range(second):
            link = pairs.get((first, second))
            if link is None:
                return _unknown(facts, "links", f"whether GPUs {first} and {second} reach each other is not known")
            if not link.can_access:
                return f"GPUs {first} and {second} have no peer access"
    return None


def _unknown(facts: Facts, name: str, what: str) -> str:
    return f"{what}: {facts.unknown[name]}" if name in facts.unknown else what


def _notes(facts: Facts, standing: Standing) -> list[str]:
    notes = _link_notes(_links(facts, standing.num_gpus))
    if not standing.is_one_rank_per_gpu:
        notes.append(
            f"{standing.num_ranks} ranks share {standing.gpus}: control goes over gloo, for NCCL refuses that; start NVIDIA MPS, "
            "or they take turns"
        )
    if not all(gpu.has_64_bit_stream_ops for gpu in facts.gpus[: standing.num_gpus]):
        notes.append("no 64-bit stream memory operations: signals are waited for inside kernels")
    return notes


def _link_notes(links: list[Link]) -> list[str]:
    if not links:
        return []
    slow = [f"{link.first}-{link.second}" for link in links if not link.has_native_atomics or link.num_nvlinks == 0]
    if slow:
        pairs = ", ".join(slow[:4]) + ", ..." * (len(slow) > 4)
        return [f"PCIe or no native atomics between GPUs {pairs}: signals cross it as posted writes, nobody polls over it"]
    lanes = [link.num_nvlinks for link in links if link.num_nvlinks is not None]
    known = f"NVLink between all GPUs, {min(lanes)} lanes or more" if len(lanes) == len(links) else "native atomics everywhere"
    return [f"{known}: one-shot all-reduce by pushing (Lamport)"]
