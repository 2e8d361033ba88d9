"""`launch/with_mps.sh`, with an MPS that only takes notes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "with_mps.sh"
CONTROL = """#!/bin/sh
if [ "${1:-}" = -d ]; then echo "start $CUDA_MPS_PIPE_DIRECTORY" >> "$NOTES"; exit ${MPS_CODE:-0}; fi
echo "stdin $(cat) $CUDA_MPS_PIPE_DIRECTORY" >> "$NOTES"
"""


@pytest.fixture
def mps(tmp_path):
    (tmp_path / "bin").mkdir()
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.write_text(CONTROL)
    control.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    settings = {"PATH": path, "NOTES": str(tmp_path / "notes"), "TMPDIR": str(tmp_path / "scratch")}

    def start(*command, **more):
        return subprocess.Popen(
            ["sh", str(SCRIPT), *command], env=settings | more, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    start.notes, start.scratch = tmp_path / "notes", tmp_path / "scratch"
    return start


def test_the_command_runs_between_start_and_quit_and_its_exit_code_is_passed_on(mps):
    code = "import os, sys; p = os.environ['CUDA_MPS_PIPE_DIRECTORY']; print(p, os.path.isdir(p), sys.stdin.read()); sys.exit(7)"
    process = mps(sys.executable, "-c", code)
    out, _ = process.communicate("hello", timeout=30)
    pipe, *rest = out.split()
    assert (process.returncode, rest) == (7, ["True", "hello"])
    assert mps.notes.read_text().splitlines() == [f"start {pipe}", f"stdin quit -t 10 {pipe}"]
    assert Path(pipe).is_relative_to(mps.scratch) and os.listdir(mps.scratch) == []


def test_termination_reaches_the_command_and_mps_still_ends(mps):
    code = "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)"
    process = mps(sys.executable, "-c", code)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 9
    assert "stdin quit" in mps.notes.read_text() and os.listdir(mps.scratch) == []


def test_an_mps_that_does_not_start_runs_nothing(mps):
    process = mps("echo", "ran", MPS_CODE="3")
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (1, "")
    assert "MPS did not start" in err and os.listdir(mps.scratch) == []


def test_without_a_command_or_without_mps_it_says_so(mps):
    process = mps()
    assert "usage" in process.communicate(timeout=30)[1] and process.returncode == 2
    (mps.notes.parent / "bin" / "nvidia-cuda-mps-control").unlink()
    process = mps("echo", "ran")
    assert "not here" in process.communicate(timeout=30)[1] and process.returncode == 127
