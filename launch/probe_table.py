"""A probe's facts for people to read."""

from __future__ import annotations

from collections.abc import Iterator

from launch.probe_choice import Choice
from launch.probe_facts import Facts, Gpu, Host

SHM_ENOUGH_BYTES = 256 << 20  # docker gives 64 MiB; NCCL and the POSIX heap want more as ranks are added


def table(facts: Facts, choice: Choice) -> str:
    """Several lines; everything in `facts`, then the choice and its reasons."""
    rows = [*_host_rows(facts.host), *_gpu_rows(facts), *_software_rows(facts)]
    rows += [("not known", f"{name}: {reason}") for name, reason in facts.unknown.items() if name != "gpus"]
    rows += [("choice", choice.name), *(("", reason) for reason in choice.reasons)]
    return "\n".join(f"{head:16}{text}".rstrip() for head, text in rows)


def _host_rows(host: Host) -> Iterator[tuple[str, str]]:
    yield "CPU", f"{host.cpu}, {host.num_cores} core{'s' * (host.num_cores != 1)} for this process"
    limit = f", cgroup limit {_gib(host.memory_limit_bytes)}" if host.memory_limit_bytes is not None else ""
    yield "memory", f"{_gib(host.memory_available_bytes)} available{limit}"
    if host.shm_bytes is None or host.shm_free_bytes is None:
        yield "/dev/shm", "cannot be used"
        return
    yield "/dev/shm", f"{_gib(host.shm_bytes)}, {_gib(host.shm_free_bytes)} free"
    if host.shm_bytes < SHM_ENOUGH_BYTES:
        yield "", "small; start the container with --shm-size=1g or --ipc=host"


def _gpu_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    if not facts.gpus:
        yield "GPU", f"none found: {facts.unknown['gpus']}" if "gpus" in facts.unknown else "none"
    for gpu in facts.gpus:
        yield f"GPU {gpu.index}", (
            f"{gpu.name}, {_gib(gpu.memory_bytes)}, {gpu.num_sms} SMs at {gpu.sm_clock_mhz} MHz, memory at "
            f"{gpu.memory_clock_mhz} MHz, compute capability {gpu.compute_capability}"
        )
        yield "", f"{gpu.uuid}, PCI {gpu.pci_id}"
        yield "", f"stream memory operations: {_stream_ops(gpu)}"
    if facts.gpus:
        yield "torch", f"can use {facts.torch_gpus} of them"
    yield "multicast", facts.multicast
    for link in facts.links:
        access = "peer access" if link.can_access else "no peer access"
        atomics = "native atomics" if link.has_native_atomics else "no native atomics"
        yield f"link {link.first}-{link.second}", f"{link.kind}, {access}, {atomics}, performance rank {link.performance_rank}"
    if facts.ipc is not None:
        yield "CUDA IPC", ("works: " if facts.ipc.is_working else "does not work: ") + facts.ipc.reason


def _stream_ops(gpu: Gpu) -> str:
    named = (
        ("64-bit", gpu.has_64_bit_stream_ops),
        ("NOR wait", gpu.has_nor_wait),
        ("flush of remote writes", gpu.has_remote_flush),
    )
    return ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in named)


def _software_rows(facts: Facts) -> Iterator[tuple[str, str]]:
    library = f"{facts.nvshmem.version}, " if facts.nvshmem.version else ""
    yield "NVSHMEM", f"{library}{'usable' if facts.nvshmem.is_usable else 'not usable'}: {facts.nvshmem.reason}"
    yield "versions", ", ".join(f"{name} {version or '-'}" for name, version in facts.versions.items())


def _gib(num_bytes: int | None) -> str:
    return "not known" if num_bytes is None else f"{num_bytes / 2**30:.1f} GiB"
