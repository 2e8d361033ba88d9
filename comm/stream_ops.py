"""Stream memory operations: a stream waits for a word, or writes one, without a kernel. The only file with those driver calls.

They are captured into CUDA graphs, with address and value as constants. Words are 4 bytes, aligned, in device memory; a word of a
peer, mapped by CUDA IPC, may be written. No flag is passed: a flush of remote writes is not to be had on the GPUs in view, and
between GPUs over NVLink a writer that released its payload before the word needs none.

NOTE: a wait has no deadline and cannot be interrupted but by writing its word: `comm/stream_deadline.py` does that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launch.errors import DoorbellError


def wait_value32(stream: int, address: int, value: int) -> None:
    """Hold `stream` (raw handle) until the uint32 at `address` (own memory) equals `value`.

    *Order*: work behind it on the stream sees what the writer of the word released with it. *Raises* `DoorbellError`.
    """
    driver = _driver()
    flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
    _call(driver.cuStreamWaitValue32, stream, address, value, flags)


def write_value32(stream: int, address: int, value: int) -> None:
    """Write `value` to the uint32 at `address` once the work before it on `stream` is done and visible to the whole machine."""
    driver = _driver()
    flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    _call(driver.cuStreamWriteValue32, stream, address, value, flags)


def capture_id(stream: int) -> int | None:
    """Which capture `stream` is part of (unique in the process), or None when it is not capturing."""
    driver = _driver()
    status, capture, *_ = _call(driver.cuStreamGetCaptureInfo, stream)
    if status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
        return None
    return int(capture)


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DoorbellError(
            f"stream memory operations go through cuda-bindings, which is not here ({error}); "
            "install with: pip install 'doorbell[kernels]'"
        ) from error
    return driver


def _call(function: Callable, *args: Any) -> list[Any]:
    result, *values = function(*args)
    if result:
        raise DoorbellError(f"{function.__name__} failed with {result.name}")
    return values
