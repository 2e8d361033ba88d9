"""The header of one safetensors file, read and checked without reading its tensors.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps.
*Source*: the safetensors format description, https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the limit the format's own reader applies
DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies. `dtype`: the format's code (`F32`, `BF16`, ...); `begin`, `end`: file offsets in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """All tensors of the file at `path`. *Raises* `ModelError` for anything that is not a whole safetensors file."""
    try:
        num_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
            if start.startswith(LFS_MARK):
                raise ModelError(f"{path} is a git-lfs pointer, not the weights; fetch them with `git lfs pull`")
            if num_bytes < 8:
                raise ModelError(f"{path} is truncated: it has {num_bytes} bytes; fetch it again")
            header_bytes = int.from_bytes(start[:8], "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelError(f"{path} is not a safetensors file: it does not begin with a header length")
            if 8 + header_bytes > num_bytes:
                raise ModelError(f"{path} is truncated within its header: it has {num_bytes} bytes; fetch it again")
            file.seek(8)
            raw = file.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    return _parse(path, raw, num_bytes)


def _parse(path: Path, raw: bytes, num_bytes: int) -> dict[str, TensorInfo]:
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        data_begin = 8 + len(raw)
        tensors = {name: _tensor(path, entry, data_begin) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} is not a safetensors file or its header is corrupt; fetch it again") from None
    data_end = data_begin
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.end)):
        if info.begin != data_end:
            raise ModelError(f"{path} is corrupt: its tensors overlap or leave gaps; fetch it again")
        data_end = info.end
    if data_end != num_bytes:
        state = "truncated" if num_bytes < data_end else "corrupt"
        raise ModelError(
            f"{path} is {state}: it has {num_bytes} bytes, not the {data_end} of its header; fetch it again"
        )
    return tensors


def _tensor(path: Path, entry: dict[str, Any], data_begin: int) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if not isinstance(dtype, str) or any(type(i) is not int or i < 0 for i in (*shape, begin, end)):
        raise ValueError("not a dtype name, a shape and two offsets")
    if dtype in DTYPE_BYTES and end - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise ValueError("the shape does not match the offsets")
    return TensorInfo(path, dtype, shape, data_begin + begin, data_begin + end)
