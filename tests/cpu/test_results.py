"""The page and the plots made from records: what stands beside a number, what is kept apart, what is left out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from results.render.chart import BarChart, LineChart
from results.render.page import render
from results.render.record import BadRecord, read_records
from tests.cpu.result_records import OTHERS, all_reduce, decode, made, write

ROOT = Path(__file__).resolve().parents[2]


def page_of(folder: Path, *records: dict) -> str:
    return render(read_records(write(folder, *records)))[0]


def charts_of(folder: Path, *records: dict) -> dict[str, LineChart | BarChart]:
    return {chart.name: chart for chart in render(read_records(write(folder, *records)))[1]}


def rows(page: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("|")]


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "results.render", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_page_in_the_repository_is_that_of_the_records():
    page, charts = render(read_records(ROOT / "results"))
    assert (ROOT / "results" / "README.md").read_text(encoding="utf-8") == page, "run `make results` and commit what it writes"
    assert {path.stem for path in (ROOT / "results" / "plots").glob("*.svg")} == {chart.name for chart in charts}


def test_a_number_stands_beside_its_ceiling_and_its_peer(tmp_path):
    heading, _, row = rows(page_of(tmp_path, decode()))
    assert heading == ["TPOT, ms", "ceiling", "vLLM", "HBM, TB/s", "ceiling", "layer residual, us",
                       "ceiling", "host syncs per token", "limit"]  # fmt: skip
    assert row == ["5", "4 (80 %)", "6 (1.20x)", "3.6", "4.8 (75 %)", "7.5", "0", "0.25", "0"]


EXPECTED = {
    "prefill": (["TTFT, ms", "ceiling", "vLLM", "TTFT p90, ms", "ceiling", "vLLM", "host syncs per request", "limit"],
                ["20", "10 (50 %)", "30 (1.50x)", "40", "10 (25 %)", "30 (0.75x)", "3", "0"]),
    "ways": (["TTFT, ms", "ceiling", "host_loop", "TPOT, ms", "ceiling", "host_loop", "host syncs per request", "limit",
              "torch syncs per token", "limit", "equal tokens", "limit"],
             ["10", "4 (40 %)", "30 (3.00x)", "2.5", "1.5 (60 %)", "20 (8.00x)", "2", "0", "0", "0", "60", "129"]),
    "throughput": (["output, tok/s", "vLLM", "drift, %", "limit"], ["9000", "6000 (1.50x)", "1.5", "3"]),
    "speculate": (["speedup", "tokens per step", "limit", "acceptance", "limit"], ["1.75", "3.1", "5", "0.8", "1"]),
    "drift": (["output, tok/s", "ceiling", "drift, %", "limit", "steps compared", "mismatches", "limit"],
              ["900", "1800 (50 %)", "1.5", "2", "4800", "0", "0"]),
    "coldstart": (["first token, s", "vLLM", "imports, s"], ["8", "40 (5.00x)", "2 (25 %)"]),
    "stages": (["qkv, us", "mlp, us", "rest, us", "wall, us", "ceiling", "profile overhead ratio"],
               ["25 (25 %)", "50 (50 %)", "20 (20 %)", "100", "40 (40 %)", "1.25"]),
    "product": (["product, us", "ceiling", "cuBLAS", "HBM, TB/s", "ceiling"],
                ["10", "6 (60 %)", "9 (0.90x)", "3", "4.59 (65 %)"]),
    "fp8_error": (["qkv error, %", "bf16", "kl nats", "bf16", "perplexity, %", "limit"],
                  ["2", "0.25", "0.01", "0.001", "0.2", "1"]),
    "decode_attention": (["attention, us", "ceiling", "sdpa", "flashinfer"], ["5", "1 (20 %)", "20 (4.00x)", "10 (2.00x)"]),
    "put_signal": (["hop, us", "ceiling", "nccl"], ["2", "0.5 (25 %)", "16 (8.00x)"]),
    "soak": (["calls", "mismatches", "limit", "drift, %", "limit"], ["1000", "0", "0", "0.5", "3"]),
    "cpu": (["decode ratio", "decode, tok/s", "ceiling", "transformers"], ["2.5", "90", "400 (22 %)", "36 (2.50x)"]),
    "novel": (["lap, s", "ceiling"], ["3", "1.5 (50 %)"]),
}  # fmt: skip


def border(batch: int, rate: float, tok_s: float, plain: float, num_drafts: object = 3) -> dict:
    case = {"model": "qwen2.5-7b", "tp": 1, "batch": batch, "requests": 4 * batch, "rate": rate, "num_drafts": num_drafts}
    metrics = {"output_tok_s": tok_s, "speedup": tok_s / plain, "acceptance": 0.5, "tokens_per_step": 2.0}
    return made("speculate", case, metrics, peer={"name": "without drafts", "output_tok_s": plain})


def test_where_speculation_stops_paying_is_a_table_of_its_own(tmp_path):
    (other,) = [record for record in OTHERS if record["bench"] == "speculate"]
    page = page_of(
        tmp_path, border(16, 0.6, 1000, 2000), border(2, 0.8, 600, 400), other, border(2, 0.6, 500, 400),
        border(16, 0.8, 2400, 2000), border(16, 0.8, 1990, 2000, "adaptive"),
    )  # fmt: skip
    first, second = page.split("**model qwen2.5-7b, TP 1**")
    assert rows(first)[-1] == ["1.75", "3.1", "5", "0.8", "1"]
    assert rows(second) == [
        ["batch", "requests", "right at 0.6, 3 drafts", "right at 0.8, 3 drafts", "right at 0.8, adaptive drafts"],
        ["---:", "---:", "---:", "---:", "---:"],
        ["2", "8", "1.25x (500 tok/s, 50 % held)", "1.50x (600 tok/s, 50 % held)", ""],
        ["16", "64", "0.50x (1000 tok/s, 50 % held)", "1.20x (2400 tok/s, 50 % held)", "0.99x (1990 tok/s, 50 % held)"],
    ]


@pytest.mark.parametrize("record", OTHERS, ids=lambda record: record["bench"])
def test_every_bench_has_its_table(tmp_path, record):
    page = page_of(tmp_path, record)
    heading, _, row = rows(page)
    assert (heading, row) == EXPECTED[record["bench"]]
    assert "<sub>1 x Test GPU; doorbell 9.9, torch 8.8; commit abcdef; 2030-01-02.</sub>" in page
    assert "```\npython -m bench\n```" in page


def test_numbers_with_nothing_beside_them_are_named_and_not_shown(tmp_path):
    page = page_of(tmp_path, *OTHERS)
    assert "- `prefill`: numbers with neither a ceiling nor a baseline: `prefill_tok_s`." in page
    assert "- `novel`: numbers with neither a ceiling nor a baseline: `laps`." in page
    assert "tenth_1_us" not in page  # they are drawn
    assert "1000," not in page and "prefill, tok/s" not in page


def test_records_with_nothing_beside_them_are_counted_and_not_shown(tmp_path):
    alone = made("novel", {"colour": "green"}, {"lap_s": 777})
    unchecked = made("novel", {"colour": "black"}, {"lap_s": 888}, ceiling={"lap_s": 1}, checked=False)
    page = page_of(tmp_path, alone, unchecked)
    assert "777" not in page and "888" not in page and "## `novel`" not in page
    assert "- `novel`: 1 record with neither a ceiling nor a baseline." in page
    assert "- `novel`: 1 record whose result was not checked." in page


def test_a_whole_without_parts_has_nothing_beside_it(tmp_path):
    page = page_of(tmp_path, made("coldstart", {"caches": "cold"}, {"first_token_s": 555}))
    assert "555" not in page and "- `coldstart`: 1 record with neither a ceiling nor a baseline." in page


def test_the_newest_record_of_a_case_wins(tmp_path):
    page = page_of(tmp_path, decode(5.5, date="2030-01-03"), decode(7.5, date="2030-01-03"), decode(6.5, date="2030-01-02"),
                   decode(8.5, date="2030-02-01", checked=False), decode(9.5, device="1 x Other GPU"))  # fmt: skip
    assert [row[0] for row in rows(page) if row[0][0].isdigit()] == ["9.5", "7.5"]
    assert "- `decode`: 2 records with a newer one of the same case." in page


def test_projections_have_tables_of_their_own_and_are_never_drawn(tmp_path):
    measured = [decode(5.0), decode(3.0, tp=2)]
    projected = [decode(2.0, tp=4, kind="projected"), decode(4.9, kind="projected")]
    page, charts = render(read_records(write(tmp_path, *measured, *projected)))
    before, after = page.split("### Decode: projected, not measured\n")
    assert [row[:2] for row in rows(before)[2:]] == [["1", "5"], ["2", "3"]]
    assert [row[:2] for row in rows(after)[2:]] == [["1", "4.9"], ["4", "2"]]
    (chart,) = charts
    assert {x for series in chart.series for x in series.xs} == {1, 2}


def test_models_stand_in_the_order_of_their_sizes(tmp_path):
    page = page_of(tmp_path, decode(model="qwen2.5-72b"), decode(model="qwen2.5-7b"), decode(model="qwen2.5-0.5b"))
    captions = [line for line in page.splitlines() if line.startswith("**")]
    assert [caption.split()[1] for caption in captions] == ["qwen2.5-0.5b,", "qwen2.5-7b,", "qwen2.5-72b,"]


def test_algorithms_stand_side_by_side_the_fastest_bold(tmp_path):
    work = [all_reduce("two_shot", 6.0), all_reduce("lamport", 2.0), all_reduce("one_shot", 4.0)]
    large = [all_reduce("two_shot", 50.0, bytes=1 << 23, ceiling={"all_reduce_us": 25.0}, peer={})]
    heading, _, small, big = rows(page_of(tmp_path, *large, *work))
    assert heading == ["bytes", "lamport, us", "one_shot, us", "two_shot, us", "ceiling", "nccl", "flashinfer"]
    assert small == ["16 KB", "**2**", "4", "6", "0.5 (25 %)", "8 (4.00x)", "3 (1.50x)"]
    assert big == ["8 MB", "", "", "50", "25 (50 %)", "", ""]


def test_ranks_that_share_a_gpu_are_held_against_the_textbook_form(tmp_path):
    shared = {"world": 8, "ranks_per_gpu": 4, "ceiling": {}, "peer": {}}
    records = [all_reduce(name, us, **shared) for name, us in (("lamport", 5.0), ("one_shot", 10.0), ("two_shot", 20.0))]
    page = page_of(tmp_path, *records, all_reduce("lamport_norm", 333.0, rows=1, **shared))
    heading, _, row = rows(page)
    assert heading == ["lamport, us", "one_shot (baseline), us", "two_shot, us"]
    assert row == ["**5**", "10 (2.00x)", "20"]
    assert "333" not in page and "- `all_reduce`: 1 record with neither a ceiling nor a baseline." in page
    assert "under MPS" in page


def test_a_run_on_another_day_does_not_lend_its_peers(tmp_path):
    later = all_reduce("two_shot", 6.0, peer={"name": "nccl", "all_reduce_us": 9.0})
    table = rows(page_of(tmp_path, all_reduce("lamport", 2.0), later))
    assert sorted(row[-2:] for row in table[2:]) == [["8 (4.00x)", "3 (1.50x)"], ["9 (1.50x)", ""]]


def test_threads_are_told_where_they_differ(tmp_path):
    heading, _, row = rows(page_of(tmp_path, all_reduce("lamport", 2.0), all_reduce("lamport", 3.0, threads=64)))
    assert heading[:2] == ["lamport/256, us", "lamport/64, us"] and row[:2] == ["**2**", "3"]


def test_the_chart_of_all_reduce(tmp_path):
    records = [all_reduce("lamport", us, bytes=size) for size, us in ((32768, 2.5), (8192, 2.0))]
    chart = charts_of(tmp_path, *records)["all-reduce-2-ranks-1-x-test-gpu"]
    assert [(s.label, s.role, s.xs, s.ys) for s in chart.series] == [
        ("lamport", "ours", (8192, 32768), (2.0, 2.5)),
        ("nccl", "peer", (8192, 32768), (8.0, 8.0)),
        ("flashinfer", "peer", (8192, 32768), (3.0, 3.0)),
        ("ceiling", "ceiling", (8192, 32768), (0.5, 0.5)),
    ]
    assert chart.is_log_x and chart.is_log_y and chart.ticks == ((8192, "8 KB"), (32768, "32 KB"))


def test_the_chart_of_tpot_keeps_ranks_without_peers_apart(tmp_path):
    records = [decode(5.0), decode(3.0, tp=2, comm="ipc"), decode(1.0, tp=8, comm="loopback"), decode(2.0, tp=4, comm="loopback")]
    chart = charts_of(tmp_path, *records)["tpot-qwen2.5-7b-1-x-test-gpu"]
    ours = [(series.xs, series.ys) for series in chart.series if series.role == "ours"]
    assert ours == [((1, 2), (5.0, 3.0)), ((4, 8), (2.0, 1.0))]
    assert [series.label for series in chart.series if series.role == "ours"] == ["Doorbell", "Doorbell (one rank alone)"]
    assert [series.label for series in chart.series if series.role == "ceiling"] == ["roofline", "roofline"]
    assert chart.title.startswith("TPOT against TP, qwen2.5-7b, dtype bf16, batch 1, prompt 512")


def test_the_charts_of_stages_and_of_a_long_run(tmp_path):
    (stages,) = [record for record in OTHERS if record["bench"] == "stages"]
    prefill = {**stages, "case": {**stages["case"], "phase": "prefill", "output": 1}, "metrics": {"mlp_us": 9, "wall_us": 10}}
    charts = charts_of(tmp_path, *OTHERS, prefill)
    bars = charts["stages-decode-qwen2.5-7b-1-x-test-gpu"]
    assert bars.parts == (("qkv", (0.25,)), ("mlp", (0.5,)), ("rest", (0.25,)))
    assert bars.title == "Stages of a decode step, qwen2.5-7b (1 x Test GPU)"
    bars = charts["stages-prefill-qwen2.5-7b-1-x-test-gpu"]
    assert bars.parts == (("mlp", (0.9,)), ("rest", (pytest.approx(0.1),)))
    run, upper, lower = charts["drift-soak-1-x-test-gpu"].series
    assert run.ys[0] == pytest.approx(-run.ys[-1]) and run.ys[-1] == pytest.approx(100 * 0.045 / 6.055)
    assert (upper.ys, lower.ys) == ((3, 3), (-3, -3))


GOOD = json.dumps(decode())


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"bench": ', "this is not JSON"),
        ("[1]", "a record is a JSON object"),
        (GOOD.replace('"commit"', '"committ"'), "'commit' is missing"),
        (GOOD.replace('"checked": true', '"checked": 1'), "'checked' must be true or false"),
        (GOOD.replace('"tpot_ms": 5.0', '"tpot_ms": NaN'), "'tpot_ms' in 'metrics' must be a finite number"),
        (GOOD.replace('"tpot_ms": 4.0', '"tpot_ms": "4"'), "'tpot_ms' in 'ceiling' must be a finite number"),
        (GOOD.replace('"measured"', '"guessed"'), "'kind' must be one of measured, projected"),
        (GOOD.replace("2030-01-02", "yesterday"), "'date' must be year-month-day"),
        (GOOD.replace('"date"', '"more": 1, "date"'), "unknown key 'more'"),
    ],
)
def test_a_bad_line_is_one_sentence_with_its_place(tmp_path, line, message):
    (tmp_path / "decode.jsonl").write_text(f"{GOOD}\n\n{line}\n", encoding="utf-8")
    with pytest.raises(BadRecord) as caught:
        list(read_records(tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'decode.jsonl'}, line 3: {message}")
    assert "\n" not in str(caught.value)


def test_the_command_refuses_a_bad_line_and_leaves_the_page(tmp_path):
    (tmp_path / "README.md").write_text("old", encoding="utf-8")
    (tmp_path / "decode.jsonl").write_text("{}\n", encoding="utf-8")
    done = run("--folder", tmp_path, "--no-plots")
    assert (done.returncode, done.stderr) == (1, f"error: {tmp_path / 'decode.jsonl'}, line 1: 'bench' is missing\n")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "old"


def test_the_command_writes_tables_without_matplotlib(tmp_path):
    write(tmp_path, decode(), *OTHERS)
    done = run("--folder", tmp_path, "--no-plots")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == render(read_records(tmp_path))[0]
    assert not (tmp_path / "plots").exists()


def test_plots_without_matplotlib_are_one_sentence(tmp_path, monkeypatch, capsys):
    from results.render.__main__ import main

    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises
    with pytest.raises(SystemExit) as caught:
        main(["--folder", str(tmp_path)], standalone_mode=False)
    assert caught.value.code == "error: plots need matplotlib (pip install -e '.[results]'); --no-plots renders the tables alone"
    assert not list(tmp_path.iterdir())


def test_plots_have_the_same_bytes_twice_and_old_ones_go(tmp_path):
    pytest.importorskip("matplotlib")
    write(tmp_path, decode(), decode(3.0, tp=2), all_reduce("lamport", 2.0), *OTHERS)
    (tmp_path / "plots").mkdir()
    (tmp_path / "plots" / "old.svg").write_text("old", encoding="utf-8")
    found = []
    for _ in range(2):
        done = run("--folder", tmp_path)
        assert done.returncode == 0, done.stderr
        found.append({path.name: path.read_bytes() for path in (tmp_path / "plots").iterdir()})
    assert found[0] == found[1]
    assert sorted(found[0]) == [
        "all-reduce-2-ranks-1-x-test-gpu.svg", "drift-drift-1-x-test-gpu.svg", "drift-soak-1-x-test-gpu.svg",
        "stages-decode-qwen2.5-7b-1-x-test-gpu.svg",
        "tpot-qwen2.5-7b-1-x-test-gpu.svg",
    ]  # fmt: skip
    assert all(b"<svg" in data and b"<dc:date>" not in data for data in found[0].values())
