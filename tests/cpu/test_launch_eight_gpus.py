"""`launch/eight_gpus.sh` with an MPS and a `make` that only take notes: what runs, in which order, what becomes of failures."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "eight_gpus.sh"
STUBS = {
    "nvidia-smi": 'for gpu in $(seq "$NUM_GPUS"); do echo "GPU $gpu: NVIDIA H200"; done',
    "nvidia-cuda-mps-control": 'if [ "${1:-}" = -d ]; then echo "MPS starts" >> "$NOTES"; else echo "$(cat)" >> "$NOTES"; fi',
    # Fails or hangs when its arguments are those that the test has chosen.
    "make": """echo "make $* on ${CUDA_VISIBLE_DEVICES-all}" >> "$NOTES"
if [ -n "${STEP_S-}" ]; then echo $(($(cat "$NOTES.clock") + STEP_S)) > "$NOTES.clock"; fi
case "$*" in
*"${FAILING-none}"*) exit 7 ;;
*"${HANGING-none}"*) sleep 60 & sleep 0.5; echo "hangs" >> "$NOTES"; wait; echo "woke up" >> "$NOTES" ;;
esac""",
    "python3": "exit ${MATPLOTLIB-0}",
}
FULL = [
    "test-ranks RANKS=8",
    "bench-comm TP=4",
    "bench-comm TP=8",
    "bench-soak TP=8 CALLS=1000000 MPS=",
    "bench-decode MODEL=qwen2.5-72b TP=4 DTYPE=bf16",
    "bench-decode MODEL=qwen2.5-72b TP=4 DTYPE=fp8",
    "bench-decode MODEL=qwen2.5-72b TP=8 DTYPE=bf16",
    "bench-decode MODEL=qwen2.5-72b TP=8 DTYPE=fp8",
    "bench-prefill MODEL=qwen2.5-72b TP=8 PROMPT=512",
    "bench-prefill MODEL=qwen2.5-72b TP=8 PROMPT=2048",
    "bench-drift TP=8 REQUESTS=1000",
    "bench-speculate MODEL=qwen2.5-72b TP=8 TRIALS=0.8:5 OUTPUT=129 REPEATS=1",
    "results PLOTS=1",
]


@pytest.fixture
def start(tmp_path):
    (tmp_path / "bin").mkdir()
    for name, body in STUBS.items():
        stub = tmp_path / "bin" / name
        stub.write_text(f"#!/bin/sh\n{body}\n")
        stub.chmod(0o755)

    def run(*options, num_gpus=8, **more):
        environ = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "NOTES": str(tmp_path / "notes"), "TMPDIR": str(tmp_path)}
        return subprocess.Popen(
            ["sh", str(SCRIPT), *options], env={**environ, "NUM_GPUS": str(num_gpus), **more}, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    run.notes = tmp_path / "notes"
    return run


def made(start, python="python3", gpus="all") -> list[str]:
    """What the steps asked `make` for, MPS left out."""
    head, tail = "make --no-print-directory ", f" PYTHON={python} on {gpus}"
    lines = [line for line in start.notes.read_text().splitlines() if line.startswith("make")]
    assert all(line.startswith(head) and line.endswith(tail) for line in lines), lines
    return [line.removeprefix(head).removesuffix(tail) for line in lines]


def summary_of(out: str) -> dict[str, str]:
    """How each step ended, by its name: the lines after the last empty one."""
    lines = out.rsplit("\n\n", 1)[1].splitlines()[:-1]
    assert all(line[4:8] == " s  " and line[:4].strip().isdigit() for line in lines), lines
    return {line[34:]: line[8:34].strip() for line in lines}


def test_all_steps_in_order_on_a_node_of_eight(start):
    out, err = (process := start()).communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert made(start) == FULL and "MPS starts" not in start.notes.read_text()
    assert summary_of(out) == {f"make {name}": "done" for name in FULL}
    assert "== make bench-comm TP=4, at most 60 s" in out and out.splitlines()[-1].endswith("s in all; every step done")


def test_four_gpus_run_what_four_can(start):
    out, _ = (process := start("--gpus", "4", PYTHON=str(start.notes.parent / "bin" / "python3"))).communicate(timeout=60)
    assert process.returncode == 0
    found = made(start, str(start.notes.parent / "bin" / "python3"), "0,1,2,3")
    assert found == [name.replace("=8", "=4") for name in FULL if name != "bench-comm TP=8" and not name.startswith(
        "bench-decode MODEL=qwen2.5-72b TP=8")]  # fmt: skip
    assert len(summary_of(out)) == len(found)


def test_reduced_steps_share_gpus_under_mps_where_they_must(start):
    process = start("--reduced", num_gpus=4, MATPLOTLIB="1")
    process.communicate(timeout=60)
    assert process.returncode == 0
    small = [name.replace("72b", "0.5b").replace("=1000000", "=20000").replace("=1000", "=100") for name in FULL[:-1]]
    assert made(start) == [*small, "results PLOTS="], "no plots where nothing draws them"
    lines = start.notes.read_text().splitlines()
    is_under_mps = {line.split(" ", 2)[2]: before == "MPS starts" for before, line in zip(["", *lines], lines) if "make" in line}
    assert all(is_shared == ("=8" in line) for line, is_shared in is_under_mps.items()), lines
    assert lines.count("MPS starts") == lines.count("quit -t 10") == sum(is_under_mps.values())


def test_a_failing_step_is_reported_and_the_others_run(start):
    out, _ = (process := start(FAILING="TP=8 DTYPE=bf16")).communicate(timeout=60)
    assert process.returncode == 1 and made(start) == FULL
    ended = summary_of(out)
    assert ended.pop("make bench-decode MODEL=qwen2.5-72b TP=8 DTYPE=bf16") == "exit code 7"
    assert set(ended.values()) == {"done"} and "some steps failed" in out.splitlines()[-1]


def test_a_step_that_hangs_ends_at_its_limit_with_all_that_it_started(start):
    process = start("--step-limit", "1", HANGING="bench-soak")
    out, _ = process.communicate(timeout=40)  # what it started holds the pipe for 60 s
    assert process.returncode == 1 and made(start) == FULL and "woke up" not in start.notes.read_text()
    ended = summary_of(out)
    assert ended.pop("make bench-soak TP=8 CALLS=1000000 MPS=") == "exit code 124, timed out"
    assert set(ended.values()) == {"done"} and "make bench-comm TP=4, at most 1 s" in out


def test_no_step_goes_beyond_the_ten_minutes(start):
    """With a clock on which every step takes 70 s: limits shrink, the rest is not run, and the page is made all the same."""
    start.notes.with_suffix(".clock").write_text("0")
    clock = start.notes.parent / "bin" / "date"
    clock.write_text('#!/bin/sh\ncat "$NOTES.clock"\n')
    clock.chmod(0o755)
    out, _ = (process := start(STEP_S="70")).communicate(timeout=60)
    assert process.returncode == 1 and made(start) == [*FULL[:8], FULL[-1]]
    assert list(summary_of(out).values()) == ["done"] * 8 + ["not run"] * 4 + ["done"]
    limits = [int(line.split("at most ")[1].split()[0]) for line in out.splitlines() if line.startswith("== make")]
    assert limits == [180, 60, 60, 90, 60, 60, 60, 590 - 60 - 7 * 70, 590 - 8 * 70]


def test_an_interrupted_run_ends_its_step_and_begins_no_other(start):
    process = start(HANGING="bench-comm TP=4")
    while not start.notes.exists() or "hangs" not in start.notes.read_text():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 1 and made(start) == FULL[:2]
    assert list(summary_of(out).values()) == ["done", "exit code 143"] + ["not run"] * 11


@pytest.mark.parametrize(
    "options, num_gpus, word",
    [
        (["--gpus", "9"], 8, "there are 8 GPUs"), ([], 0, "there are 0 GPUs"), ([], 2, "or --reduced, not 2"),
        (["--gpus", "many"], 8, "not 'many'"), (["--gpus"], 8, "above zero"), (["--step-limit", "0"], 8, "above zero"),
        (["--fast"], 8, "no such option: --fast"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(start, options, num_gpus, word):
    _, err = (process := start(*options, num_gpus=num_gpus)).communicate(timeout=30)
    assert process.returncode == 2 and word in err and "usage" in err and not start.notes.exists()
