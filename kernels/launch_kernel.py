"""Loads cubins and launches their kernels through the CUDA driver: the one file that calls `cuLaunchKernelEx`.

The driver API rather than cupy's, because launches need attributes: clusters and programmatic dependent launch (PDL).
Launches go to the stream they are given, so they are captured when that stream is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from launch.errors import KernelLaunchError

_DEFAULT_SHARED_BYTES = 48 << 10  # shared memory that a kernel may use without asking (CUDA C++ guide, 16.x)
_MAX_CARVEOUT = 100  # percent: all of an SM's memory that may be shared memory, the rest is L1
_MAX_CONFIGS = 1024  # launch configurations kept of a kernel: one a shape, and prompts come in any length
_PORTABLE_CLUSTER = 8  # blocks; larger clusters must be asked for (CUDA C++ guide, thread block clusters)

Dim = "int | tuple[int, int, int]"
Parameter = type
"""A parameter's type: a ctypes scalar, or a ctypes array or structure laid out as the kernel's by-value struct."""


class Module:
    """A loaded cubin. Made by `load`; lives as long as the process, for an unload would stall running kernels."""

    def __init__(self, name: str, library: Any):
        self.name, self._library = name, library

    def function(self, name: str, signature: Sequence[Parameter]) -> Kernel:
        """The `extern "C"` kernel `name`, resident on the current device when this returns.

        `signature`: the ctypes type of each parameter in order, e.g. `(c_void_p, c_uint32, c_void_p * 8)`.
        *Raises* `KernelLaunchError` when the module has no such kernel or no CUDA context is current.
        """
        driver = open_driver()
        label = f"{self.name}:{name}"
        kernel = call_driver(label, driver.cuLibraryGetKernel, self._library, name.encode())
        function = call_driver(label, driver.cuKernelGetFunction, kernel)
        # Loaded now, not at the first launch: a lazy load waits for the device, which may be spinning on a peer.
        call_driver(label, driver.cuFuncLoad, function)
        return Kernel(label, function, _Arguments(label, signature))


class Kernel:
    """A kernel of the device that was current when it was made. Not thread-safe: launches share one argument block.

    `num_launched`: launches of all kernels in this process so far; those within a graph capture count once, when captured.
    """

    num_launched: ClassVar[int] = 0

    def __init__(self, name: str, function: Any, arguments: _Arguments):
        self.name = name
        self._function, self._arguments = function, arguments
        self._configs: dict[tuple, Any] = {}
        self._shared_bytes: int | None = None  # dynamic, that it may have; not known before the first launch
        self._is_large_cluster_allowed = False
        self._driver = open_driver()

    def launch(
        self,
        grid: Dim,
        block: Dim,
        args: Sequence[Any],
        stream: int,
        shared_bytes: int = 0,
        cluster: Dim = 1,
        is_pdl: bool = False,
    ) -> None:
        """Queue the kernel; returns at once.

        `grid`: blocks, `block`: threads, `cluster`: blocks a cluster (must divide `grid`), each x alone or (x, y, z).
        `args`: one value a parameter: ints (device pointers included) and floats, or instances of the signature's
        arrays and structures; copied now, so a captured graph replays these values. `stream`: the raw handle, e.g.
        `torch.cuda.current_stream().cuda_stream`. `shared_bytes`: dynamic shared memory a block. `is_pdl`: the
        kernel may start before its predecessor in the stream has ended, and must execute `griddepcontrol.wait` before
        it touches what the predecessor wrote or reads.

        *Stream*: ordered on `stream`. *Raises* `KernelLaunchError` for arguments that do not fit the signature and for
        whatever the driver refuses; a failure of the kernel itself shows later, at a synchronisation.
        """
        shape = (grid, block, shared_bytes, cluster, is_pdl)
        config = self._configs.get(shape)
        if config is None:
            if len(self._configs) >= _MAX_CONFIGS:
                self._configs.clear()
            config = self._configs[shape] = self._prepare(*shape)
        config.hStream = stream
        (result,) = self._driver.cuLaunchKernelEx(config, self._function, self._arguments.fill(args), 0)
        if result:
            _fail(self.name, "cuLaunchKernelEx", result, f" (grid {grid}, block {block}, {shared_bytes} bytes shared)")
        Kernel.num_launched += 1

    def max_blocks_per_sm(self, block_threads: int, shared_bytes: int = 0) -> int:
        """How many blocks fit on an SM at once: a grid that waits for itself or for a peer must fit as a whole."""
        self._allow_shared(shared_bytes)
        query = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return call_driver(self.name, query, self._function, block_threads, shared_bytes)

    def _prepare(self, grid: Dim, block: Dim, shared_bytes: int, cluster: Dim, is_pdl: bool) -> Any:
        """A launch configuration, made once a shape: building one costs more than a launch."""
        blocks_per_cluster = _volume(cluster)
        self._allow_shared(shared_bytes)
        if blocks_per_cluster > _PORTABLE_CLUSTER:
            self._allow_large_clusters()
        return launch_config(self._driver, _xyz(grid), _xyz(block), shared_bytes, _xyz(cluster), is_pdl)

    def _allow_shared(self, shared_bytes: int) -> None:
        attributes = self._driver.CUfunction_attribute
        if self._shared_bytes is None:
            static = attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            num_static = call_driver(self.name, self._driver.cuFuncGetAttribute, static, self._function)
            self._shared_bytes = _DEFAULT_SHARED_BYTES - num_static
            # Kernels that divide an SM's memory differently cannot be on it together: the next one would wait until it is idle.
            carveout = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            call_driver(self.name, self._driver.cuFuncSetAttribute, self._function, carveout, _MAX_CARVEOUT)
        if shared_bytes > self._shared_bytes:
            attribute = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call_driver(self.name, self._driver.cuFuncSetAttribute, self._function, attribute, shared_bytes)
            self._shared_bytes = shared_bytes

    def _allow_large_clusters(self) -> None:
        if not self._is_large_cluster_allowed:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            call_driver(self.name, self._driver.cuFuncSetAttribute, self._function, attribute, 1)
            self._is_large_cluster_allowed = True


def load(cubin: bytes, name: str = "kernel") -> Module:
    """Load a cubin for use on any device; `name` is for error messages.

    *Raises* `KernelLaunchError` when the driver is absent or refuses the image (made for another architecture), or when
    no CUDA context is current on this thread (`torch.cuda.set_device` makes one).
    """
    driver = open_driver()
    if not int(call_driver(name, driver.cuCtxGetCurrent)):
        raise KernelLaunchError(f"{name}: no CUDA context is current on this thread; call torch.cuda.set_device first")
    return Module(name, call_driver(name, driver.cuLibraryLoadData, cubin, None, None, 0, None, None, 0))


def launch_config(
    driver: Any,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared_bytes: int,
    cluster: tuple[int, int, int],
    is_pdl: bool,
) -> Any:
    """A `CUlaunchConfig` with the attributes that the arguments ask for; its stream is set at each launch."""
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block
    config.sharedMemBytes = shared_bytes
    attributes = []
    if _volume(cluster) > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimension = attribute.value.clusterDim
        dimension.x, dimension.y, dimension.z = cluster
        attributes.append(attribute)
    if is_pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class _Arguments:
    """The block of parameter addresses that a launch takes, laid out once; `fill` overwrites the values."""

    def __init__(self, name: str, signature: Sequence[Parameter]):
        self._name = name
        self._fields = tuple(parameter() for parameter in signature)
        self._store = tuple(_store(field) for field in self._fields)
        self._addresses = (ctypes.c_void_p * max(1, len(self._fields)))(*map(ctypes.addressof, self._fields))
        self._block = ctypes.addressof(self._addresses)

    def fill(self, args: Sequence[Any]) -> int:
        """Set the values; returns the block's address."""
        if len(args) != len(self._store):
            raise KernelLaunchError(f"{self._name} takes {len(self._store)} arguments, and {len(args)} were given")
        idx = 0
        try:
            for idx, store in enumerate(self._store):
                store(args[idx])
        except (TypeError, OverflowError, ValueError) as error:
            wanted = type(self._fields[idx]).__name__
            raise KernelLaunchError(f"{self._name}: argument {idx} is {args[idx]!r}, which is no {wanted}") from error
        return self._block


def _store(field: Any) -> Callable[[Any], None]:
    """What writes a value into `field`. ctypes cuts integers to size without a word, so they are checked here."""
    kind = type(field)
    if not hasattr(field, "value"):
        return _store_struct(field)
    if kind in (ctypes.c_float, ctypes.c_double):
        return partial(setattr, field, "value")
    if kind is ctypes.c_void_p:
        low, end = 0, 1 << 64
    else:
        bits = 8 * ctypes.sizeof(kind)
        is_signed = kind(-1).value == -1
        low, end = (-(1 << bits - 1), 1 << bits - 1) if is_signed else (0, 1 << bits)

    def store(value: int) -> None:
        if not low <= value < end:
            raise OverflowError(value)
        field.value = value

    return store


def _store_struct(field: Any) -> Callable[[Any], None]:
    kind, address, size = type(field), ctypes.addressof(field), ctypes.sizeof(field)

    def store(value: Any) -> None:
        if type(value) is not kind:
            raise TypeError(value)
        ctypes.memmove(address, ctypes.addressof(value), size)

    return store


def _xyz(dim: Dim) -> tuple[int, int, int]:
    return (dim, 1, 1) if isinstance(dim, int) else dim


def _volume(dim: Dim) -> int:
    x, y, z = _xyz(dim)
    return x * y * z


def open_driver() -> Any:
    """The module of cuda-bindings that calls the CUDA driver. *Raises* `KernelLaunchError` where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise KernelLaunchError(
            f"kernels are launched through cuda-bindings, which is not here ({error}); "
            "install with: pip install 'doorbell[kernels]'"
        ) from error
    return driver


def call_driver(name: str, function: Callable, *args: Any) -> Any:
    """The result of a driver call, a list of them if there are several. `name` is for error messages.

    *Raises* `KernelLaunchError` when the driver refuses, or when there is none.
    """
    try:
        result, *values = function(*args)
    except RuntimeError as error:
        raise KernelLaunchError(f"{name}: the CUDA driver cannot be used ({error})") from error
    if result:
        _fail(name, function.__name__, result)
    return values if len(values) > 1 else values[0] if values else None


def _fail(name: str, call: str, result: Any, detail: str = "") -> None:
    raise KernelLaunchError(f"{name}: {call} failed with {result.name}{detail}", result.name)
