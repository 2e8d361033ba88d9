"""The NVSHMEM heap against a library made of Python: what is asked of it, in which order, and how each failure reads."""

import ctypes
import enum
import os
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

from comm.heap import Layout, Region
from comm.heap_nvshmem import NvshmemHeap
from launch.environment import prepare_nvshmem
from launch.errors import DoorbellError, HeapExhausted

LAYOUT = Layout.of([Region("a", 1000), Region("b", 300)])
BASE, FAR = 0x10000, 0x900000  # where our memory is, and how much further a peer's is mapped
MEETING = bytes(range(128))


class Record:
    """Of a structure of the library: room that comes uninitialised, as the real one does."""

    num_bytes = 128

    def __init__(self):
        self._room = ctypes.create_string_buffer(b"\xaa" * self.num_bytes, self.num_bytes)

    @property
    def ptr(self):
        return ctypes.addressof(self._room)


class Attributes(Record):
    num_bytes = 144


class Status(enum.IntEnum):
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2


class Library(ModuleType):
    """One process's NVSHMEM, and its GPU. `log` holds the calls in order."""

    uniqueid, InitAttr, Init_status = Record, Attributes, Status
    uniqueid_dtype, init_attr_dtype = SimpleNamespace(itemsize=128), SimpleNamespace(itemsize=144)
    Flags = SimpleNamespace(INIT_WITH_UNIQUEID=8)

    class NVSHMEMError(Exception):
        pass

    def __init__(self):
        super().__init__("nvshmem.bindings")
        self.log, self.status, self.started_as = [], Status.STATUS_NOT_INITIALIZED, None
        self.status_after_start, self.start_error, self.start_gate = Status.STATUS_IS_INITIALIZED, None, None
        self.free_bytes, self.place, self.unreachable, self.refuses = 80 << 30, "0000:01:00.0", None, False

    def init_status(self):
        return self.status

    def get_uniqueid(self, address):
        self.log.append("get_uniqueid")
        ctypes.memmove(address, MEETING, 128)

    def set_attr_uniqueid_args(self, rank, size, meeting, attributes):
        self.started_as = (rank, size, ctypes.string_at(meeting, 128), ctypes.string_at(attributes, 144))

    def hostlib_init_attr(self, flags, attributes):
        assert flags == 8 and threading.current_thread().name == "nvshmem-start"
        if self.start_gate is not None:
            self.start_gate.wait(20.0)
        if self.start_error is not None:
            raise self.start_error
        self.log.append("start")
        self.status = self.status_after_start

    def malloc(self, num_bytes):
        self.log.append(f"malloc {num_bytes}")
        return 0 if self.refuses else BASE

    def ptr(self, base, peer):
        assert base == BASE
        return 0 if peer == self.unreachable else BASE + peer * FAR

    def free(self, base):
        self.log.append(f"free {base:#x}")

    def hostlib_finalize(self):
        self.log.append("finalize")
        self.status = Status.STATUS_NOT_INITIALIZED


@pytest.fixture
def library(monkeypatch):
    library = Library()
    log = library.log

    class CUDARuntimeError(RuntimeError):
        pass

    class Device:
        def __init__(self, index):
            assert index == 1

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    runtime = SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError,
        free=lambda address: None,
        memGetInfo=lambda: (library.free_bytes, 80 << 30),
        deviceGetPCIBusId=lambda index: library.place,
        memset=lambda address, byte, num_bytes: log.append(f"memset {address:#x} {byte} {num_bytes}"),
        deviceSynchronize=lambda: log.append("synchronize"),
    )
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(Device=Device, runtime=runtime)
    pathfinder = ModuleType("cuda.pathfinder")
    pathfinder.load_nvidia_dynamic_lib = lambda name: log.append(f"load {name}")
    package = ModuleType("nvshmem")
    package.bindings = library
    parent = ModuleType("cuda")
    parent.pathfinder = pathfinder
    modules = {"cupy": cupy, "cuda": parent, "cuda.pathfinder": pathfinder, "nvshmem": package, "nvshmem.bindings": library}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return library


def heap(library, rank=0, size=2, answers=None, deadline_s=10.0):
    """Open it on `rank`. `answers(own value, call number)` gives rank 1 - `rank`'s side of an exchange; it agrees by default."""
    calls = []

    def exchange(value):
        calls.append(value)
        library.log.append("exchange")
        other = answers(value, len(calls)) if answers else value
        return [value, other] if rank == 0 else [other, value]

    return NvshmemHeap(rank, size, 1, LAYOUT, exchange, deadline_s)


def without_exchanges(library):
    return [entry for entry in library.log if entry != "exchange"]


def test_it_starts_then_allocates_then_zeroes(library):
    ours = heap(library)
    assert without_exchanges(library) == [
        "load nvshmem_host",
        "get_uniqueid",
        "start",
        f"malloc {LAYOUT.num_bytes}",
        f"memset {BASE:#x} 0 {LAYOUT.num_bytes}",
        "synchronize",
    ]
    assert library.log[-1] == "exchange", "a peer might store before the memory is zeroed"
    assert library.started_as == (0, 2, MEETING, bytes(144)), "the attributes come uninitialised"
    assert ours.kind == "nvshmem" and ours.address(0, "a") == BASE
    assert ours.address(0, "b") == BASE + LAYOUT.offsets["b"]
    assert ours.address(1, "b") == BASE + FAR + LAYOUT.offsets["b"]
    assert os.environ["NVSHMEM_DISABLE_NVLS"] == "1" and os.environ["NVSHMEM_SYMMETRIC_SIZE"] == str(LAYOUT.num_bytes)


def test_all_ranks_meet_where_rank_0_says(library):
    def answers(value, _):
        return bytes(reversed(MEETING)).hex() if value == "" else value

    library.ptr = lambda base, peer: BASE + FAR
    heap(library, rank=1, answers=answers)
    assert "get_uniqueid" not in library.log
    assert library.started_as[:3] == (1, 2, bytes(reversed(MEETING)))


def test_fill_touches_one_region_of_the_own_part(library):
    ours = heap(library)
    del library.log[:]
    ours.fill("b", 0x80)
    assert library.log == [f"memset {BASE + LAYOUT.offsets['b']:#x} 128 300", "synchronize"]


def test_close_waits_for_all_then_frees_once(library):
    ours = heap(library)
    del library.log[:]
    ours.close()
    ours.close()
    assert library.log == ["synchronize", "exchange", f"free {BASE:#x}", "finalize"]
    assert heap(library).address(0, "a") == BASE, "it can be opened again"


def test_abandon_waits_for_nobody(library):
    ours = heap(library)
    del library.log[:]
    ours.abandon()
    ours.close()
    assert library.log == []


def test_missing_bindings_name_the_package(library, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    monkeypatch.delitem(sys.modules, "nvshmem.bindings")
    with pytest.raises(DoorbellError, match=r"rank 0: nvshmem4py is not installed: pip install nvshmem4py-cu1[23]$"):
        heap(library)


def test_a_missing_library_is_a_reason(library, monkeypatch):
    def absent(name):
        raise RuntimeError("libnvshmem_host.so.3 not found")

    monkeypatch.setattr(sys.modules["cuda.pathfinder"], "load_nvidia_dynamic_lib", absent)
    with pytest.raises(DoorbellError, match="NVSHMEM failed on rank 0: libnvshmem_host.so.3 not found"):
        heap(library)


def test_nvshmem_in_use_is_refused_before_it_is_touched(library):
    library.status = Status.STATUS_IS_INITIALIZED
    with pytest.raises(DoorbellError, match="in use in this process already"):
        heap(library)
    assert without_exchanges(library) == ["load nvshmem_host"]


@pytest.mark.parametrize("ranks_here, free_mib, fits", [(1, 1024, True), (1, 1023, False), (2, 2048, True), (2, 2047, False)])
def test_room_is_asked_for_before_the_start(library, ranks_here, free_mib, fits):
    """One step of 512 MiB for NVSHMEM and one for a small layout, for every rank of the GPU."""
    library.free_bytes = free_mib << 20

    def answers(value, _):
        return "0000:02:00.0" if value == library.place and ranks_here == 1 else value

    if fits:
        heap(library, answers=answers)
        return
    with pytest.raises(HeapExhausted, match=rf"{ranks_here * 1024} MiB do not fit GPU 1, which has {free_mib} MiB free"):
        heap(library, answers=answers)
    assert "get_uniqueid" not in library.log


def test_uneven_ranks_a_gpu_are_refused(library):
    def exchange(value):
        return [value, value, "0000:02:00.0" if value == library.place else value]

    with pytest.raises(DoorbellError, match="equally many ranks on each GPU"):
        NvshmemHeap(0, 3, 1, LAYOUT, exchange)
    assert "get_uniqueid" not in library.log


def test_a_start_that_only_seems_to_succeed_is_noticed(library):
    library.status_after_start = Status.STATUS_IS_BOOTSTRAPPED
    with pytest.raises(DoorbellError, match="rank 0: it did not start"):
        heap(library)
    assert not any(entry.startswith("malloc") for entry in library.log)


def test_an_error_of_the_library_is_named(library):
    library.start_error = Library.NVSHMEMError("Status code 7")
    with pytest.raises(DoorbellError, match="rank 0: hostlib_init_attr: Status code 7"):
        heap(library)


def test_a_start_that_hangs_has_a_deadline(library):
    library.start_gate = threading.Event()
    try:
        with pytest.raises(DoorbellError, match=r"rank 0: it did not start within 0\.2 s"):
            heap(library, deadline_s=0.2)
    finally:
        library.start_gate.set()


def test_a_peer_that_is_not_mapped_is_named(library):
    library.unreachable = 1
    with pytest.raises(DoorbellError, match="GPU 1 cannot reach the memory of rank 1"):
        heap(library)


def test_a_refused_allocation_is_exhaustion(library):
    library.refuses = True
    with pytest.raises(HeapExhausted, match="refused to allocate"):
        heap(library)


@pytest.mark.parametrize("is_exhausted, kind", [(True, HeapExhausted), (False, DoorbellError)])
def test_a_peers_failure_is_everybodys_of_the_same_kind(library, is_exhausted, kind):
    def answers(value, call):
        return [is_exhausted, "no luck"] if call == 4 else value  # after loading, the place, the checks of it

    with pytest.raises(DoorbellError, match="^NVSHMEM failed on rank 1: no luck$") as caught:
        heap(library, answers=answers)
    assert type(caught.value) is kind
    assert "start" not in library.log


def test_settings_leave_the_users_interface_alone():
    environ = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "eth7", "NVSHMEM_DISABLE_NVLS": "0", "NVSHMEM_DEBUG": "INFO"}
    prepare_nvshmem(4096, environ)
    assert environ["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "eth7" and environ["NVSHMEM_DEBUG"] == "INFO"
    assert environ["NVSHMEM_DISABLE_NVLS"] == "1" and environ["NVSHMEM_REMOTE_TRANSPORT"] == "none"
    assert environ["NVSHMEM_SYMMETRIC_SIZE"] == "4096"
    other = {}
    prepare_nvshmem(1, other)
    assert other["NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"] == "lo"
