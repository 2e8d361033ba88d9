"""Launching kernels: how arguments are packed, what the driver is asked for, how its refusals are told.

The driver is a recording; the launch configuration itself is read back from memory where cuda-bindings is installed.
"""

import ctypes
import enum
import struct
from types import SimpleNamespace

import pytest

from kernels import graph_nodes, launch_kernel
from launch.errors import KernelLaunchError

POINTERS = ctypes.c_void_p * 2
SIGNATURE = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, POINTERS, ctypes.c_int64)


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class RecordingDriver:
    """Answers like cuda-bindings, and copies the arguments at a launch as the driver does."""

    CUfunction_attribute = SimpleNamespace(
        CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES="static",
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout",
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED="large",
    )
    CUlaunchAttributeID = SimpleNamespace(
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION="cluster", CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION="pdl"
    )

    num_static_bytes = 1 << 10  # of shared memory

    def __init__(self, context=1, refuse=None):
        self.context, self.refuse = context, refuse
        self.launches, self.attributes, self.loaded, self.num_configs = [], [], [], 0

    def CUlaunchConfig(self):
        self.num_configs += 1
        return SimpleNamespace()

    def CUlaunchAttribute(self):
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuCtxGetCurrent(self):
        return Code.CUDA_SUCCESS, self.context

    def cuLibraryLoadData(self, image, *_):
        return (Code.CUDA_ERROR_NO_BINARY_FOR_GPU, None) if image == b"other" else (Code.CUDA_SUCCESS, "library")

    def cuLibraryGetKernel(self, library, name):
        return Code.CUDA_SUCCESS, ("kernel", library, name)

    def cuKernelGetFunction(self, kernel):
        return Code.CUDA_SUCCESS, ("function", kernel)

    def cuFuncLoad(self, function):
        self.loaded.append(function)
        return (Code.CUDA_SUCCESS,)

    def cuFuncGetAttribute(self, attribute, function):
        assert attribute == "static"
        return Code.CUDA_SUCCESS, self.num_static_bytes

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes.append((attribute, value))
        return (Code.CUDA_SUCCESS,)

    def cuLaunchKernelEx(self, config, function, block, extra):
        addresses = ctypes.cast(block, ctypes.POINTER(ctypes.c_void_p))
        values = [kind.from_address(addresses[idx]) for idx, kind in enumerate(SIGNATURE)]
        plain = tuple(list(value) if isinstance(value, ctypes.Array) else value.value for value in values)
        self.launches.append((dict(vars(config)), plain))
        return (self.refuse or Code.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch):
    recording = RecordingDriver()
    monkeypatch.setattr(launch_kernel, "open_driver", lambda: recording)
    return recording


ARGS = (2**63 + 1, -(2**31), 2**32 - 1, 0.5, POINTERS(3, 4), -1)


def kernel_of(driver):
    return launch_kernel.load(b"image", "lamport").function("add", SIGNATURE)


def test_arguments_arrive_as_declared_and_are_patched_at_each_launch(driver):
    kernel = kernel_of(driver)
    kernel.launch(1, 32, ARGS, stream=7)
    kernel.launch(1, 32, (8, 1, 2, 3, POINTERS(5, 6), 2**63 - 1), stream=9)
    (first, values), (second, others) = driver.launches
    assert values == (2**63 + 1, -(2**31), 2**32 - 1, 0.5, [3, 4], -1) and first["hStream"] == 7
    assert others == (8, 1, 2, 3.0, [5, 6], 2**63 - 1) and second["hStream"] == 9
    assert driver.num_configs == 1, "a configuration is made once a shape"


def test_configurations_of_any_length_do_not_pile_up(driver):
    kernel = kernel_of(driver)
    for grid in range(1, 2100):
        kernel.launch(grid, 32, ARGS, stream=0)
        assert len(kernel._configs) <= 1024
    assert [config["gridDimX"] for config, _ in driver.launches] == list(range(1, 2100))


@pytest.mark.parametrize(
    "idx, value", [(0, -1), (0, 2**64), (0, None), (0, 1.5), (1, 2**31), (2, -1), (3, "x"), (4, [1, 2]), (5, 2**63)]
)
def test_values_that_do_not_fit_are_refused_and_not_cut(driver, idx, value):
    args = [*ARGS[:idx], value, *ARGS[idx + 1 :]]
    with pytest.raises(KernelLaunchError, match=f"lamport:add: argument {idx} is .*, which is no c_"):
        kernel_of(driver).launch(1, 32, args, stream=0)
    assert not driver.launches


def test_the_number_of_arguments_is_checked(driver):
    with pytest.raises(KernelLaunchError, match="lamport:add takes 6 arguments, and 5 were given"):
        kernel_of(driver).launch(1, 32, ARGS[:5], stream=0)


def test_a_plain_launch_has_no_attributes(driver):
    kernel_of(driver).launch((2, 3, 4), (8, 4, 2), ARGS, stream=0)
    config, _ = driver.launches[0]
    assert (config["gridDimX"], config["gridDimY"], config["gridDimZ"]) == (2, 3, 4)
    assert (config["blockDimX"], config["blockDimY"], config["blockDimZ"]) == (8, 4, 2)
    assert config["attrs"] == [] and config["numAttrs"] == 0 and config["sharedMemBytes"] == 0
    assert driver.attributes == [("carveout", 100)]


def test_clusters_and_pdl_are_attributes(driver):
    kernel_of(driver).launch(16, 128, ARGS, stream=0, cluster=16, is_pdl=True)
    config, _ = driver.launches[0]
    cluster, pdl = config["attrs"]
    assert cluster.id == "cluster" and vars(cluster.value.clusterDim) == {"x": 16, "y": 1, "z": 1}
    assert pdl.id == "pdl" and pdl.value.programmaticStreamSerializationAllowed == 1 and config["numAttrs"] == 2
    assert driver.attributes == [("carveout", 100), ("large", 1)]


def test_more_shared_memory_than_usual_is_asked_for_once(driver):
    kernel = kernel_of(driver)
    for shared_bytes in (47 << 10, 48 << 10, 100 << 10, 100 << 10, 60 << 10, 200 << 10):
        kernel.launch(1, 32, ARGS, stream=0, shared_bytes=shared_bytes)
    assert driver.attributes == [("carveout", 100)] + [("shared", kib << 10) for kib in (48, 100, 200)], "beside 1 KiB static"


def test_a_function_is_resident_before_its_first_launch(driver):
    kernel_of(driver)
    assert driver.loaded == [("function", ("kernel", "library", b"add"))]


def test_a_refused_launch_names_kernel_shape_and_code(driver):
    kernel = kernel_of(driver)
    driver.refuse = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelLaunchError, match=r"lamport:add: cuLaunchKernelEx failed with .*grid 5, block 2000") as caught:
        kernel.launch(5, 2000, ARGS, stream=0)
    assert caught.value.code == "CUDA_ERROR_INVALID_VALUE"


def test_an_image_for_another_gpu_is_named(driver):
    with pytest.raises(KernelLaunchError, match="lamport: cuLibraryLoadData failed with CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launch_kernel.load(b"other", "lamport")


def test_loading_without_a_context_says_what_to_do(driver):
    driver.context = 0
    with pytest.raises(KernelLaunchError, match="no CUDA context is current on this thread; call torch.cuda.set_device"):
        launch_kernel.load(b"image")


def test_the_configuration_that_the_driver_reads():
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (make kernels)")
    config = launch_kernel.launch_config(driver, (4, 5, 6), (32, 2, 1), 1000, (2, 1, 1), True)
    *numbers, _, attributes, count = struct.unpack_from("<7IxxxxQQI", ctypes.string_at(config.getPtr(), 56))
    assert numbers == [4, 5, 6, 32, 2, 1, 1000] and count == 2
    # CUlaunchAttribute of cuda.h: a 4-byte id, 4 bytes of padding, a 64-byte union.
    raw = ctypes.string_at(attributes, 144)
    assert struct.unpack_from("<I4xIII", raw) == (4, 2, 1, 1)  # CLUSTER_DIMENSION
    assert struct.unpack_from("<I4xI", raw, 72) == (6, 1)  # PROGRAMMATIC_STREAM_SERIALIZATION


def test_launches_are_counted(driver):
    before = launch_kernel.Kernel.num_launched
    kernel_of(driver).launch(1, 32, ARGS, stream=7)
    kernel_of(driver).launch(2, 32, ARGS, stream=7)
    driver.refuse = Code.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelLaunchError):
        kernel_of(driver).launch(1, 32, ARGS, stream=7)
    assert launch_kernel.Kernel.num_launched == before + 2


class GraphDriver:
    """Answers what a graph of `kinds` of nodes is made of; a first call without room tells how many there are."""

    CUgraphNodeType = SimpleNamespace(CU_GRAPH_NODE_TYPE_GRAPH="graph", CU_GRAPH_NODE_TYPE_KERNEL="kernel")

    def __init__(self, *kinds):
        self.kinds = kinds

    def CUgraph(self, handle):
        return ("graph", handle)

    def cuGraphGetNodes(self, graph, room):
        assert graph == ("graph", 77)
        return Code.CUDA_SUCCESS, list(range(min(room, len(self.kinds)))), len(self.kinds)

    def cuGraphNodeGetType(self, node):
        return Code.CUDA_SUCCESS, self.kinds[node]


@pytest.mark.parametrize(
    "kinds, count", [((), 0), (("kernel", "event", "kernel", "memset"), 2), (("kernel", "graph", "kernel"), None)]
)
def test_the_kernels_of_a_graph(monkeypatch, kinds, count):
    monkeypatch.setattr(graph_nodes, "open_driver", lambda: GraphDriver(*kinds))
    assert graph_nodes.count_kernel_nodes(77) == count
