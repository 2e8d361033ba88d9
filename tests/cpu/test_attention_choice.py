"""Which attention a decode step takes: the table, what rules FlashInfer out, how it is called. FlashInfer itself is made up."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from engine.bench import attention as bench
from engine.graph.chosen_attention import ChosenAttention, _can_use_library, _ranges, library_rows, with_library
from kernels import attention_choice, flashinfer_attention
from kernels.attention_choice import CONTEXT_BUCKETS, FLASHINFER, OWN, ROW_BUCKETS, Heads, bucket_of, is_flashinfer_faster
from kernels.decode_attention import decode_attention
from kernels.decode_write import decode_write
from kernels.flashinfer_attention import NO_SCORE, FlashInferAttention, why_not
from tests.gpu.attention_case import AttentionCase, Step

BF16 = torch.bfloat16
HEADS = Heads(128, 28, 4, 16)


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes a table in the place of ours: FlashInfer is faster where `is_faster(rows, context)`, for `HEADS`."""

    def write(is_faster, without=()):
        us = {HEADS.key(rows, context): {OWN: 5.0, FLASHINFER: 4.9 if is_faster(rows, context) else 5.0}
              for rows in ROW_BUCKETS for context in CONTEXT_BUCKETS if (rows, context) not in without}  # fmt: skip
        path = tmp_path / "choices.json"
        path.write_text(json.dumps({"us": us}))
        monkeypatch.setattr(attention_choice, "TABLE", path)
        attention_choice._table.cache_clear()

    yield write
    attention_choice._table.cache_clear()


def test_flashinfer_must_win_at_every_length_that_a_step_may_meet(table):
    table(lambda rows, context: rows >= 16 and context <= 8192)
    assert is_flashinfer_faster(HEADS, 16, 8192) and is_flashinfer_faster(HEADS, 64, 100)
    assert not is_flashinfer_faster(HEADS, 16, 8193), "at 32768 it loses"
    assert not is_flashinfer_faster(HEADS, 8, 8192)
    assert is_flashinfer_faster(HEADS, 9, 8192), "9 rows count as 16"
    table(lambda rows, context: context >= 512)
    assert not any(is_flashinfer_faster(HEADS, rows, 32768) for rows in ROW_BUCKETS), "short rows would lose"


def test_a_tie_and_what_was_not_measured_are_ours(table):
    table(lambda rows, context: True, without={(4, 512)})
    assert is_flashinfer_faster(HEADS, 4, 128) and not is_flashinfer_faster(HEADS, 4, 512)
    assert not is_flashinfer_faster(HEADS, 65, 128) and not is_flashinfer_faster(HEADS, 1, 32769), "beyond the buckets"
    for other in (Heads(128, 28, 4, 32), Heads(64, 28, 4, 16), Heads(128, 14, 2, 16)):
        assert not is_flashinfer_faster(other, 1, 128)
    table(lambda rows, context: False)
    assert not is_flashinfer_faster(HEADS, 1, 128)


def test_without_a_table_all_is_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(attention_choice, "TABLE", tmp_path / "absent.json")
    attention_choice._table.cache_clear()
    assert not is_flashinfer_faster(HEADS, 1, 128)
    attention_choice._table.cache_clear()


def test_the_table_that_is_here_can_be_read():
    for key, us in attention_choice._table().items():
        assert set(us) == {OWN, FLASHINFER} and min(us.values()) > 0, key


def test_buckets_round_up():
    assert [bucket_of(number, ROW_BUCKETS) for number in (1, 3, 33, 64, 65)] == [1, 4, 64, 64, None]


def test_rows_that_flashinfer_takes(table):
    table(lambda rows, context: rows in (4, 32))
    assert library_rows(HEADS, 20, 4096) == {3, 4, 17, 18, 19, 20}
    assert _ranges([3, 4, 17, 18, 19, 20, 40]) == "3-4, 17-20, 40"


FITTING = {"dtype": BF16, "head_dim": 128, "num_q": 28, "num_kv": 4, "page_size": 16, "capability": (9, 0)}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"capability": (10, 0)}, "FlashInfer's XQA is used on GPUs of compute capability 9.0 only, not 10.0"),
        ({"dtype": torch.float16}, "FlashInfer's XQA is used for bf16 only, not torch.float16"),
        ({"head_dim": 96}, "FlashInfer's XQA is used for heads of (64, 128) elements, not 96"),
        ({"num_q": 34, "num_kv": 2}, "FlashInfer's XQA is used for 1 to 16 query heads a KV head, not 34 for 2"),
        ({"num_q": 3, "num_kv": 2}, "FlashInfer's XQA is used for 1 to 16 query heads a KV head, not 3 for 2"),
        ({"page_size": 8}, "FlashInfer's XQA takes pages of (16, 32, 64, 128) tokens, not 8"),
    ],
    ids=str,
)
def test_what_rules_it_out(changes, sentence, monkeypatch):
    assert why_not(**FITTING) is None and why_not(**{**FITTING, **changes}) == sentence
    case = {**FITTING, **changes}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: case["capability"])
    turns = torch.zeros(9, case["head_dim"], dtype=case["dtype"])
    with pytest.raises(ValueError) as raised:
        FlashInferAttention(None, case["num_q"], case["num_kv"], case["page_size"], turns, 1, 132)
    assert str(raised.value) == sentence


class Xqa:
    """`flashinfer.xqa.xqa` as its documentation has it, on a CPU; keeps its calls."""

    def __init__(self):
        self.calls = []

    def __call__(
        self, q, k_cache, v_cache, page_table, seq_lens, output, workspace_buffer, semaphores, num_kv_heads, page_size,
        sinks, kv_layout, sm_count, enable_pdl,
    ):  # fmt: skip
        rows, beams, num_q, dim = q.shape
        pages = (k_cache.shape[0], page_size, num_kv_heads, dim)
        assert beams == 1 and k_cache.shape == v_cache.shape == pages and output.shape == q.shape
        assert q.is_contiguous() and output.is_contiguous() and kv_layout == "NHD"
        assert seq_lens.dtype == semaphores.dtype == torch.uint32 and workspace_buffer.dtype == torch.uint8
        assert seq_lens.shape == (rows, 1) and semaphores.numel() >= rows * num_kv_heads
        assert not semaphores.int().any() and sinks.shape == (num_kv_heads, num_q // num_kv_heads)
        self.calls.append((rows, sm_count, enable_pdl))
        for row, length in enumerate(seq_lens[:, 0].tolist()):
            seen = torch.arange(length)
            at = page_table[row, seen // page_size].long(), seen % page_size
            keys, values = (cache[at].float().transpose(0, 1) for cache in (k_cache, v_cache))
            scores = q[row, 0].float().view(num_kv_heads, -1, dim) @ keys.transpose(1, 2) * dim**-0.5
            most = scores.amax(-1, keepdim=True).clamp(min=NO_SCORE) if length else torch.full((*scores.shape[:2], 1), NO_SCORE)
            weights = (scores - most).exp()
            weights = weights / (weights.sum(-1, keepdim=True) + (sinks[..., None] - most).exp())
            output[row, 0] = (weights @ values).view(num_q, dim).to(output.dtype)


@pytest.fixture
def xqa(monkeypatch):
    """FlashInfer on a CPU, with the twin of the kernel that runs before it."""
    module, xqa = ModuleType("flashinfer.xqa"), Xqa()
    module.xqa = xqa
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.xqa", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_attention, "launch_decode_write", lambda kernel, *operands: decode_write(*operands[:-1]))
    return xqa


def opened(step: Step, max_rows: int = 8) -> FlashInferAttention:
    case = step.case
    return FlashInferAttention(None, case.num_q, case.num_kv, case.page_size, step.turns, max_rows, 132, is_pdl=False)


@pytest.mark.parametrize("changes", [{}, {"parts": 0, "is_wide": True}, {"num_q": 7, "num_kv": 1, "head_dim": 64}], ids=str)
def test_it_attends_as_our_twin(xqa, changes):
    case = AttentionCase((0, 31, -1, 32, 200), has_bias=False, **changes)
    step, wanted = Step(case, "cpu"), Step(case, "cpu")
    attention = opened(step)
    assert xqa.calls == [(1, 132, False)], "compiled before any step"
    assert attention.launch(*step.arguments()) is step.out
    decode_attention(*wanted.arguments(), turns=wanted.turns, page_size=16)
    torch.testing.assert_close(step.out, wanted.out, atol=2e-2, rtol=2e-2)
    assert not step.out[2].any() and xqa.calls[1:] == [(5, 132, False)]
    assert attention.workspace_bytes >= 132 * case.num_q // case.num_kv * case.head_dim * 2


def test_more_rows_than_it_was_made_for_are_refused(xqa):
    step = Step(AttentionCase((5, 6, 7), has_bias=False), "cpu")
    with pytest.raises(ValueError, match="takes 1 to 2 contiguous rows"):
        opened(step, 2).attend(step.page_table, step.keys, step.values, step.out)


class Launches:
    """An attention that keeps what it is asked."""

    max_rows, turns = 8, None

    def __init__(self):
        self.calls = []

    def launch(self, *arguments):
        self.calls.append(arguments)
        return arguments[5]


@pytest.mark.parametrize("rows, norms, window, is_library", [(2, None, None, True), (3, None, None, False),
                                                             (2, "norms", None, False), (2, None, 9, False)])  # fmt: skip
def test_each_step_goes_to_its_attention(rows, norms, window, is_library):
    own, library = Launches(), Launches()
    chosen = ChosenAttention(own, library, frozenset((2,)))
    operands = (*"abcde", torch.zeros(rows, 1))
    assert chosen.launch(*operands, norms=norms, window=window, is_early=False) is operands[5]
    plain = (*operands, None, norms, window, False, False)
    assert (own.calls, library.calls) == (([], [operands]) if is_library else ([plain], []))
    assert chosen.max_rows == 8 and chosen.description == "attention of 2 rows by FlashInfer"


def test_ours_takes_all_where_flashinfer_cannot_be_opened(capsys):
    def fail():
        raise RuntimeError("no nvcc here")

    own = Launches()
    assert with_library(own, fail, frozenset((1,))) is own
    assert capsys.readouterr().err == "doorbell: FlashInfer's attention is not used: no nvcc here\n"


def test_flashinfer_that_is_not_installed_is_not_asked(monkeypatch):
    step = SimpleNamespace(
        plan=SimpleNamespace(local_q_heads=28, local_kv_heads=4), config=SimpleNamespace(head_dim=128),
        kv=SimpleNamespace(page_size=16), dtype=BF16, device="cuda",
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for is_there in (False, True):
        monkeypatch.setattr("engine.graph.chosen_attention.is_installed", lambda is_there=is_there: is_there)
        assert _can_use_library(step) == is_there


def test_a_table_cannot_be_made_without_flashinfer(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "is_installed", lambda: False)
    result = CliRunner().invoke(bench.main, ["--no-flashinfer", "--choices", str(tmp_path / "choices.json")])
    assert result.exit_code == 2 and "compares with FlashInfer, which is not installed" in result.output
