"""The bench of stages without its GPU: its two phases, what it writes, what it refuses."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from engine.bench.load import Case, open_engine
from engine.bench.roof import DATASHEET_TB_S, Reads
from engine.bench.stages import Phase, describe, floor_us, main, make_record, profile_phase
from engine.loading import draw_blueprint
from engine.profile.marks import STAGES, Launches
from engine.profile.profile import KindProfile
from engine.profile.timed_step import BURST, DECODE, PREFILL
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from launch.world import World
from results.render.page import render
from results.render.record import read_records


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (2, 64, 100, 8, 2, 300, False))


def case(model: str = "tiny", **changes) -> Case:
    fixed = {"model": model, "tp": 1, "ranks_per_gpu": 1, "dtype": "fp32", "batch": 3, "prompt": 6, "output": 9}
    return Case(**{**fixed, **changes})


def test_a_run_on_a_cpu_profiles_each_phase_alone():
    with open_engine(case(), "tiny", "cpu", is_profiled=True, max_step_tokens=9) as engine:
        decode = profile_phase(engine, case(), "decode", repeats=1)
        kinds = {step.work.kind for step in engine.profiler.steps}
        prefill = profile_phase(engine, case(), "prefill", repeats=1)
        assert {step.work.kind for step in engine.profiler.steps} == {PREFILL} and DECODE in kinds
    assert decode.num_steps == 1 and prefill.num_steps == 2  # 18 tokens, 9 a step
    for phase, kind in ((decode, DECODE), (prefill, PREFILL)):
        assert phase.profile.kind == kind and phase.profile.overhead > 0 and not phase.profile.is_cold
        assert sum(phase.profile.stages.values()) == pytest.approx(phase.profile.wall_us)
        assert phase.profile.host_syncs is None, "there is nothing to wait for on a CPU"


def profile(kind: str = BURST, **changes) -> KindProfile:
    fixed = {
        "kind": kind, "num_steps": 640, "num_profiled": 64, "is_cold": False, "stages": {stage: 100.0 for stage in STAGES},
        "layers": {"mlp": [40.0, 60.0]}, "wall_us": 800.0, "overhead": 1.25, "sum_ratio": 0.99, "host_syncs": 0.0,
        "launches": Launches(170, 171),
    }  # fmt: skip
    return KindProfile(**{**fixed, **changes})


def test_records_render_as_two_tables(tmp_path, monkeypatch):
    own, once = case("qwen2.5-7b", dtype="bf16"), case("qwen2.5-7b", dtype="bf16", output=1)
    decode = make_record(own, Phase("decode", profile(), 1), 300.0, "graph", "none")
    counted = profile(PREFILL, host_syncs=3.0, launches=Launches(0, None))
    prefill = make_record(once, Phase("prefill", counted, 2), 900.0, "graph", "none")
    assert decode.case == {"phase": "decode", **vars(own), "backend": "graph", "comm": "none"}
    times = {f"{stage}_us": 100.0 for stage in STAGES}
    counts = {"host_syncs_per_token": 0.0, "own_kernel_launches": 170, "kernel_launches": 171}
    assert decode.metrics == {**times, "wall_us": 800.0, "profile_overhead_ratio": 1.25, **counts}
    assert prefill.metrics["wall_us"] == 1600.0 and prefill.metrics["mlp_us"] == 200.0
    assert prefill.metrics["host_syncs_per_request"] == 2.0 and "kernel_launches" not in prefill.metrics
    assert decode.ceiling == {"wall_us": 300.0} and decode.checked and prefill.checked
    monkeypatch.setattr("sys.argv", ["x"])
    for record in (decode, prefill):
        record.append_to(tmp_path / "stages.jsonl", "1 x H200", "engine.bench.stages")
    assert [json.loads(line)["bench"] for line in (tmp_path / "stages.jsonl").read_text().splitlines()] == ["stages"] * 2
    page, charts = render(read_records(tmp_path))
    assert page.count("| qkv, us | attention, us |") == 2 and "| 100 (12 %)" in page and "| 200 (12 %)" in page
    assert len(charts) == 2 and all(sum(shares[0] for _, shares in chart.parts) == pytest.approx(1) for chart in charts)
    lines = "\n".join(describe(prefill, Phase("prefill", counted, 2)))
    assert "prefill took 1600.0 us in 2 steps, floor 900.0" in lines and "60.00 (layer 1)" in lines and "1.250 x" in lines


@pytest.mark.parametrize("ratio, is_checked", [(0.96, True), (1.04, True), (0.94, False), (1.06, False), (None, False)])
def test_stages_that_do_not_sum_to_the_wall_are_not_checked(ratio, is_checked):
    phase = Phase("decode", profile(sum_ratio=ratio, host_syncs=None, launches=None, overhead=None), 1)
    record = make_record(case(), phase, 1.0, "graph", "none")
    assert record.checked == is_checked
    assert set(record.metrics) == {f"{stage}_us" for stage in STAGES} | {"wall_us"}


def test_the_floor_is_that_of_the_other_benches():
    blueprint = draw_blueprint(EngineSettings("qwen2.5-7b", load_format="dummy", dtype="bfloat16"), World())
    wanted = case("qwen2.5-7b", dtype="bf16", batch=1)
    assert floor_us(wanted, "decode", blueprint) == pytest.approx(Reads.of(wanted, blueprint).total / DATASHEET_TB_S / 1e6)
    assert floor_us(wanted, "prefill", blueprint) == pytest.approx(floor_us(wanted, "decode", blueprint), rel=0.01)


def test_the_command():
    run = CliRunner().invoke
    options = {"model": "tiny", "device": "cpu", "dtype": "fp32", "prompt": 4, "output": 5, "repeats": 1}
    done = run(main, [f"--{name}={value}" for name, value in options.items()])
    assert done.exit_code == 0, done.output
    assert "decode, one step at a time: mean of" in done.output and "prefill: mean of 2 profiled steps of 4" in done.output
    refused = run(main, ["--device", "cpu", "--record", "x.jsonl"])
    assert refused.exit_code == 2 and "keeps numbers of GPUs" in refused.output
    refused = run(main, ["--output", "3"])
    assert refused.exit_code == 2 and "x>=4" in refused.output
