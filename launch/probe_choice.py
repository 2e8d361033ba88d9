"""Which communication follows from a machine's facts. A pure function; what it names is still self-tested at start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from launch.probe_facts import Facts, Link

_SHM_BYTES_A_RANK = 8 << 20  # the POSIX heap's own size: 8 ranks fit into docker's default of 64 MiB


class Choice(NamedTuple):
    """`name`: `single`, `ipc`, `nvshmem`, `nccl`, `posix` or `gloo`. `reasons`: clauses, the deciding one first."""

    name: str
    reasons: tuple[str, ...]


def choose(facts: Facts, num_ranks: int | None = None) -> Choice:
    """What `num_ranks` ranks (default: one a GPU, two without GPUs) on this machine should talk through.

    Ranks take GPUs in turn: rank r uses GPU r modulo their number.
    """
    if num_ranks is None:
        num_ranks = facts.torch_gpus or 2
    if num_ranks == 1:
        return Choice("single", ("one rank has no peers",))
    if not facts.torch_gpus:
        return _choose_on_cpu(facts, num_ranks)
    return _choose_on_gpus(facts, num_ranks)


def _choose_on_cpu(facts: Facts, num_ranks: int) -> Choice:
    why = "torch is a CPU build, so the GPUs are not used" if facts.gpus else "no GPU"
    free, wanted = facts.host.shm_free_bytes, num_ranks * _SHM_BYTES_A_RANK
    if free is None:
        return Choice("gloo", ("/dev/shm cannot be used", why))
    if free < wanted:
        return Choice("gloo", (f"/dev/shm has {free >> 20} MiB free of the {wanted >> 20} MiB wanted", why))
    return Choice("posix", (why, "ranks share memory through /dev/shm"))


def _choose_on_gpus(facts: Facts, num_ranks: int) -> Choice:
    num_gpus = min(facts.torch_gpus, num_ranks)
    is_shared = num_ranks > num_gpus
    links = [link for link in facts.links if link.second < num_gpus]
    obstacle = _obstacle_to_mapping(facts, links, num_gpus)
    if obstacle is None and facts.ipc is not None and facts.ipc.is_working:
        return Choice("ipc", (f"CUDA IPC works: {facts.ipc.reason}", *_notes(facts, links, num_ranks, num_gpus)))
    if obstacle is None:
        untried = _unknown(facts, "ipc", "CUDA IPC was not tried")
        obstacle = f"CUDA IPC does not work: {facts.ipc.reason}" if facts.ipc else untried
        if facts.nvshmem.is_usable and not is_shared:
            return Choice("nvshmem", (obstacle, f"NVSHMEM: {facts.nvshmem.reason}", *_link_notes(links)))
    if is_shared:
        return Choice("gloo", (obstacle, f"NCCL refuses {num_ranks} ranks on {_gpus(num_gpus)}"))
    return Choice("nccl", (obstacle,))


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


def _notes(facts: Facts, links: list[Link], num_ranks: int, num_gpus: int) -> list[str]:
    notes = _link_notes(links)
    if num_ranks > num_gpus:
        notes.append(
            f"{num_ranks} ranks share {_gpus(num_gpus)}: control goes over gloo, for NCCL refuses that; start NVIDIA MPS, "
            "or they take turns"
        )
    if not all(gpu.has_64_bit_stream_ops for gpu in facts.gpus[:num_gpus]):
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


def _gpus(number: int) -> str:
    return f"{number} GPU{'s' * (number != 1)}"
