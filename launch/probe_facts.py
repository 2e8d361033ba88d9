"""What a probe may find out about a machine: plain records. None always means "not known", never "no"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

MULTICAST = "off: never used; its objects belong to the whole NVLink fabric, which other users of the machine share"


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process sees it; `index` counts visible ones. Clocks are the highest it may run at.

    `has_64_bit_stream_ops`, `has_nor_wait`, `has_remote_flush`: what `cuStreamWaitValue` may be asked for.
    """

    index: int
    name: str
    uuid: str
    pci_id: str
    memory_bytes: int
    num_sms: int
    compute_capability: str
    sm_clock_mhz: int
    memory_clock_mhz: int
    has_64_bit_stream_ops: bool
    has_nor_wait: bool
    has_remote_flush: bool


@dataclass(frozen=True)
class Link:
    """Two GPUs, `first` < `second`. What differs by direction holds only if it holds both ways.

    `performance_rank`: the driver's, 0 is the fastest of the machine. `num_nvlinks`: lanes; 0 means PCIe or slower.
    """

    first: int
    second: int
    can_access: bool
    has_native_atomics: bool
    performance_rank: int
    num_nvlinks: int | None = None

    @property
    def kind(self) -> str:
        if self.num_nvlinks is None:
            return "not known"
        return f"NVLink, {self.num_nvlinks} lanes" if self.num_nvlinks else "PCIe"


@dataclass(frozen=True)
class IpcTrial:
    """Whether CUDA IPC worked between two processes on each of `devices` (one GPU: twice on it), and why not."""

    devices: tuple[int, ...]
    is_working: bool
    reason: str


@dataclass(frozen=True)
class Nvshmem:
    """Whether NVSHMEM looks usable, found but not started; `version` of its library."""

    is_usable: bool
    reason: str
    version: str | None = None


@dataclass(frozen=True)
class Host:
    """The machine around the GPUs. `memory_limit_bytes`: the cgroup's, None where it sets none; `shm_*`: /dev/shm."""

    cpu: str
    num_cores: int
    memory_available_bytes: int | None
    memory_limit_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None


@dataclass(frozen=True)
class Facts:
    """Everything. `torch_gpus`: how many GPUs this torch can compute on. `unknown`: what could not be found out, and why."""

    host: Host
    gpus: tuple[Gpu, ...] = ()
    torch_gpus: int = 0
    links: tuple[Link, ...] = ()
    ipc: IpcTrial | None = None
    nvshmem: Nvshmem = Nvshmem(False, "not looked for")
    versions: Mapping[str, str | None] = field(default_factory=dict)
    multicast: str = MULTICAST
    unknown: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`; links carry their kind."""
        document = asdict(self)
        for link, row in zip(self.links, document["links"]):
            row["kind"] = link.kind
        return document
