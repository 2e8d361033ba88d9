"""The kernel before an attention that only attends: its twin against that of our attention, its source on the host, refusals."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.decode_attention import HeadNorms, decode_attention
from kernels.decode_write import DecodeWriteParams, decode_write, launch_decode_write
from tests.cpu.test_prefill_kernels import on_gpu
from tests.gpu.attention_case import AttentionCase, Step

ROOT = Path(__file__).resolve().parents[2]
POSITIONS = (0, 15, -1, 16, 17, 100, -1, 255)
FP32, BF16 = torch.float32, torch.bfloat16
CHANGES = [
    {}, {"parts": 0}, {"parts": 3, "is_wide": True}, {"num_q": 7, "num_kv": 1, "head_dim": 64}, {"parts": 8, "has_norms": True},
    {"is_whole": True, "parts": 5}, {"is_whole": True, "parts": 4, "has_norms": True, "num_q": 5, "num_kv": 1, "head_dim": 64},
]  # fmt: skip


class Write:
    """Operands of a step. Outputs are poisoned. `is_whole`: keys and values are wanted beside the queries, and no lengths."""

    def __init__(self, is_whole: bool = False, **changes):
        self.step = Step(AttentionCase(POSITIONS, has_bias=False, **changes), "cpu")
        case = self.step.case
        num_heads = case.num_q + 2 * case.num_kv * is_whole
        self.heads = torch.full((len(POSITIONS), num_heads, case.head_dim), float("nan"), dtype=case.dtype)
        self.lengths = None if is_whole else torch.full((len(POSITIONS),), -7, dtype=torch.int32)

    def operands(self) -> tuple:
        x = self.step
        operands = x.qkv, x.turns, x.positions, x.page_table, self.heads, x.keys, x.values, self.lengths
        return *operands, x.case.page_size, x.norms

    def outputs(self) -> list[torch.Tensor]:
        return [self.heads, self.step.keys, self.step.values] + [self.lengths] * (self.lengths is not None)


def attend(write: Write) -> torch.Tensor:
    """What is left to do behind it, slowly."""
    step, case = write.step, write.step.case
    out = torch.zeros_like(step.out)
    for row, length in enumerate((step.positions + 1).tolist()):
        if length:
            seen = torch.arange(length)
            slots = step.page_table[row, seen // case.page_size].long() * case.page_size + seen % case.page_size
            query = write.heads[row, : case.num_q].view(case.num_kv, -1, case.head_dim).float() * case.head_dim**-0.5
            weights = (query @ step.keys[slots].float().permute(1, 2, 0)).softmax(-1)
            out[row] = (weights @ step.values[slots].float().transpose(0, 1)).view(case.num_q, case.head_dim).to(case.dtype)
    return out


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_it_leaves_all_that_attention_needs(changes, dtype):
    write, whole = (Write(dtype=dtype, **changes) for _ in range(2))
    step = whole.step
    decode_write(*write.operands())
    wanted = decode_attention(*step.arguments(), turns=step.turns, page_size=16, norms=step.norms)
    for found, right in ((write.step.keys, step.keys), (write.step.values, step.values), (attend(write), wanted)):
        torch.testing.assert_close(found, right, atol=0, rtol=0, equal_nan=True)
    if write.lengths is not None:
        assert write.lengths.tolist() == [position + 1 for position in POSITIONS]
    assert write.heads[step.positions < 0].isnan().all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("parts, window", [(0, None), (3, None), (1, 3)])
def test_tokens_of_one_row_attend_as_one_after_the_other(parts, window, has_norms, dtype):
    positions = torch.tensor([30, 31, 32, 33, -1])
    case = AttentionCase((33,), has_bias=False, parts=parts, has_norms=has_norms, dtype=dtype, window=window)
    one, chain = (Step(case, "cpu") for _ in range(2))
    qkv = torch.randn(*one.qkv.shape[:-3], 5, *one.qkv.shape[-2:]).to(one.qkv.dtype) * 2
    wanted, found, heads = (torch.full((5, num, 128), float("nan"), dtype=dtype) for num in (8, 8, 12))
    for idx in range(5):
        row = slice(idx, idx + 1)
        operands = (qkv[..., row, :, :], positions[row], one.page_table, one.keys, one.values, wanted[row])
        decode_attention(*operands, one.turns, 16, norms=one.norms, window=window)
    table = chain.page_table.repeat(5, 1)
    decode_write(qkv, chain.turns, positions, table, heads, chain.keys, chain.values, None, 16, chain.norms)
    operands = (heads, positions, table, chain.keys, chain.values, found, chain.turns, 16)
    decode_attention(*operands, window=window, is_rotated=True)
    for own, right in ((found, wanted), (chain.keys, one.keys), (chain.values, one.values)):
        torch.testing.assert_close(own, right, atol=0, rtol=0, equal_nan=True)


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
    found, wanted, launches = Write(dtype=FP32, **changes), Write(dtype=FP32, **changes), []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    kernel = SimpleNamespace(launch=lambda *launch, is_pdl: launches.append(launch))
    launch_decode_write(kernel, *found.operands(), is_early=True)
    ((ctas, threads, (params,), _),) = launches
    assert kernel_on_host.params_bytes() == ctypes.sizeof(DecodeWriteParams) and params.is_early == 1
    kernel_on_host.run_decode_write(ctypes.byref(params), ctas, threads)
    decode_write(*wanted.operands())
    for own, right in zip(found.outputs(), wanted.outputs()):
        torch.testing.assert_close(own, right, atol=2e-6, rtol=2e-6, equal_nan=True)
    assert torch.equal(found.step.qkv, wanted.step.qkv)
    is_row = found.step.positions >= 0
    assert found.heads[~is_row].isnan().all() and not found.heads[is_row].isnan().any()


@pytest.mark.parametrize(
    "changes, error, sentence",
    [
        ({"heads": on_gpu(3, 4, 24)}, ValueError, "heads of whole vectors"),
        ({"heads": on_gpu(3, 6, 32)}, ValueError, "queries or all of the 8 heads, not 6"),
        ({"keys": on_gpu(32, 4, 32)}, ValueError, "queries or all of the 8 heads"),
        ({"norms": HeadNorms(on_gpu(32), on_gpu(31), 1e-6)}, ValueError, r"k_weight must be contiguous \[32\]"),
        ({"norms": HeadNorms(on_gpu(32, dtype=FP32), on_gpu(32), 1e-6)}, TypeError, "q_weight must be torch.bfloat16"),
        ({"heads": on_gpu(3, 4, 48), "norms": HeadNorms(on_gpu(48), on_gpu(48), 1e-6)}, ValueError, "not of 3: 48 of"),
        ({"page_size": 12}, ValueError, "a power of two of tokens, not .* and 12"),
        ({"qkv": on_gpu(2, 3, 8, 32)}, TypeError, "qkv must be torch.float32"),
        ({"qkv": on_gpu(3, 7, 32)}, ValueError, "queries or all of the 7 heads, not 4"),
        ({"qkv": on_gpu(2, 8, 32)}, ValueError, r"qkv must be contiguous \[3, 8, 32\]"),
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
               "page_table": on_gpu(3, 2, dtype=torch.int32), "heads": on_gpu(3, 4, 32), "keys": on_gpu(32, 2, 32),
               "values": on_gpu(32, 2, 32), "lengths": on_gpu(3, dtype=torch.int32), "page_size": 16}  # fmt: skip
    kernel = SimpleNamespace(launch=lambda *_, **__: pytest.fail("it was launched"))
    with pytest.raises(error, match=sentence):
        launch_decode_write(kernel, **{**fitting, **changes})
