"""Building kernels: what a key covers, what the cache survives, what the tables of variants may say.

The compiler is needed only by the tests that take `nvrtc`; CI installs it (`make kernels`), a newcomer need not.
"""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kernels import build, compile_all
from kernels.build import Build
from kernels.build_cache import BuildCache, Built
from kernels.build_source import read_sources
from kernels.build_usage import KernelUsage, kernel_usages
from kernels.build_variants import Variant, find_variants, variant_of, variants_of
from launch.environment import cache_folder
from launch.errors import KernelBuildError

ROOT = Path(__file__).resolve().parents[2]
BUILT = Built(b"\x7fELF cubin", "ptxas info")
SAMPLE = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'spiller' for 'sm_90a'
ptxas info    : Function properties for spiller
ptxas         .     216 bytes stack frame, 264 bytes spill stores, 260 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 216 bytes cumulative stack size
ptxas info    : Compile time = 12.796 ms
ptxas info    : Compiling entry function 'adder' for 'sm_90a'
ptxas info    : Function properties for adder
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 512 bytes smem
ptxas info    : Compile time = 1.672 ms
"""


@pytest.fixture
def nvrtc():
    pytest.importorskip("cuda.bindings.nvrtc", reason="the compiler is not installed (make kernels)")
    try:
        return build._nvrtc_version()
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def known_version(monkeypatch):
    monkeypatch.setattr(build, "_nvrtc_version", lambda: (13, 0))


def write(folder, **files):
    """Files by name, with `_cu` and `_cuh` for the dots."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        stem, _, suffix = name.rpartition("_")
        (folder / f"{stem}.{suffix}").write_text(text)
    return folder


@pytest.fixture
def tree(tmp_path):
    """A source that includes `a.cuh` beside it, which includes `b.cuh` of another folder, which includes `a.cuh`."""
    write(tmp_path / "lib", b_cuh='#pragma once\n#include "a.cuh"\n#define B 2\n', stranger_cuh="#define S 1\n")
    text = '#include "a.cuh"\nextern "C" __global__ void add(float* x) { x[0] += A + B + N; }\n'
    write(tmp_path / "src", add_cu=text, a_cuh='#pragma once\n  #  include "b.cuh" // why\n#define A 1\n')
    return tmp_path


# Sources and keys


def test_headers_are_found_through_headers_and_a_circle_ends(tree):
    sources = read_sources(tree / "src/add.cu", [tree / "lib", tree / "src"])
    assert {name: text.decode() for name, text in sources.headers.items()} == {
        "a.cuh": (tree / "src/a.cuh").read_text(),
        "b.cuh": (tree / "lib/b.cuh").read_text(),
    }


def test_the_folder_of_the_including_file_comes_first(tree):
    write(tree / "lib", a_cuh="#define A 100\n")
    write(tree / "lib", b_cuh="#define B 2\n")
    assert b"#define A 1\n" in read_sources(tree / "src/add.cu", [tree / "lib"]).headers["a.cuh"]


def test_a_header_that_is_nowhere_is_left_to_the_compiler(tree):
    write(tree / "src", add_cu='#if 0\n#include "none.cuh"\n#endif\n')
    assert read_sources(tree / "src/add.cu").headers == {}


def test_one_name_for_two_files_is_refused(tree):
    write(tree / "lib", a_cuh="#define A 100\n")  # found beside b.cuh, and another a.cuh beside add.cu
    with pytest.raises(KernelBuildError, match=r'"a.cuh" stands for both .*src/a.cuh and .*lib/a.cuh'):
        read_sources(tree / "src/add.cu", [tree / "lib"])


def test_two_names_for_one_file_are_refused(tree):
    write(tree / "src", add_cu='#include "a.cuh"\n#include "../src/a.cuh"\n')
    with pytest.raises(KernelBuildError, match='included as "a.cuh" and as "../src/a.cuh"'):
        read_sources(tree / "src/add.cu", [tree / "lib", tree / "src"])


def test_a_missing_source_is_named(tmp_path):
    with pytest.raises(KernelBuildError, match=r"none\.cu cannot be read \(No such file"):
        read_sources(tmp_path / "none.cu")


def key_of(tree, defines=None, **more):
    return Build().key(tree / "src/add.cu", [tree / "lib", tree / "src"], defines or {"N": 1}, **more)


@pytest.mark.parametrize("changed", ["src/add.cu", "src/a.cuh", "lib/b.cuh"])
def test_a_key_follows_every_text_that_is_reached(tree, known_version, changed):
    before = key_of(tree)
    path = tree / changed
    path.write_text(path.read_text() + "\n")
    assert key_of(tree) != before


def test_a_key_follows_everything_else_that_is_compiled_in(tree, known_version, monkeypatch):
    keys = [
        key_of(tree),
        key_of(tree, {"N": 2}),
        key_of(tree, {"N": 1, "M": 1}),
        key_of(tree, {"NN": 1}),
        key_of(tree, arch="sm_100a"),
        key_of(tree, options=["--use_fast_math"]),
    ]
    monkeypatch.setattr(build, "_nvrtc_version", lambda: (13, 1))
    keys.append(key_of(tree))
    monkeypatch.setattr(build, "_FORMAT", build._FORMAT + 1)
    keys.append(key_of(tree))
    assert len(set(keys)) == len(keys)


def test_a_key_ignores_what_is_not_compiled_in(tree, known_version, tmp_path_factory):
    before = key_of(tree, {"N": 1, "M": 2})
    write(tree / "lib", stranger_cuh="#define S 2\n")
    assert key_of(tree, {"M": 2, "N": 1}) == before
    moved = tree.rename(tmp_path_factory.mktemp("elsewhere") / "tree")
    assert key_of(moved, {"N": 1, "M": 2}) == before


@pytest.mark.parametrize(
    "more, what",
    [({"arch": "compute_90"}, "not a real one"), ({"defines": {"A-B": 1}}, "not the name of a macro")],
)
def test_requests_that_cannot_be_meant_are_refused(tree, known_version, more, what):
    with pytest.raises(KernelBuildError, match=what):
        key_of(tree, **more)


def test_an_absent_compiler_is_one_sentence(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # importing it raises
    build._nvrtc_version.cache_clear()
    with pytest.raises(KernelBuildError, match=r"cuda-bindings and nvidia-cuda-nvrtc .* pip install 'doorbell\[kernels\]'"):
        Build().cubin(tree / "src/add.cu", [tree / "lib", tree / "src"])


# The cache


def never():
    raise AssertionError("made again")


def cache_in(folder, said=None, deadline_s=30.0):
    return BuildCache(folder, deadline_s, never if said is None else said.append)


def test_an_entry_is_made_once_and_read_back(tmp_path):
    assert cache_in(tmp_path / "new/folder").get("k", lambda: BUILT) == BUILT
    assert cache_in(tmp_path / "new/folder").get("k", never) == BUILT
    assert not list(tmp_path.rglob("*.tmp"))


def test_no_damage_is_overlooked():
    data = BUILT.pack("k")
    assert Built.unpack("k", data) == BUILT
    assert Built.unpack("other", data) is None
    assert Built.unpack("k", data + b"\0") is None
    for idx in range(len(data)):
        assert Built.unpack("k", data[:idx]) is None, f"cut to {idx} bytes"
        flipped = data[:idx] + bytes([data[idx] ^ 1]) + data[idx + 1 :]
        assert Built.unpack("k", flipped) is None, f"byte {idx} flipped"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:60] + b"x" + data[61:]])
def test_a_damaged_entry_is_made_again_and_replaced(tmp_path, damage):
    cache_in(tmp_path).get("k", lambda: BUILT)
    (entry,) = tmp_path.glob("*.kernel")
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache_in(tmp_path).get("k", lambda: BUILT) == BUILT
    assert cache_in(tmp_path).get("k", never) == BUILT


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path):
    (tmp_path / "file").write_text("")  # root may write into any folder, but not into a file
    said = []
    cache = cache_in(tmp_path / "file/cache", said)
    assert cache.get("k", lambda: BUILT) == BUILT and cache.get("l", lambda: BUILT) == BUILT
    assert len(said) == 1 and "XDG_CACHE_HOME" in said[0]


def test_a_full_disk_leaves_nothing_and_is_said_once(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = []
    cache = cache_in(tmp_path, said)
    assert cache.get("k", lambda: BUILT) == BUILT and cache.get("l", lambda: BUILT) == BUILT
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("*.kernel"))
    assert len(said) == 1 and "No space left" in said[0]


def test_a_compilation_that_fails_leaves_the_lock_free(tmp_path):
    def broken():
        raise KernelBuildError("no")

    with pytest.raises(KernelBuildError):
        cache_in(tmp_path).get("k", broken)
    assert cache_in(tmp_path, deadline_s=0.5).get("k", lambda: BUILT) == BUILT


def test_leftovers_of_killed_processes_go_and_work_under_way_stays(tmp_path):
    old, young = tmp_path / "old.tmp", tmp_path / "young.tmp"
    old.write_text("")
    young.write_text("")
    os.utime(old, (time.time() - 7200,) * 2)
    cache_in(tmp_path).get("k", lambda: BUILT)
    assert not old.exists() and young.exists()


WORKER = """
import sys, time
from pathlib import Path
from kernels.build_cache import BuildCache, Built
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
def make():
    with open(folder / "made", "a") as file:
        file.write("x")
    time.sleep(seconds)
    return Built(b"cubin", "log")
assert BuildCache(folder, 30.0, print).get("k", make) == Built(b"cubin", "log")
"""


def start_worker(folder, seconds):
    return subprocess.Popen([sys.executable, "-c", WORKER, str(folder), str(seconds)], cwd=ROOT)


def wait_for(path):
    end = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.01)


def test_processes_that_ask_at_once_make_it_once(tmp_path):
    workers = [start_worker(tmp_path, 0.5) for _ in range(4)]
    assert [worker.wait(60) for worker in workers] == [0] * 4
    assert (tmp_path / "made").read_text() == "x"


def test_a_killed_process_holds_nobody_up(tmp_path):
    worker = start_worker(tmp_path, 600)
    try:
        wait_for(tmp_path / "made")
    finally:
        worker.kill()
        worker.wait(30)
    started = time.monotonic()
    assert cache_in(tmp_path, deadline_s=20.0).get("k", lambda: BUILT) == BUILT
    assert time.monotonic() - started < 10


def test_a_stopped_process_holds_others_up_no_longer_than_the_deadline(tmp_path):
    worker = start_worker(tmp_path, 600)
    try:
        wait_for(tmp_path / "made")
        worker.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert cache_in(tmp_path, deadline_s=0.5).get("k", lambda: BUILT) == BUILT
        assert 0.5 <= time.monotonic() - started < 10
    finally:
        worker.kill()
        worker.wait(30)
    assert cache_in(tmp_path).get("k", never) == BUILT


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({"XDG_CACHE_HOME": "/cache", "HOME": "/home/a"}, Path("/cache/doorbell")),
        ({"XDG_CACHE_HOME": "cache", "HOME": "/home/a"}, Path("/home/a/.cache/doorbell")),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/a"}, Path("/home/a/.cache/doorbell")),
        ({}, None),
    ],
)
def test_where_the_cache_lies(environ, expected):
    assert cache_folder(environ) == expected


# Variants and usage


def test_usage_is_read_from_the_log():
    assert kernel_usages(SAMPLE) == [KernelUsage("adder", 10, 0, 0, 512), KernelUsage("spiller", 24, 216, 524, 0)]
    assert kernel_usages("") == []


@pytest.mark.parametrize("line", ["ptxas         .  ", "ptxas info    : Used"])
def test_a_report_of_another_form_is_not_taken_for_no_spills(line):
    cut = "\n".join(row for row in SAMPLE.splitlines() if not row.startswith(line))
    with pytest.raises(ValueError, match="not understood"):
        kernel_usages(cut)


def test_spills_fail_unless_allowed():
    usages = tuple(kernel_usages(SAMPLE))
    assert "spiller spills" in compile_all.Outcome(Variant(Path("x.cu")), usages).fault
    assert not compile_all.Outcome(Variant(Path("x.cu"), is_spilling_allowed=True), usages).fault
    assert not compile_all.Outcome(Variant(Path("x.cu")), usages[:1]).fault
    assert compile_all.Outcome(Variant(Path("x.cu"), is_spilling_allowed=True), error="no").fault == "no"


def test_a_row_of_variants_stands_for_every_combination(tmp_path):
    write(tmp_path / "cuda", x_cu="", y_cu="")
    table = '{"include_dirs": ["../lib"], "variants": [{"W": [2, 4], "T": ["a", "b"]}, {"W": 1}], "options": ["-O"]}'
    (tmp_path / "cuda/x.variants.json").write_text(table)
    found = find_variants([tmp_path])
    assert [variant.label for variant in found] == ["W=2,T=a", "W=2,T=b", "W=4,T=a", "W=4,T=b", "W=1", ""]
    assert found[0] == Variant(
        tmp_path / "cuda/x.cu", (tmp_path / "cuda/../lib",), ("-O",), (("W", 2), ("T", "a")), False
    )


def test_a_launcher_gets_the_variants_of_the_table_only(tmp_path):
    write(tmp_path, x_cu="", y_cu="")
    (tmp_path / "x.variants.json").write_text('{"variants": [{"W": [2, 4], "T": "a"}]}')
    assert variant_of(tmp_path / "x.cu", {"T": "a", "W": "4"}).label == "W=4,T=a"
    assert variant_of(tmp_path / "y.cu", {}) == Variant(tmp_path / "y.cu")
    for defines in ({"W": 8, "T": "a"}, {"W": 2}, {}, {"W": 2, "T": "a", "X": 1}):
        with pytest.raises(KernelBuildError, match=r"x.variants.json has no variant .*; add it"):
            variant_of(tmp_path / "x.cu", defines)


@pytest.mark.parametrize(
    "table",
    [
        "",
        "[]",
        '{"variant": []}',
        '{"variants": []}',
        '{"variants": [1]}',
        '{"variants": [{"A": 1.5}]}',
        '{"variants": [{"A": [null]}]}',
        '{"include_dirs": "lib"}',
        '{"options": [1]}',
        '{"spills_allowed": "yes"}',
        "\xff",
    ],
)
def test_a_bad_table_is_named(tmp_path, table):
    write(tmp_path, x_cu="")
    (tmp_path / "x.variants.json").write_bytes(table.encode("latin-1"))
    with pytest.raises(KernelBuildError, match="x.variants.json is not a table of variants"):
        variants_of(tmp_path / "x.cu")


def test_a_table_without_its_source_is_named(tmp_path):
    (tmp_path / "gone.variants.json").write_text("{}")
    with pytest.raises(KernelBuildError, match="gone.variants.json has no source"):
        find_variants([tmp_path])


# The compiler


def test_a_cubin_holds_the_kernel_and_is_compiled_once(tree, nvrtc, tmp_path, monkeypatch):
    arguments = (tree / "src/add.cu", [tree / "lib", tree / "src"], {"N": 1})
    (tree / "src/add.variants.json").write_text('{"include_dirs": ["../lib", "."], "variants": [{"N": 1}]}')
    cubin = Build(tmp_path / "cache").cubin(*arguments)
    assert cubin.startswith(b"\x7fELF") and b".text.add\0" in cubin
    assert Build().cubin(*arguments) == cubin
    monkeypatch.setattr(build, "_compile", lambda _: never())
    assert Build(tmp_path / "cache").cubin(*arguments) == cubin
    assert variant_of(tree / "src/add.cu", {"N": 1}).built_by(Build(tmp_path / "cache")).cubin == cubin


def test_what_does_not_compile_is_shown_with_its_line(tree, nvrtc):
    with pytest.raises(KernelBuildError, match=r'(?s)src/add.cu does not compile.*add.cu\(2\): error: identifier "N"'):
        Build().cubin(tree / "src/add.cu", [tree / "lib", tree / "src"])


def test_a_header_that_the_scan_cannot_see_is_not_compiled_in(tree, nvrtc, monkeypatch):
    monkeypatch.chdir(tree / "src")  # where NVRTC would look by itself
    write(tree / "src", add_cu='#define H "hidden.cuh"\n#include H\n', hidden_cuh="")
    with pytest.raises(KernelBuildError, match="hidden.cuh"):
        Build().cubin(tree / "src/add.cu", [tree / "src"])


SPILLER = """
extern "C" __global__ void __maxnreg__(24) spiller(float* p, int n) {
    float a[40];
    for (int i = 0; i < 40; i++) a[i] = p[i * n];
    for (int i = 0; i < 40; i++) p[i] = a[i] * a[(i * 7) % 40];
}
"""


def test_everything_is_compiled_and_spills_fail(tree, nvrtc, tmp_path):
    (tree / "src/add.variants.json").write_text('{"include_dirs": ["../lib", "."], "variants": [{"N": [1, 2]}]}')
    said = []
    arguments = ([tree], "sm_90a", tmp_path / "cache", tmp_path / "out", 2, said.append)
    assert compile_all.run(*arguments) == 0
    assert said[-1] == "1 sources, 2 variants for sm_90a, 0 failed"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"add.N=1.sm_90a.cubin", "add.N=2.sm_90a.cubin"}
    write(tree / "src", spiller_cu=SPILLER, empty_cu="__device__ void f() {}")
    assert compile_all.run(*arguments) == 1
    assert any("spiller spills registers" in line for line in said)
    assert any("empty.cu defines no kernel" in line for line in said)
    (tree / "src/spiller.variants.json").write_text('{"spills_allowed": true}')
    (tree / "src/empty.cu").unlink()
    assert compile_all.run(*arguments) == 0
