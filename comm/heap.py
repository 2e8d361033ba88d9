"""Memory of which every rank holds an equal part and can reach all other parts: the interface, and the layout type.

What a heap is made of (POSIX shared memory, CUDA IPC, NVSHMEM) is the business of one file each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from comm.words import WORD_STRIDE

REGION_ALIGNMENT = 256  # bytes; covers a pair of cache lines, a vector register and a GPU's widest transaction


@dataclass(frozen=True)
class Region:
    """A named part of the heap: `num_bytes` bytes, the same on every rank."""

    name: str
    num_bytes: int

    @classmethod
    def of_words(cls, name: str, num_words: int) -> Region:
        """Room for `num_words` signal words, each on cache lines of its own."""
        return cls(name, num_words * WORD_STRIDE * 8)


@dataclass(frozen=True)
class Layout:
    """Regions in order, each at an aligned offset. Equal on all ranks, because it follows from the regions alone."""

    regions: tuple[Region, ...]
    offsets: dict[str, int] = field(init=False, compare=False)
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        offsets, end = {}, 0
        for region in self.regions:
            if region.name in offsets:
                raise ValueError(f"two heap regions are called {region.name}")
            offsets[region.name] = end
            end += -(-region.num_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT
        object.__setattr__(self, "offsets", offsets)
        object.__setattr__(self, "num_bytes", end)

    @classmethod
    def of(cls, *groups: Iterable[Region]) -> Layout:
        return cls(tuple(region for group in groups for region in group))

    def span(self, name: str) -> slice:
        """Bytes of the region called `name`, without its padding."""
        start = self.offsets[name]
        size = next(region.num_bytes for region in self.regions if region.name == name)
        return slice(start, start + size)


class SymmetricHeap(ABC):
    """One rank's handle of the heap. `kind` names what it is made of."""

    kind: str
    rank: int
    size: int
    layout: Layout

    @abstractmethod
    def tensor(self, peer: int, name: str) -> torch.Tensor:
        """Region `name` of rank `peer` (own rank included) as a uint8 tensor; zeros when the heap is new."""

    @abstractmethod
    def close(self) -> None:
        """Drop this rank's claim. Idempotent, waits for nobody; memory lives on while any tensor of it does."""


class _Bytes:
    """GPU memory offered to torch."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3}


class DeviceHeap(ABC):
    """A symmetric heap in GPU memory: kernels get addresses, the host reads nothing. Zeroed when new."""

    kind: str
    rank: int
    size: int
    layout: Layout

    @abstractmethod
    def address(self, peer: int, name: str) -> int:
        """Where this rank finds region `name` of rank `peer`. Differs between ranks; never to be sent to another."""

    def own_tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The beginning of this rank's own region `name`, as a tensor on the current GPU. Not to be used after `close`."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        span = self.layout.span(name)
        if num_bytes > span.stop - span.start:
            raise ValueError(f"the heap region {name} has {span.stop - span.start} bytes, not {num_bytes}")
        return torch.as_tensor(_Bytes(self.address(self.rank, name), num_bytes), device="cuda").view(dtype).view(shape)

    @abstractmethod
    def close(self) -> None:
        """Unmap and free. *Collective*: all ranks close. Idempotent."""

    @abstractmethod
    def fill(self, name: str, byte: int) -> None:
        """Set all bytes of this rank's own region `name`, and wait for it. Before peers may write there: barrier afterwards."""

    @abstractmethod
    def abandon(self) -> None:
        """Forget the memory without waiting for peers, because one is gone. The end of the process frees it."""
