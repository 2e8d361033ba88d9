"""What holds the house together: imports run one way, and each hazard has one door. Read from the source, not run."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ORDER = ("launch", "kernels", "comm", "engine")  # each may import itself and what stands before it
FILES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))


def parsed(path):
    return ast.parse(path.read_text(), str(path))


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import, line {node.lineno}"
            yield node.module


def names_used(tree):
    """Every attribute and imported name, whatever it hangs on: `os.environ`, `from os import environ`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.id


def users_of(*names):
    return {str(path.relative_to(ROOT)) for path in FILES if set(names) & set(names_used(parsed(path)))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    place = ORDER.index(path.relative_to(ROOT).parts[0])
    for module in imported_modules(parsed(path)):
        package = module.split(".")[0]
        assert package not in ORDER[place + 1 :], f"{path.name} imports {module}"
        assert package != "tests", f"{path.name} imports {module}"


def test_environment_variables_have_one_door():
    assert users_of("environ", "getenv", "putenv", "environb") == {"launch/environment.py"}


def test_nvrtc_has_one_door():
    callers = {str(path.relative_to(ROOT)) for path in FILES if any("nvrtc" in m for m in imported_modules(parsed(path)))}
    assert callers | users_of("nvrtc", "RawKernel", "RawModule", "ElementwiseKernel") == {"kernels/build.py"}


def test_kernel_launches_have_one_door():
    assert users_of("cuLaunchKernel", "cuLaunchKernelEx", "cuLaunchCooperativeKernel") == {"kernels/launch_kernel.py"}


def test_stream_memory_operations_have_one_door():
    singles = [f"cuStream{verb}Value{bits}" for verb in ("Wait", "Write") for bits in (32, 64)]
    assert users_of(*singles, "cuStreamBatchMemOp", "cuGraphAddBatchMemOpNode") == {"comm/stream_ops.py"}


def test_process_groups_have_one_door():
    assert users_of("init_process_group", "new_group") == {"comm/process_group.py"}


def test_nvshmem_has_one_door():
    callers = {path for path in FILES if any(m.split(".")[0] == "nvshmem" for m in imported_modules(parsed(path)))}
    assert {str(path.relative_to(ROOT)) for path in callers} == {"comm/heap_nvshmem.py"}


def test_results_hold_no_code_but_the_renderer_which_stands_alone():
    code = {path for path in (ROOT / "results").rglob("*.py")}
    assert code and all(path.parent == ROOT / "results" / "render" for path in code)
    for path in code:
        packages = {module.split(".")[0] for module in imported_modules(parsed(path))}
        assert not packages & {*ORDER, "tests"}, path.name
    assert not [path for path in FILES if any(m.split(".")[0] == "results" for m in imported_modules(parsed(path)))]


@pytest.mark.parametrize("package", ORDER)
def test_package_files_hold_a_docstring_only(package):
    (only,) = parsed(ROOT / package / "__init__.py").body
    assert isinstance(only, ast.Expr) and isinstance(only.value.value, str)


def test_every_module_imports_without_a_gpu_cupy_or_triton():
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES if path.name != "__main__.py"]
    code = f"""
import importlib, sys
import torch, transformers  # a CUDA build of torch looks for triton itself
for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "triton", "cuda", "nvshmem", "flashinfer")]:
    sys.modules[name] = None  # importing it again raises
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cupy", "triton", "cuda", "nvshmem", "flashinfer"):
            raise ImportError(name + " is absent in this test")
sys.meta_path.insert(0, Absent())
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    environ = {"CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
