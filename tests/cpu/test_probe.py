"""The probe, without a GPU: what follows from made-up facts, what is asked of a made-up driver, and the IPC trial itself
with real processes whose device memory is files."""

import enum
import json
import sys
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from file_memory import FileMemory

from launch import machine, probe, probe_gpus
from launch.probe_choice import choose
from launch.probe_facts import Facts, Gpu, Host, IpcTrial, Link, Nvshmem
from launch.probe_gpus import ProbeFailed, count_nvlinks, find_gpus, find_links
from launch.probe_ipc import try_ipc
from launch.probe_software import kernel_driver_version, package_versions
from launch.probe_table import table

GIB = 1 << 30
HOST = Host("CPU", 8, 64 * GIB, None, 16 * GIB, 16 * GIB)
UUIDS = ("GPU-00000000-0000-0000-0000-000000000001", "GPU-00000000-0000-0000-0000-000000000002")


def gpu(index, **changes):
    fields = dict(sm_clock_mhz=1980, memory_clock_mhz=3201, has_64_bit_stream_ops=True, has_nor_wait=True)
    uuid = f"GPU-00000000-0000-0000-0000-{index + 1:012x}"
    made = Gpu(index, "H200", uuid, f"0000:0{index}:00.0", 141 * GIB, 132, "9.0", **fields, has_remote_flush=False)
    return replace(made, **changes)


def node(num_gpus=2, lanes=18, can_access=True, atomics=True, ipc=True, **changes):
    """A machine with `num_gpus` alike GPUs and links."""
    pairs = [(a, b) for b in range(num_gpus) for a in range(b)]
    links = tuple(Link(a, b, can_access, atomics, 0, lanes) for a, b in pairs)
    trial = IpcTrial(tuple(range(num_gpus)), ipc, "fine" if ipc else "not permitted")
    return Facts(HOST, tuple(gpu(index) for index in range(num_gpus)), num_gpus, links, trial, **changes)


# The choice

SHM_FULL = replace(HOST, shm_free_bytes=15 << 20)
NVSHMEM = Nvshmem(True, "found", "3.4.5")


@pytest.mark.parametrize(
    "facts, num_ranks, name, words",
    [
        (node(2), None, "ipc", ["IPC works", "NVLink between all GPUs, 18 lanes", "Lamport"]),
        (node(8), None, "ipc", ["NVLink between all GPUs"]),
        (node(2, lanes=None), None, "ipc", ["native atomics everywhere"]),
        (node(2, lanes=0), None, "ipc", ["PCIe", "0-1", "posted writes"]),
        (node(4, lanes=0, atomics=False), None, "ipc", ["0-1, 0-2, 1-2, 0-3, ...", "nobody polls"]),
        (node(2, can_access=False), None, "nccl", ["GPUs 0 and 1 have no peer access"]),
        (node(2, can_access=False, nvshmem=NVSHMEM), None, "nccl", ["no peer access"]),
        (node(2, ipc=False), None, "nccl", ["IPC does not work: not permitted"]),
        (node(2, ipc=False, nvshmem=NVSHMEM), None, "nvshmem", ["IPC does not work", "NVSHMEM: found"]),
        (node(2, ipc=False, nvshmem=NVSHMEM), 4, "nvshmem", ["IPC does not work", "NVSHMEM: found"]),
        (replace(node(2), ipc=None, unknown={"ipc": "boom"}), None, "nccl", ["was not tried: boom"]),
        (replace(node(2), links=(), unknown={"links": "boom"}), None, "nccl", ["not known: boom"]),
        (replace(node(2), gpus=(), unknown={"gpus": "boom"}), None, "nccl", ["could not be asked: boom"]),
        (node(1), 2, "ipc", ["2 ranks share 1 GPU", "gloo", "MPS"]),
        (node(2), 8, "ipc", ["NVLink", "8 ranks share 2 GPUs", "MPS"]),
        (node(1, ipc=False), 2, "gloo", ["not permitted", "NCCL refuses 2 ranks on 1 GPU"]),
        (node(1), None, "none", ["no peers"]),
        (node(8, can_access=False), 1, "none", ["no peers"]),
        (Facts(HOST), None, "one_shot", ["no GPU", "ranks share memory"]),
        (replace(node(2), torch_gpus=0), None, "one_shot", ["torch is a CPU build"]),
        (Facts(SHM_FULL), 2, "gloo", ["15 MiB free of the 16 MiB"]),
        (Facts(SHM_FULL), 1, "none", []),
        (Facts(replace(HOST, shm_bytes=None, shm_free_bytes=None)), 2, "gloo", ["/dev/shm cannot be used"]),
        (replace(node(2), gpus=(gpu(0), gpu(1, has_64_bit_stream_ops=False))), None, "ipc", ["inside kernels"]),
    ],
)
def test_the_choice_follows_from_the_facts(facts, num_ranks, name, words):
    choice = choose(facts, num_ranks)
    assert choice.name == name
    for word in words:
        assert word in "; ".join(choice.reasons)


def test_only_the_gpus_that_ranks_use_decide():
    facts = node(4)
    links = tuple(replace(link, can_access=link.second < 2, num_nvlinks=18 * (link.second < 2)) for link in facts.links)
    pair = choose(replace(facts, links=links), 2)
    assert pair.name == "ipc" and "NVLink between all GPUs" in pair.reasons[1]
    assert choose(replace(facts, links=links), 3).name == "nccl"


# The driver and NVML


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_DEVICE = 101


class Names:
    """Any enum: gives back the names asked for, and remembers them."""

    def __init__(self):
        self.asked = set()

    def __getattr__(self, name):
        self.asked.add(name)
        return name


class MadeUpDriver:
    """Two GPUs like those of cuda-bindings; `one_way` holds for GPU 0 to 1 only."""

    def __init__(self, **one_way):
        self.one_way = one_way
        self.CUdevice_attribute, self.CUdevice_P2PAttribute = Names(), Names()

    def cuDeviceGetCount(self):
        return Code.CUDA_SUCCESS, 2

    def cuDeviceGet(self, index):
        return Code.CUDA_SUCCESS, index

    def cuDeviceGetAttribute(self, attribute, device):
        known = {"COMPUTE_CAPABILITY_MAJOR": 9, "MULTIPROCESSOR_COUNT": 132, "CLOCK_RATE": 1980000, "MEMORY_CLOCK_RATE": 3201000}
        known |= {"CAN_USE_64_BIT_STREAM_MEM_OPS": 1, "CAN_USE_STREAM_WAIT_VALUE_NOR": 1}
        return Code.CUDA_SUCCESS, known.get(attribute.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0)

    def cuDeviceGetName(self, length, device):
        return Code.CUDA_SUCCESS, b"H200" + bytes(length - 4)

    def cuDeviceGetUuid(self, device):
        return Code.CUDA_SUCCESS, SimpleNamespace(bytes=bytes(15) + bytes([device + 1]))

    def cuDeviceGetPCIBusId(self, length, device):
        return Code.CUDA_SUCCESS, f"0000:0{device}:00.0".encode() + bytes(length - 12)

    def cuDeviceTotalMem(self, device):
        return Code.CUDA_SUCCESS, 141 * GIB

    def cuDeviceCanAccessPeer(self, first, second):
        return Code.CUDA_SUCCESS, int(first < second or not self.one_way.get("access"))

    def cuDeviceGetP2PAttribute(self, attribute, first, second):
        if "ATOMIC" in attribute:
            return Code.CUDA_SUCCESS, int(first < second or not self.one_way.get("atomics"))
        return Code.CUDA_SUCCESS, second if self.one_way.get("rank") else 0


def test_gpus_are_read_from_the_driver():
    assert find_gpus(MadeUpDriver()) == (gpu(0), gpu(1))


def test_links_are_read_from_the_driver_and_hold_both_ways():
    assert find_links(MadeUpDriver(), 2) == (Link(0, 1, True, True, 0, None),)
    assert find_links(MadeUpDriver(access=True), 2) == (Link(0, 1, False, True, 0, None),)
    assert find_links(MadeUpDriver(atomics=True), 2) == (Link(0, 1, True, False, 0, None),)
    assert find_links(MadeUpDriver(rank=True), 2) == (Link(0, 1, True, True, 1, None),)


def test_a_driver_that_refuses_is_named():
    driver = MadeUpDriver()

    def cuDeviceTotalMem(device):
        return Code.CUDA_ERROR_INVALID_DEVICE, 0

    driver.cuDeviceTotalMem = cuDeviceTotalMem
    with pytest.raises(ProbeFailed, match="cuDeviceTotalMem failed with CUDA_ERROR_INVALID_DEVICE"):
        find_gpus(driver)


def test_what_is_asked_for_exists_in_cuda_bindings():
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed (make kernels)")
    driver = MadeUpDriver()
    find_gpus(driver)
    find_links(driver, 2)
    for kind in ("CUdevice_attribute", "CUdevice_P2PAttribute"):
        asked = getattr(driver, kind).asked
        assert asked and {name for name in asked if not hasattr(getattr(real, kind), name)} == set()


class MadeUpNvml:
    """`lanes[uuid]`: the far end of each lane that is up, None where it is not told."""

    NVML_NVLINK_MAX_LINKS, NVML_FEATURE_ENABLED, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 18, 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, lanes, status=0):
        self.lanes, self.status = lanes, status

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetNvLinkState(self, handle, lane):
        if lane == 17:
            raise self.NVMLError("not supported")
        return int(lane < len(self.lanes[handle]))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, lane):
        if self.lanes[handle][lane] is None:
            raise self.NVMLError("not told")
        return SimpleNamespace(busId=self.lanes[handle][lane].encode())

    def nvmlDeviceGetP2PStatus(self, first, second, kind):
        return self.status


@pytest.mark.parametrize(
    "lanes, status, expected",
    [
        ((["00000000:01:00.0"] * 4 + ["00000000:05:00.0"] * 4, ["00000000:00:00.0"] * 4 + ["x"] * 4), 0, 4),  # and others
        ((["00000000:AA:00.0"] * 16, ["00000000:AA:00.0"] * 12), 0, 12),  # through a switch
        (([None] * 16, [None] * 16), 0, 16),  # a virtual machine
        (([None] * 16, [None] * 16), 1, 0),
        (([], []), 0, 0),
    ],
)
def test_lanes_between_two_gpus(lanes, status, expected):
    nvml = MadeUpNvml(dict(zip(UUIDS, lanes)), status)
    assert count_nvlinks(nvml, (gpu(0), gpu(1))) == {(0, 1): expected}


# The trial of CUDA IPC


def run_trial(folder, fault="", devices=(0, 1), deadline_s=60.0):
    return try_ipc(devices, deadline_s, partial(FileMemory, str(folder), fault, devices[-1]))


@pytest.mark.parametrize("devices", [(0, 1, 2), (0, 0)])
def test_a_trial_that_works_leaves_nothing(tmp_path, devices):
    trial = run_trial(tmp_path, devices=devices)
    assert trial == IpcTrial(devices, True, f"{len(devices)} processes mapped, read and wrote each other's 2 MiB")
    assert not list(tmp_path.iterdir()), "every process freed its memory, after all had closed it"


def test_nobody_frees_before_a_slow_peer_has_closed(tmp_path):
    assert run_trial(tmp_path, "slow").is_working


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("refuse", "GPU 1: no such device"),
        ("zeros", "GPU 1: the memory of process 0 does not hold what it wrote"),
        ("copy", "GPU 0: what process 1 wrote is not there"),
        ("die", "the process on GPU 1 died when it should share its memory"),
    ],
)
def test_a_trial_that_fails_says_where(tmp_path, fault, reason):
    assert run_trial(tmp_path, fault) == IpcTrial((0, 1), False, reason)


def test_a_trial_that_hangs_ends_at_its_deadline(tmp_path):
    started = time.monotonic()
    trial = run_trial(tmp_path, "hang", deadline_s=4.0)
    assert trial == IpcTrial((0, 1), False, "the process on GPU 1 did not use its peers' memory in time")
    assert time.monotonic() - started < 30


# The whole


@pytest.fixture
def without_gpu(monkeypatch):
    def load_driver():
        raise ProbeFailed("no NVIDIA driver")

    monkeypatch.setattr(probe, "load_driver", load_driver)
    monkeypatch.setattr(probe, "count_torch_gpus", lambda: 0)


def test_a_machine_without_a_gpu_says_so(without_gpu):
    result = CliRunner().invoke(probe.main, [])
    assert result.exit_code == 0 and "none found: no NVIDIA driver" in result.output
    assert "choice          one_shot" in result.output or "choice          gloo" in result.output


def test_the_json_document_is_one_and_complete(without_gpu):
    result = CliRunner().invoke(probe.main, ["--json", "--ranks", "1"])
    document = json.loads(result.output)
    assert document["choice"]["name"] == "none" and document["unknown"]["gpus"] == "no NVIDIA driver"
    assert document["host"]["num_cores"] >= 1 and document["versions"]["torch"] and document["multicast"].startswith("off")


def test_every_probe_that_fails_becomes_a_named_fact(without_gpu, monkeypatch):
    def broken(*_):
        raise OSError("broken")

    for owner, name in ((machine, "cpu_name"), (machine, "shared_memory_bytes"), (machine, "available_memory_bytes")):
        monkeypatch.setattr(owner, name, broken)
    for name in ("count_torch_gpus", "find_nvshmem", "torch_versions", "package_versions"):
        monkeypatch.setattr(probe, name, broken)
    facts = probe.probe()
    expected = {"CPU", "/dev/shm", "memory", "torch's GPUs", "NVSHMEM", "torch's versions", "package versions", "gpus"}
    assert set(facts.unknown) == expected and facts.unknown["CPU"] == "broken"
    assert "not known       NVSHMEM: broken" in table(facts, choose(facts))


def test_gpus_links_and_trial_come_together(monkeypatch):
    monkeypatch.setattr(probe, "load_driver", MadeUpDriver)
    monkeypatch.setattr(probe, "_ask_nvml", lambda gpus: {(0, 1): 18})
    monkeypatch.setattr(probe, "_driver_cuda_version", lambda: "13.0")
    monkeypatch.setattr(probe, "count_torch_gpus", lambda: 2)
    monkeypatch.setattr(probe, "try_ipc", lambda devices, deadline_s: IpcTrial(tuple(devices), True, "fine"))
    facts = probe.probe()
    assert facts.links == (Link(0, 1, True, True, 0, 18),) and facts.ipc.devices == (0, 1)
    text = table(facts, choose(facts))
    assert "link 0-1        NVLink, 18 lanes, peer access, native atomics, performance rank 0" in text
    assert "multicast       off" in text and "choice          ipc" in text
    assert json.loads(json.dumps(facts.as_json()))["links"][0]["kind"] == "NVLink, 18 lanes"


def test_lanes_stay_unknown_without_nvml(monkeypatch):
    monkeypatch.setattr(probe, "load_driver", MadeUpDriver)
    monkeypatch.setattr(probe, "try_ipc", lambda devices, deadline_s: None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    facts = probe.probe()
    assert facts.links[0].num_nvlinks is None and facts.links[0].kind == "not known"
    assert "nvidia-ml-py is not installed" in facts.unknown["NVLink lanes"]


def test_small_shared_memory_comes_with_dockers_remedy():
    small = replace(HOST, shm_bytes=64 << 20, shm_free_bytes=64 << 20)
    assert "--shm-size=1g or --ipc=host" in table(Facts(small), choose(Facts(small)))
    assert "--shm-size" not in table(Facts(HOST), choose(Facts(HOST)))


@pytest.mark.parametrize(
    "v2, v1, expected",
    [("1073741824\n", None, GIB), ("max\n", None, None), (None, "1073741824", GIB), (None, "9223372036854771712", None)],
)
def test_the_memory_limit_of_either_cgroup_version(tmp_path, v2, v1, expected):
    for name, text in (("memory.max", v2), ("memory.limit_in_bytes", v1)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert machine.memory_limit_bytes(tmp_path, tmp_path) == expected


def test_the_kernel_driver_version_is_read_from_its_file(tmp_path):
    path = tmp_path / "version"
    path.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 13\n")
    assert kernel_driver_version(path) == "580.159.04"
    path.write_text("")
    assert kernel_driver_version(path) is None and kernel_driver_version(tmp_path / "none") is None


def test_versions_of_packages_that_are_absent_are_none():
    versions = package_versions()
    assert versions["torch"] and set(versions) >= {"cupy", "cuda-bindings", "nvrtc", "nvshmem4py"}


def test_an_absent_driver_and_hidden_gpus_are_told_apart(monkeypatch):
    codes = enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_NO_DEVICE": 100, "CUDA_ERROR_SYSTEM_NOT_READY": 802})
    driver = SimpleNamespace(CUresult=codes)
    modules = {"cuda": SimpleNamespace(__path__=[]), "cuda.bindings": SimpleNamespace(driver=driver, __path__=[])}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for code, words in ((codes.CUDA_ERROR_NO_DEVICE, "CUDA_VISIBLE_DEVICES"), (codes.CUDA_ERROR_SYSTEM_NOT_READY, "NOT_READY")):
        driver.cuInit = lambda _, code=code: (code,)
        with pytest.raises(ProbeFailed, match=words):
            probe_gpus.load_driver()
    driver.cuInit = lambda _: (codes.CUDA_SUCCESS,)
    assert probe_gpus.load_driver() is driver
