"""Versions of what a GPU run stands on, read without importing or starting it."""

from __future__ import annotations

from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

from launch.probe_facts import Nvshmem

_PACKAGES = {
    "torch": ("torch",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "cuda-bindings": ("cuda-bindings",),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "triton": ("triton",),
    "flashinfer": ("flashinfer-python",),
}
_NVSHMEM = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
_NVSHMEM_LIBRARY = Path("nvidia/nvshmem/lib/libnvshmem_host.so.3")
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def package_versions() -> dict[str, str | None]:
    """Installed packages by a short name; None where none of its spellings is installed."""
    return {name: _first_version(spellings) for name, spellings in _PACKAGES.items()}


def _first_version(spellings: tuple[str, ...]) -> str | None:
    for spelling in spellings:
        try:
            return version(spelling)
        except PackageNotFoundError:
            continue
    return None


def torch_versions() -> dict[str, str | None]:
    """CUDA and NCCL as this torch was built with them; None for a CPU build."""
    import torch

    if torch.version.cuda is None:
        return {"torch's CUDA": None, "NCCL": None}
    import torch.cuda.nccl

    return {"torch's CUDA": torch.version.cuda, "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}


def count_torch_gpus() -> int:
    """GPUs that this torch can compute on; makes no CUDA context."""
    import torch

    return torch.cuda.device_count()


def kernel_driver_version(path: Path = _DRIVER_FILE) -> str | None:
    """The NVIDIA driver's version as the kernel module tells it, for machines without NVML."""
    try:
        words = path.read_text(encoding="ascii", errors="replace").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def find_nvshmem() -> Nvshmem:
    """Look for NVSHMEM's library and its Python bindings; starts neither, for a start is collective."""
    found = next((dist for dist in map(_distribution, _NVSHMEM) if dist is not None), None)
    if found is None:
        return Nvshmem(False, "its library is not installed (nvidia-nvshmem-cu13 or -cu12)")
    if not Path(str(found.locate_file(_NVSHMEM_LIBRARY))).is_file():
        return Nvshmem(False, f"its package is installed, but {_NVSHMEM_LIBRARY} is missing", found.version)
    bindings = _first_version(_PACKAGES["nvshmem4py"])
    if bindings is None:
        return Nvshmem(False, "its Python bindings are not installed (nvshmem4py-cu13 or -cu12)", found.version)
    return Nvshmem(True, f"library and bindings {bindings} found, not started", found.version)


def _distribution(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None
