"""CUDA C++ to cubin: the one file that calls NVRTC.

Needs the packages `cuda-bindings` and `nvidia-cuda-nvrtc` (a CUDA build of torch brings both), and no GPU. NVRTC has no
system headers, `<cstdint>` included: kernels carry their own typedefs in a header. Kernels are `extern "C"`, so that
they are found by their plain names.

Not a linker and not a loader: one source becomes one cubin; `kernels.launch_kernel` loads it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kernels.build_cache import BuildCache, Built
from kernels.build_source import SourceSet, read_sources
from launch.environment import cache_folder
from launch.errors import KernelBuildError

DEFAULT_ARCH = "sm_90a"
HEADERS = Path(__file__).parent / "cuda"  # device headers that every package may include
_FORMAT = 1  # of the key; raise it when what is done with the same inputs changes
_OPTIONS = (
    "--std=c++17",
    "--device-as-default-execution-space",
    "--generate-line-info",  # costs no time, and lets compute-sanitizer and profilers name the line
    "--no-source-include",  # headers come from the hashed set, never from a folder
    "--ptxas-options=--verbose",  # registers and spills, for the log
)
_LOG_LINES = 40  # of a failed compilation; the first errors explain the rest
_NAME = re.compile(r"[A-Za-z_]\w*")

Defines = Mapping[str, "str | int"]


def default_cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/doorbell/kernels`, or the same under `~/.cache`; None for a user without a home."""
    folder = cache_folder()
    return folder / "kernels" if folder else None


def _to_stderr(line: str) -> None:
    print(f"doorbell: {line}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Request:
    """Everything that determines a cubin."""

    sources: SourceSet
    options: tuple[str, ...]
    nvrtc_version: tuple[int, int]

    @property
    def key(self) -> str:
        """SHA-256 in hex. Names and order of folders are not in it: what was found in them is."""
        digests = {name: hashlib.sha256(text).hexdigest() for name, text in self.sources.headers.items()}
        source = (self.sources.path.name, hashlib.sha256(self.sources.text).hexdigest())
        facts = (_FORMAT, self.nvrtc_version, self.options, source, sorted(digests.items()))
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class Build:
    """Compiles sources, and keeps what it compiled in memory and in `cache_dir` (None: in memory only).

    `deadline_s`: how long to wait for another process that compiles the same source; then it is compiled here as well.
    `say`: receives a line when the folder cannot be written. One thread at a time.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        deadline_s: float = 120.0,
        say: Callable[[str], None] = _to_stderr,
    ):
        self._cache = BuildCache(cache_dir, deadline_s, say)
        self._memory: dict[str, Built] = {}

    def cubin(
        self,
        source: Path,
        include_dirs: Sequence[Path] = (),
        defines: Defines | None = None,
        arch: str = DEFAULT_ARCH,
        options: Sequence[str] = (),
    ) -> bytes:
        """The cubin (ELF image) of `source` for `arch`, a real architecture such as `sm_90a`.

        `include_dirs`: where `#include "..."` is looked up after the including file's own folder. `defines`: macros.
        `options`: further NVRTC options, e.g. `--use_fast_math`. Any process may call; processes that ask for the same
        cubin at once compile it once. *Raises* `KernelBuildError` with NVRTC's log, or when NVRTC is not installed.
        """
        return self.built(source, include_dirs, defines, arch, options).cubin

    def built(
        self,
        source: Path,
        include_dirs: Sequence[Path] = (),
        defines: Defines | None = None,
        arch: str = DEFAULT_ARCH,
        options: Sequence[str] = (),
    ) -> Built:
        """As `cubin`, with the compiler's log beside it."""
        request = _request(source, include_dirs, defines or {}, arch, options)
        key = request.key
        if key not in self._memory:
            self._memory[key] = self._cache.get(f"{source.stem}-{key}", lambda: _compile(request))
        return self._memory[key]

    def key(
        self,
        source: Path,
        include_dirs: Sequence[Path] = (),
        defines: Defines | None = None,
        arch: str = DEFAULT_ARCH,
        options: Sequence[str] = (),
    ) -> str:
        """SHA-256 in hex over everything that determines the cubin: the texts of the source and of every header it
        reaches, defines, options, architecture, NVRTC's version and the version of this recipe."""
        return _request(source, include_dirs, defines or {}, arch, options).key


def _request(
    source: Path, include_dirs: Iterable[Path], defines: Defines, arch: str, options: Sequence[str]
) -> _Request:
    if not arch.startswith("sm_"):
        raise KernelBuildError(f"{source}: architecture {arch!r} is not a real one; name a GPU's, such as {DEFAULT_ARCH}")
    macros = [_define(source, name, value) for name, value in sorted(defines.items())]
    all_options = (f"--gpu-architecture={arch}", *_OPTIONS, *options, *macros)
    return _Request(read_sources(source, include_dirs), all_options, _nvrtc_version())


def _define(source: Path, name: str, value: str | int) -> str:
    if not _NAME.fullmatch(name):
        raise KernelBuildError(f"{source}: {name!r} is not the name of a macro")
    return f"--define-macro={name}={int(value) if isinstance(value, bool) else value}"


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise KernelBuildError(f"kernels are compiled by NVRTC, and {_MISSING} ({error})") from error
    return nvrtc


_MISSING = "the packages cuda-bindings and nvidia-cuda-nvrtc are not both here; install with: pip install 'doorbell[kernels]'"


@cache
def _nvrtc_version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    try:
        result, major, minor = nvrtc.nvrtcVersion()  # the first call loads the library
    except RuntimeError as error:
        raise KernelBuildError(f"kernels are compiled by NVRTC, and {_MISSING} ({error})") from error
    _check(nvrtc, result, "nvrtcVersion")
    return major, minor


def _compile(request: _Request) -> Built:
    nvrtc, sources = _nvrtc(), request.sources
    names = [name.encode() for name in sources.headers]
    # Named by its file name alone: an absolute path in the line table would make equal sources different cubins.
    result, program = nvrtc.nvrtcCreateProgram(
        sources.text, sources.path.name.encode(), len(names), list(sources.headers.values()), names
    )
    _check(nvrtc, result, "nvrtcCreateProgram")
    try:
        options = [option.encode() for option in request.options]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace").strip()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelBuildError(f"{sources.path} does not compile ({result.name}):\n{_head(log)}")
        return Built(_fetch(nvrtc, program, "CUBIN"), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(nvrtc: Any, program: Any, what: str) -> bytes:
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, result, f"nvrtcGet{what}Size")
    buffer = bytearray(size)
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, result, f"nvrtcGet{what}")
    return bytes(buffer)


def _head(log: str) -> str:
    lines = log.splitlines()
    cut = [f"... and {len(lines) - _LOG_LINES} more lines"] if len(lines) > _LOG_LINES else []
    return "\n".join(lines[:_LOG_LINES] + cut) or "NVRTC gave no reason"


def _check(nvrtc: Any, result: Any, call: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelBuildError(f"NVRTC's {call} failed: {result.name}")
