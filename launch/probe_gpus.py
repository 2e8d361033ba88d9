"""The GPUs and the links between them, asked of the driver and of NVML. Only reads; makes no CUDA context.

The functions take the driver (`cuda.bindings.driver`) and NVML (`pynvml`) as arguments, so that they can be tested
where neither exists.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from launch.probe_facts import Gpu, Link

_NAME_BYTES = 256
_PCI_ID_BYTES = 32


class ProbeFailed(Exception):
    """Something could not be found out; the message says why."""


def load_driver() -> Any:
    """The driver API, initialised. *Raises* `ProbeFailed`."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ProbeFailed(f"cuda-bindings is not installed ({error})") from error
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # how cuda-bindings says that there is no libcuda
        raise ProbeFailed(f"no NVIDIA driver ({error})") from error
    if code == driver.CUresult.CUDA_ERROR_NO_DEVICE:
        raise ProbeFailed("no GPU is visible; if there is one, see CUDA_VISIBLE_DEVICES")
    if code:
        raise ProbeFailed(f"the NVIDIA driver does not start ({code.name})")
    return driver


def ask(function: Callable, *args: Any) -> Any:
    """The result of a driver call; several results come as a tuple. *Raises* `ProbeFailed` with the driver's code."""
    code, *values = function(*args)
    if code:
        raise ProbeFailed(f"{function.__name__} failed with {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


def find_gpus(driver: Any) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in CUDA's order. *Raises* `ProbeFailed`."""
    return tuple(_gpu(driver, index) for index in range(ask(driver.cuDeviceGetCount)))


def _gpu(driver: Any, index: int) -> Gpu:
    device = ask(driver.cuDeviceGet, index)

    def attribute(name: str) -> int:
        return ask(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)

    capability = f"{attribute('COMPUTE_CAPABILITY_MAJOR')}.{attribute('COMPUTE_CAPABILITY_MINOR')}"
    return Gpu(
        index=index,
        name=_text(ask(driver.cuDeviceGetName, _NAME_BYTES, device)),
        uuid=f"GPU-{UUID(bytes=bytes(ask(driver.cuDeviceGetUuid, device).bytes))}",
        pci_id=_text(ask(driver.cuDeviceGetPCIBusId, _PCI_ID_BYTES, device)),
        memory_bytes=ask(driver.cuDeviceTotalMem, device),
        num_sms=attribute("MULTIPROCESSOR_COUNT"),
        compute_capability=capability,
        sm_clock_mhz=attribute("CLOCK_RATE") // 1000,
        memory_clock_mhz=attribute("MEMORY_CLOCK_RATE") // 1000,
        has_64_bit_stream_ops=bool(attribute("CAN_USE_64_BIT_STREAM_MEM_OPS")),
        has_nor_wait=bool(attribute("CAN_USE_STREAM_WAIT_VALUE_NOR")),
        has_remote_flush=bool(attribute("CAN_FLUSH_REMOTE_WRITES")),
    )


def _text(value: bytes | str) -> str:
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return text.split("\0", 1)[0].strip()  # the driver fills a buffer of fixed size, not always with zeros only


def find_links(driver: Any, num_gpus: int) -> tuple[Link, ...]:
    """Every pair of GPUs; the number of NVLink lanes is left open. *Raises* `ProbeFailed`."""
    devices = [ask(driver.cuDeviceGet, index) for index in range(num_gpus)]

    def both(name: str, first: int, second: int) -> tuple[int, int]:
        attribute = getattr(driver.CUdevice_P2PAttribute, f"CU_DEVICE_P2P_ATTRIBUTE_{name}")
        a, b = devices[first], devices[second]
        return ask(driver.cuDeviceGetP2PAttribute, attribute, a, b), ask(driver.cuDeviceGetP2PAttribute, attribute, b, a)

    def can_access(first: int, second: int) -> bool:
        a, b = devices[first], devices[second]
        return bool(ask(driver.cuDeviceCanAccessPeer, a, b) and ask(driver.cuDeviceCanAccessPeer, b, a))

    return tuple(
        Link(
            first,
            second,
            can_access=can_access(first, second),
            has_native_atomics=all(both("NATIVE_ATOMIC_SUPPORTED", first, second)),
            performance_rank=max(both("PERFORMANCE_RANK", first, second)),
        )
        for first, second in itertools.combinations(range(num_gpus), 2)
    )


@contextmanager
def open_nvml():
    """NVML for a while. *Raises* `ProbeFailed` when it is not there."""
    try:
        import pynvml
    except ImportError as error:
        raise ProbeFailed(f"nvidia-ml-py is not installed ({error})") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise ProbeFailed(f"NVML does not start ({error})") from error
    try:
        yield pynvml
    except pynvml.NVMLError as error:
        raise ProbeFailed(f"NVML does not answer ({error})") from error
    finally:
        pynvml.nvmlShutdown()


def count_nvlinks(nvml: Any, gpus: Sequence[Gpu]) -> dict[tuple[int, int], int]:
    """NVLink lanes of each pair: those that join the two GPUs directly, else (a switch between) those that both have up.

    GPUs are found by UUID, for NVML counts also those that are not visible to CUDA. *Raises* `nvml.NVMLError`.
    """
    handles = {gpu.index: nvml.nvmlDeviceGetHandleByUUID(gpu.uuid) for gpu in gpus}
    lanes = {gpu.index: _active_lanes(nvml, handles[gpu.index]) for gpu in gpus}
    counts = {}
    for a, b in itertools.combinations(gpus, 2):
        status = nvml.nvmlDeviceGetP2PStatus(handles[a.index], handles[b.index], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
        direct = sum(remote == _short(b.pci_id) for remote in lanes[a.index])
        shared = min(len(lanes[a.index]), len(lanes[b.index]))
        counts[a.index, b.index] = (direct or shared) if status == nvml.NVML_P2P_STATUS_OK else 0
    return counts


def _active_lanes(nvml: Any, handle: Any) -> list[str]:
    """The PCI id at the far end of each lane that is up; empty text where it is not told (virtual machines)."""
    lanes = []
    for lane in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, lane) != nvml.NVML_FEATURE_ENABLED:
                continue
        except nvml.NVMLError:  # lanes that this GPU does not have
            continue
        try:
            lanes.append(_short(_text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, lane).busId)))
        except nvml.NVMLError:
            lanes.append("")
    return lanes


def _short(pci_id: str) -> str:
    """A PCI id for comparing: NVML writes the domain with eight digits, CUDA with four."""
    domain, _, rest = pci_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"
