"""The cost model: floors by hand, what must grow with what, and what it says of guesses."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from click.testing import CliRunner

from engine.bench.decode import VLLM_TPOT_MS
from engine.bench.load import Case
from engine.bench.prefill import VLLM_TTFT_MS
from engine.cost import prediction
from engine.cost.all_reduce import NORM
from engine.cost.check import load_measured
from engine.cost.constants import Constants
from engine.cost.gpus import GPUS
from engine.cost.shard import Shard
from engine.model_cost import main
from engine.shapes import SHAPES
from launch.errors import ModelError, UsageError
from tests.cpu.cost_case import RESULTS, TABLE, estimate


@pytest.mark.parametrize(
    "model, tp, dtype, tok_s",
    [("7b", 1, "bf16", 325), ("7b", 1, "fp8", 603), ("72b", 2, "bf16", 64.2), ("72b", 2, "fp8", 126)],
)
def test_floors(model, tp, dtype, tok_s):
    """At 4.59 TB/s, the fastest read measured, and not the datasheet's 4.8, which would give 4.6 % more."""
    found = estimate(f"qwen2.5-{model}", tp=tp, dtype=dtype).decode
    assert 1e6 / found.floor_us == pytest.approx(tok_s, rel=0.01)
    assert found.floor_us / found.datasheet_floor_us == pytest.approx(4.8 / 4.59)


def test_the_parts_by_hand():
    """7B on one H200: 28 layers of 4608 x 3584, 3584 x 3584, 37888 x 3584 and 3584 x 18944, biases, norms, and the head."""
    found = estimate().decode
    layer = 4608 * 3584 + 4608 + 3584 * 3584 + 3 * 18944 * 3584 + 2 * 3584
    head = 2 * 152064 * 3584
    assert found.parts["weights"].us == pytest.approx(2 * (28 * layer + 3584) / 4.53e6)
    assert found.parts["kv"].us == pytest.approx((512 + 129 / 2) * 28 * 4 * 2 * 128 * 2 / 3.4e6)
    assert found.parts["collectives"].us == 0
    assert found.parts["borders"].us == pytest.approx(8 + 28 * (4 * 2.0 + 3.4) + 57 * 2.5)
    assert found.parts["head"].us == pytest.approx(head / 4.53e6 + 2.0 + 7.4 + 0.16)
    assert found.us == pytest.approx(sum(part.us for part in found.parts.values()))


def test_prefill_by_hand():
    found = estimate(prompt=4096).prefill
    layer = 4608 * 3584 + 3584 * 3584 + 3 * 18944 * 3584
    assert found.parts["weights"].us == pytest.approx(2 * 4096 * 28 * layer / 697e6)
    assert found.parts["kv"].us == pytest.approx(2 * 28 * 28 * 128 * 4096**2 / 300e6)  # by cuDNN
    assert estimate(prompt=1024).prefill.parts["kv"].us == pytest.approx(2 * 28 * 28 * 128 * 1024**2 / 174e6)
    assert estimate(prompt=4096, batch=2).prefill.parts["kv"].us == pytest.approx(2 * 2 * 28 * 28 * 128 * 4096**2 / 174e6)
    passes = 2 * 4096 * (57 * 4 * 3584 + 28 * 3 * 18944) / 4.3e6
    assert found.parts["borders"].us == pytest.approx(800 + passes + 28 * (4 * 9.5 + 28))
    assert found.parts["head"].us == pytest.approx(9.5 + 2 * 152064 * 3584 / 4.42e6)
    read = 28 * (layer + 4608 + 2 * 3584) + 3584
    assert estimate(prompt=100).prefill.parts["weights"].us == pytest.approx(2 * read / 4.42e6)
    assert estimate(prompt=1).prefill.parts["weights"].us == pytest.approx(2 * read / 4.53e6)  # by the products of few rows
    # 64 k tokens are two steps of 32768; the matrix rate rules both.
    assert estimate(prompt=2048, batch=32).prefill.parts["weights"].us == pytest.approx(2 * 65536 * 28 * layer / 697e6)


def test_fp8_of_many_rows_by_hand():
    """Rows are quantised and multiplied as FP8, in a prefill and in a batch. Where a GPU or a shape cannot, matrices widen."""
    layer = 4608 * 3584 + 3584 * 3584 + 3 * 18944 * 3584
    found = estimate(prompt=4096, dtype="fp8").prefill
    assert found.parts["weights"].us == pytest.approx(2 * 4096 * 28 * layer / 1410e6)
    moved = 2 * (57 * 4 * 3584 + 28 * 3 * 18944) + 3 * 28 * (3 * 3584 + 18944)
    assert found.parts["borders"].us == pytest.approx(800 + 4096 * moved / 4.3e6 + 28 * (4 * 18 + 28))
    assert found.floor_us < found.us < estimate(prompt=4096).prefill.us
    assert found.datasheet_floor_us == pytest.approx(
        2 * 4096 * 28 * layer / 1979e6 + 2 * (28 * 28 * 128 * 4096**2 + 152064 * 3584) / 989e6
    )
    case = Case("qwen2.5-7b", 1, 1, "fp8", 32, 512, 129)
    batch = estimate(dtype="fp8", batch=32).decode
    assert batch.parts["weights"].us == pytest.approx(Shard.of(case, case.model).layer_bytes / 4.42e6)
    assert batch.used["scaled_us"].value == 18 and "library_us" in batch.parts["head"].used
    for other in (estimate(gpu="A100", dtype="fp8", batch=32), estimate("qwen2.5-0.5b", tp=5, dtype="fp8", batch=32)):
        assert "copy_tb_s" in other.decode.parts["weights"].used and "scaled_us" not in other.decode.used


def test_launches_bound_a_step_that_does_less():
    """The longer of the two, not their sum; in a graph there are none, and the engine's rule says which it is."""
    launched, replayed = (estimate(prompt=64, step=step).prefill for step in ("kernels", "graph"))
    other = launched.parts["head"].us + 800
    assert launched.us == pytest.approx(28 * 380 + other) and replayed.us < launched.us
    as_fp8 = estimate(prompt=64, step="kernels", dtype="fp8").prefill
    assert as_fp8.us == pytest.approx(28 * 380 * 17 / 13 + other)
    long = [estimate(prompt=4096, step=step).prefill.us for step in ("kernels", "graph", "")]
    assert long[0] == long[1] == long[2]
    assert [estimate(prompt=prompt).step for prompt in (512, 513)] == ["graph", "kernels"]
    assert [estimate(prompt=prompt, dtype="fp8").step for prompt in (1024, 1025)] == ["graph", "kernels"]


def test_padding_and_replicated_heads_are_read():
    """7B at TP=8: 28 query heads as 8 x 4, 4 KV heads as 8 x 1, 152064 vocabulary rows evenly; 0.5B at TP=5 pads all three."""
    case = Case("qwen2.5-7b", 8, 1, "bf16", 1, 512, 129)
    shard = Shard.of(case, case.model)
    assert shard.layer_elements == 28 * 3584 * ((4 + 2) * 128 + 4 * 128 + 3 * 18944 // 8)
    assert shard.reads.kv_bytes == int((512 + 129 / 2) * 28 * 2 * 128 * 2)
    small = Shard.of(replace(case, model="qwen2.5-0.5b", tp=5), "qwen2.5-0.5b")
    plan = small.blueprint.plan
    assert 5 * plan.local_vocab > 151936 and 5 * plan.local_mlp > 4864 and 5 * plan.local_q_heads > 14
    assert small.head_bytes == 2 * 896 * -(-151936 // 5)
    assert small.layer_bytes > 2 * small.layer_elements  # biases and norms as well


def rising(values):
    return all(low < high for low, high in zip(values, values[1:]))


@pytest.mark.parametrize("gpu", GPUS)
def test_more_work_takes_longer(gpu):
    sizes = [size for size in SHAPES if size != "qwen2.5-3b"]  # deeper than 7B, and where little is read, layers take long
    for time in ("tpot_ms", "ttft_ms"):
        assert rising([getattr(estimate(size, gpu), time) for size in sizes])
        assert rising([getattr(estimate(gpu=gpu, prompt=prompt), time) for prompt in (1024, 4096, 16384, 32000)])
        assert rising([getattr(estimate(gpu=gpu, batch=batch), time) for batch in (17, 32, 64, 128)])
        for tp in (2, 8):
            assert rising([getattr(estimate(size, gpu, tp=tp), time) for size in sizes])
    assert rising([estimate(gpu=gpu, tp=2, batch=batch).tpot_ms for batch in range(1, 17)])
    assert estimate(gpu=gpu, dtype="fp8").tpot_ms < estimate(gpu=gpu).tpot_ms


def test_ranks():
    weights = [estimate("qwen2.5-72b", tp=tp).decode.parts["weights"].us for tp in (8, 4, 2, 1)]
    sums = [estimate("qwen2.5-72b", tp=tp).decode.parts["collectives"].us for tp in (1, 2, 3, 4, 5, 6, 7, 8)]
    assert rising(weights) and rising(sums)
    assert sums[1] == pytest.approx(161 * TABLE.curves[NORM][2, 1][0][1])
    alone = estimate("qwen2.5-72b", tp=8, has_peers=False).decode
    assert alone.parts["collectives"].us == 0 and alone.parts["weights"].us == weights[0]
    assert estimate("qwen2.5-72b", "A100", tp=2).tpot_ms > estimate("qwen2.5-72b", "H100", tp=2).tpot_ms > estimate(
        "qwen2.5-72b", tp=2
    ).tpot_ms > estimate("qwen2.5-72b", "B200", tp=2).tpot_ms  # fmt: skip
    slow, fast = (estimate(gpu=gpu, tp=2, prompt=4096).prefill.parts["collectives"].us for gpu in ("L40S", "H200"))
    assert slow > 5 * fast


def test_what_rests_on_guesses_says_so():
    one, two, eight = (estimate("qwen2.5-72b", tp=tp).decode for tp in (1, 2, 8))
    assert {name: part.is_measured for name, part in two.parts.items()} == {
        "weights": True, "kv": True, "collectives": True, "borders": False, "head": True,
    }  # fmt: skip
    assert not eight.parts["collectives"].is_measured and "MPS" in str(eight.parts["collectives"].used)
    assert "norm_us" in one.parts["borders"].used and "norm_us" not in two.parts["borders"].used
    assert not any(part.is_measured for part in estimate(gpu="H100").decode.parts.values() if part.us)
    for constant in (getattr(Constants(), field.name) for field in fields(Constants)):
        assert constant.unit and constant.source
        assert constant.is_measured or "guess" in constant.source


def test_every_constant_counts():
    """A larger rate is faster and a longer time is slower, for each constant in some case; none is idle."""
    cases = [
        {"tp": 1}, {"tp": 1, "dtype": "fp8"}, {"batch": 32, "dtype": "fp8"}, {"prompt": 8, "step": "kernels"},
        {"prompt": 4096}, {"tp": 2},
    ]  # fmt: skip
    before = [estimate(**case) for case in cases]
    for field in fields(Constants):
        if field.name == "read_tb_s":  # the floors'
            continue
        constant = getattr(Constants(), field.name)
        moved = replace(Constants(), **{field.name: replace(constant, value=2 * constant.value)})
        patched = pytest.MonkeyPatch()
        patched.setattr(type(GPUS["H200"]), "constants", lambda gpu, moved=moved: moved)
        try:
            after = [estimate(**case) for case in cases]
        finally:
            patched.undo()
        changes = [new.tpot_ms + new.ttft_ms - old.tpot_ms - old.ttft_ms for new, old in zip(after, before)]
        is_rate = field.name.endswith(("tb_s", "tflops"))
        assert all(change <= 1e-9 if is_rate else change >= -1e-9 for change in changes), field.name
        assert any(abs(change) > 1e-6 for change in changes), field.name


def test_memory_and_refusals():
    assert not estimate("qwen2.5-72b").is_fitting and estimate("qwen2.5-72b", tp=2).is_fitting
    assert "*TPOT" in estimate("qwen2.5-72b").lines()[0]
    with pytest.raises(UsageError, match="past qwen2.5-7b's limit of 32768"):
        estimate(prompt=32768)
    with pytest.raises(ModelError, match="29 ranks are too many"):
        estimate(tp=29)
    with pytest.raises(UsageError, match="knows bf16 and fp8, not 'fp32'"):
        estimate(dtype="fp32")


def test_peers():
    assert set(VLLM_TTFT_MS) == set(VLLM_TPOT_MS)
    tpot, ttft = estimate("qwen2.5-72b", tp=2).lines()
    assert "20.01 ms, 78 % of the roof: vLLM" in tpot and "94.30 ms" in ttft
    assert estimate("qwen2.5-72b", tp=8).peer.tpot_ms == pytest.approx(10.87, rel=1e-3)
    assert estimate(prompt=100).peer is None and estimate(gpu="B200").peer is None


def run(*arguments: str):
    return CliRunner().invoke(main, [*arguments])


def test_table_json_and_records(tmp_path):
    done = run("--model", "qwen2.5-7b,qwen2.5-72b", "--tp", "1,2", "--dtype", "bf16,fp8", "--results", str(RESULTS))
    assert done.exit_code == 0, done.output
    assert sum("TPOT  " in line for line in done.output.splitlines()) == 8
    assert "step_us = 8 us a step" in done.output and "product_bf16_tb_s" not in done.output
    path = tmp_path / "out" / "p.jsonl"
    done = run("--gpu", "h200,b200", "--json", "--record", str(path), "--results", str(RESULTS))
    first, second = json.loads(done.output)
    assert first["tpot_ms"] == pytest.approx(sum(first["decode"]["parts_us"].values()) / 1e3)
    assert second["gpu"] == "B200" and not second["decode"]["constants"]["product_bf16_tb_s"]["is_measured"]
    decode, prefill, *others = map(json.loads, path.read_text().splitlines())
    assert (decode["bench"], prefill["bench"], len(others)) == ("decode", "prefill", 2)
    for record, time in ((decode, "tpot_ms"), (prefill, "ttft_ms")):
        assert record["kind"] == "projected" and record["checked"] is False and "projected" in record["device"]
        assert record["case"]["backend"] == "graph" and record["metrics"][time] > record["ceiling"][time]
        assert record["peer"][time] == first["peer"][time]
    assert decode["ceiling"]["product_bf16_tb_s"] == 4.53 and decode["metrics"]["weights_us"] > 2800
    assert decode["ceiling"]["tpot_ms"] == pytest.approx(first["decode"]["datasheet_floor_ms"], abs=1e-4)
    assert not others[0]["peer"] and others[0]["ceiling"]["hbm_tb_s"] == 8.0
    assert not load_measured(path.parent)


def test_refused_options(tmp_path):
    for option, value, words in (
        ("--tp", "0", "a number of ranks"), ("--tp", "two", "a number of ranks"),
        ("--gpu", "V100", "H200, H100, A100, B200, L40S"),
        ("--dtype", "int4", "bf16 or fp8"), ("--batch", "1,,2", "a number of rows"),
    ):  # fmt: skip
        done = run(option, value)
        assert done.exit_code == 2 and words in done.output
    done = run("--model", "qwen2.5-8b")
    assert done.exit_code == 3 and "qwen2.5-72b" in done.output
    done = run("--tp", "2", "--results", str(tmp_path))
    assert done.exit_code == 2 and "all_reduce.jsonl" in done.output
    assert run("--check", "--json").exit_code == 2


def test_every_part_has_a_rule():
    assert list(prediction.DECODE) == list(prediction.PREFILL) == ["weights", "kv", "collectives", "borders", "head"]
