"""Ctrl-C, SIGTERM and closed pipes: everything ends, in order, at a row boundary, with the code that says which."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from command_harness import ROOT, Run, read_rows, shared_memory, side_record, tiny_folder, write_rows

LAST_LINES = {
    signal.SIGINT: "doorbell: exit code 130 (interrupted)",
    signal.SIGTERM: "doorbell: exit code 143 (terminated)",
}
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "in.jsonl"
    return write_rows(path, ({"prompt": f"count to {number}"} for number in range(4000)))


def arguments(model: Path, rows: Path, output: Path) -> list[object]:
    return [
        *("--model", model, "--input", rows, "--output", output),
        *("--max-tokens", 30, "--ignore-eos", "--max-batch", 4, "--kv-memory", "16M"),
    ]


def check_interrupted(ended, number: signal.Signals, output: Path) -> None:
    assert ended.last_line == LAST_LINES[number], ended.stderr
    assert ended.sentence in ("doorbell: interrupted", "doorbell: terminated"), ended.stderr
    assert "Traceback" not in ended.stderr.split("torch/distributed", 1)[0], ended.stderr
    finished = read_rows(output)
    record = side_record(output)
    assert record["exit"]["code"] == CODES[number]
    assert record["counts"]["ok"] == len(finished)
    assert all(row["completion_tokens"] == 30 for row in finished)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_single_process_in_mid_decode(tmp_path, model, rows, number):
    output = tmp_path / "out.jsonl"
    with Run(tmp_path, arguments(model, rows, output)) as running:
        running.until_rows(output, 3)
        running.process.send_signal(number)
        ended = running.wait(10)
        assert running.survivors() == []
    assert ended.code == CODES[number]
    check_interrupted(ended, number, output)
    assert len(read_rows(output)) >= 3


@pytest.mark.parametrize("delay_s", [0.0, 0.7, 1.7])
def test_single_process_while_it_starts(tmp_path, model, rows, delay_s):
    """Whatever it is doing then, imports included: no traceback, the code, one sentence."""
    with Run(tmp_path, [*arguments(model, rows, tmp_path / "out.jsonl"), "--quiet"]) as running:
        running.until(lambda: is_prepared(running.process.pid))
        time.sleep(delay_s)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait(10)
    assert ended.code == 130, ended.stderr
    assert ended.said[-2:] == ["doorbell: interrupted", LAST_LINES[signal.SIGINT]]
    assert "Traceback" not in ended.stderr


def is_prepared(pid: int) -> bool:
    """Whether a process handles SIGTERM, the last that ours takes over, some tenths of a second after its start."""
    caught = Path(f"/proc/{pid}/status").read_text().split("SigCgt:")[1].split()[0]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_in_mid_decode(tmp_path, model, rows, number):
    output, before = tmp_path / "out.jsonl", shared_memory()
    with Run(tmp_path, arguments(model, rows, output), ranks=2) as running:
        running.until_rows(output, 3, 90)
        running.process.send_signal(number)
        ended = running.wait(10)
        assert running.survivors() == []
    assert ended.code != 0
    check_interrupted(ended, number, output)
    assert shared_memory() <= before


@pytest.mark.slow
def test_torchrun_while_the_ranks_meet(tmp_path, model, rows):
    """Rank 0 is stopped, so rank 1 waits for it inside gloo, where no Python handler runs. SIGTERM must still end it."""
    output = tmp_path / "out.jsonl"
    with Run(tmp_path, arguments(model, rows, output), ranks=2) as running:
        running.until(lambda: len(running.survivors()) >= 3)
        first = running.rank(0)
        first.suspend()
        running.until(lambda: is_quiet(running.rank(1)), 40)
        running.process.send_signal(signal.SIGTERM)
        running.until(lambda: all(process.pid in (first.pid, running.process.pid) for process in running.survivors()), 8)
        first.resume()
        ended = running.wait(10)
        assert running.survivors() == []
    assert ended.code != 0


def is_quiet(process) -> bool:
    """Whether a process has started (a second of CPU time for the imports) and now waits."""
    before = process.cpu_times().user
    time.sleep(0.5)
    return before > 1.0 and process.cpu_times().user - before < 0.05


@pytest.mark.slow
def test_one_worker_alone(tmp_path, model, rows):
    """torchrun then sends SIGTERM to the other; the run ends with the code of what the user did."""
    output = tmp_path / "out.jsonl"
    with Run(tmp_path, arguments(model, rows, output), ranks=2) as running:
        running.until_rows(output, 3, 90)
        running.rank(1).send_signal(signal.SIGINT)
        ended = running.wait(15)
        assert running.survivors() == []
    assert ended.code != 0
    assert ended.last_line == LAST_LINES[signal.SIGINT], ended.stderr
    assert side_record(output)["exit"]["code"] == CODES[signal.SIGINT]
    assert side_record(output)["counts"]["ok"] == len(read_rows(output)) >= 3


@pytest.mark.slow
def test_torchrun_itself_is_killed(tmp_path, model, rows):
    """Nobody forwards anything then: the kernel tells the ranks that their parent is gone."""
    output = tmp_path / "out.jsonl"
    with Run(tmp_path, arguments(model, rows, output), ranks=2) as running:
        running.until_rows(output, 3, 90)
        running.process.kill()
        running.process.wait(5)
        deadline = time.monotonic() + 10
        while running.survivors() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert running.survivors() == []
        assert LAST_LINES[signal.SIGTERM] in running.stderr
    assert side_record(output)["counts"]["ok"] == len(read_rows(output))


def test_interrupt_while_waiting_for_standard_input(tmp_path, model):
    """The feed's thread is inside a read that never ends; leaving must not abort over it."""
    with Run(tmp_path, ["--model", model, "--input", "-"], stdin=subprocess.PIPE) as running:
        running.until(lambda: "all-reduce" in running.stderr)
        time.sleep(1.5)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait(10)
        running.process.stdin.close()
    assert ended.code == 130, ended.stderr
    assert ended.said[-2:] == ["doorbell: interrupted", LAST_LINES[signal.SIGINT]]
    assert "Fatal" not in ended.stderr


def test_a_pipe_that_nobody_reads_does_not_hold_up_the_end(tmp_path, model, rows):
    """The write of a row blocks for ever; the second signal ends the process all the same."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    with Run(tmp_path, [*arguments(model, rows, "-")[:4], "--quiet", "--max-batch", 4], stdout=writer) as running:
        os.close(writer)
        wait_until_full(running)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.8)
        running.process.send_signal(signal.SIGINT)
        ended = running.wait(8)
    os.close(reader)
    assert ended.code == 130
    assert ended.last_line == LAST_LINES[signal.SIGINT]


def wait_until_full(running: Run) -> None:
    """Until the process sleeps in the write of a full pipe: no CPU time any more."""
    running.until(lambda: is_quiet(running.survivors()[0]), 60)


def test_head_ends_quietly(tmp_path, model, rows):
    command = [sys.executable, "-m", "engine.generate", *map(str, arguments(model, rows, tmp_path / "x")[:4])]
    with subprocess.Popen(
        [*command, "--max-tokens", "5"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        line = process.stdout.readline()
        process.stdout.close()
        stderr = process.stderr.read().decode()
        code = process.wait()
        killer.cancel()
    assert line.startswith(b'{"') and line.endswith(b"\n")
    assert code == 0, stderr
    assert "Traceback" not in stderr and "roken pipe" not in stderr
    assert "exit code" not in stderr


def test_standard_error_may_lose_its_reader(tmp_path, model, rows):
    """As with `2> >(head -1)`: the rows go to a file, so nothing of the run is in vain."""
    output = tmp_path / "out.jsonl"
    command = [*arguments(model, rows, output), "--limit", 20]
    with subprocess.Popen(
        [sys.executable, "-m", "engine.generate", *map(str, command)], cwd=ROOT, stderr=subprocess.PIPE
    ) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        process.stderr.close()
        code = process.wait()
        killer.cancel()
    assert code == 0
    assert len(read_rows(output)) == 20 and side_record(output)["exit"]["code"] == 0


NOTE_PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from launch.signals import SignalNote
note = SignalNote(patience_s={patience})
note.on_force = lambda code: print("forced", code, flush=True)
note.install()
print("ready", flush=True)
deadline = time.monotonic() + 20
{body}
print("left", note.exit_code, flush=True)
"""
LOOP = "while time.monotonic() < deadline and note.exit_code is None: time.sleep(0.01)\ntime.sleep(1.0)"


@pytest.mark.parametrize(
    "body, patience, gaps, code, said",
    [
        (LOOP, 5.0, [], 0, "left 130"),
        (LOOP, 5.0, [0.1], 0, "left 130"),  # torchrun and the terminal both deliver: one press
        (LOOP, 5.0, [0.1, 0.1], 0, "left 130"),
        (LOOP, 5.0, [0.7], 130, "forced 130"),  # a second press
        (LOOP, 0.3, [], 130, "forced 130"),  # out of patience
    ],
)
def test_presses(body, patience, gaps, code, said):
    program = NOTE_PROGRAM.format(root=str(ROOT), patience=patience, body=body)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        for gap in gaps:
            time.sleep(gap)
            process.send_signal(signal.SIGINT)
        assert process.stdout.read().strip() == said
        assert process.wait(10) == code


def test_another_signal_at_once_is_a_second_press():
    program = NOTE_PROGRAM.format(root=str(ROOT), patience=5.0, body=LOOP)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read().strip() == "forced 143"
        assert process.wait(10) == 143


def test_a_main_thread_that_never_comes_back_from_c():
    """A library that retries its system call after a signal keeps the handler from running; the listener does not care."""
    body = (
        "import ctypes\nlibc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)\n"
        "libc.pthread_mutex_init(mutex, None)\nlibc.pthread_mutex_lock(mutex)\nlibc.pthread_mutex_lock(mutex)"
    )
    program = NOTE_PROGRAM.format(root=str(ROOT), patience=0.5, body=body)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read().strip() == "forced 143"
        assert process.wait(10) == 143
