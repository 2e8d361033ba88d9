"""The kernel before a library's attention: its twin against that of our attention, the kernel's source on the host, refusals."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.decode_attention import decode_attention
from kernels.decode_write import DecodeWriteParams, decode_write, launch_decode_write
from tests.cpu.test_prefill_kernels import on_gpu
from tests.gpu.attention_case import AttentionCase, Step

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = (0, 15, -1, 16, 17, 100, -1, 255)
FP32, BF16 = torch.float32, torch.bfloat16
CHANGES = [{}, {"parts": 0}, {"parts": 3, "is_wide": True}, {"num_q": 7, "num_kv": 1, "head_dim": 64}]


class Write:
    """Operands of a step. Outputs are poisoned."""

    def __init__(self, **changes):
        self.step = Step(AttentionCase(POSITIONS, has_bias=False, **changes), "cpu")
        case = self.step.case
        self.queries = torch.full((len(POSITIONS), case.num_q, case.head_dim), float("nan"), dtype=case.dtype)
        self.lengths = torch.full((len(POSITIONS),), -7, dtype=torch.int32)

    def operands(self) -> tuple[torch.Tensor, ...]:
        x = self.step
        return x.qkv, x.turns, x.positions, x.page_table, self.queries, x.keys, x.values, self.lengths


def attend(write: Write) -> torch.Tensor:
    """What is left to do behind it, slowly."""
    step, case = write.step, write.step.case
    out = torch.zeros_like(step.out)
    for row, length in enumerate(write.lengths.tolist()):
        if length:
            seen = torch.arange(length)
            slots = step.page_table[row, seen // case.page_size].long() * case.page_size + seen % case.page_size
            query = write.queries[row].view(case.num_kv, -1, case.head_dim).float() * case.head_dim**-0.5
            weights = (query @ step.keys[slots].float().permute(1, 2, 0)).softmax(-1)
            out[row] = (weights @ step.values[slots].float().transpose(0, 1)).view(case.num_q, case.head_dim).to(case.dtype)
    return out


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_it_leaves_all_that_attention_needs(changes, dtype):
    write, whole = Write(dtype=dtype, **changes), Step(AttentionCase(POSITIONS, has_bias=False, dtype=dtype, **changes), "cpu")
    decode_write(*write.operands(), page_size=16)
    wanted = decode_attention(*whole.arguments(), turns=whole.turns, page_size=16)
    for found, right in ((write.step.keys, whole.keys), (write.step.values, whole.values), (attend(write), wanted)):
        torch.testing.assert_close(found, right, atol=0, rtol=0, equal_nan=True)
    assert write.lengths.tolist() == [position + 1 for position in POSITIONS]


@pytest.fixture(scope="module")
def kernel_on_host(tmp_path_factory):
    """The kernel's source, compiled for the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    folder = tmp_path_factory.mktemp("on_host")
    host = ROOT / "tests/cpu/cuda_on_host"
    for source in (*(ROOT / "kernels/cuda").glob("*.cuh"), ROOT / "kernels/decode_write.cu", *host.iterdir()):
        shutil.copy(source, folder)
    library = folder / "decode_write.so"
    options = ["-std=c++20", "-O2", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", "-DELEM=2"]
    done = subprocess.run([compiler, *options, "-o", library, folder / "decode_write.cpp"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("changes", CHANGES + [{"page_size": 64, "num_kv": 4}], ids=str)
def test_the_kernel_equals_its_twin(kernel_on_host, changes, monkeypatch):
    found, wanted = Write(dtype=FP32, **changes), Write(dtype=FP32, **changes)
    case, launches = found.step.case, []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    kernel = SimpleNamespace(launch=lambda *launch, is_pdl: launches.append(launch))
    launch_decode_write(kernel, *found.operands(), page_size=case.page_size)
    ((ctas, threads, (params,), _),) = launches
    assert kernel_on_host.params_bytes() == ctypes.sizeof(DecodeWriteParams)
    kernel_on_host.run_decode_write(ctypes.byref(params), ctas, threads)
    decode_write(*wanted.operands(), page_size=case.page_size)
    for own, right in zip(found.operands(), wanted.operands()):
        torch.testing.assert_close(own, right, atol=2e-6, rtol=2e-6, equal_nan=True)
    is_row = found.step.positions >= 0
    assert found.queries[~is_row].isnan().all() and not found.queries[is_row].isnan().any()


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"queries": on_gpu(3, 4, 24)}, ValueError, "heads of whole vectors"),
        ({"page_size": 12}, ValueError, "a power of two of tokens, not .* and 12"),
        ({"qkv": on_gpu(2, 3, 8, 32)}, TypeError, "qkv must be torch.float32"),
        ({"qkv": on_gpu(3, 7, 32)}, ValueError, r"qkv must be contiguous \[3, 8, 32\]"),
        ({"positions": on_gpu(3, dtype=FP32)}, TypeError, "positions must be torch.int32"),
        ({"page_table": on_gpu(3, 2, dtype=torch.int64)}, TypeError, "page_table must be torch.int32"),
        ({"values": on_gpu(16, 2, 32)}, ValueError, "values must be contiguous"),
        ({"turns": on_gpu(9, 32, offset=1)}, ValueError, "turns must be aligned to 16 bytes"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, TypeError, "lengths must be .* on a GPU, not torch.int32 on cpu"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes, error, sentence):
    fitting = {"qkv": on_gpu(3, 8, 32), "turns": on_gpu(9, 32), "positions": on_gpu(3, dtype=torch.int32),
               "page_table": on_gpu(3, 2, dtype=torch.int32), "queries": on_gpu(3, 4, 32), "keys": on_gpu(32, 2, 32),
               "values": on_gpu(32, 2, 32), "lengths": on_gpu(3, dtype=torch.int32), "page_size": 16}  # fmt: skip
    kernel = SimpleNamespace(launch=lambda *_, **__: pytest.fail("it was launched"))
    with pytest.raises(error, match=sentence):
        launch_decode_write(kernel, **{**fitting, **changes})
