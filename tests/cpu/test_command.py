"""The command's options, files and exit codes, each through a whole run of it in a process of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_forks import CommandForks
from command_harness import ROOT, read_rows, side_record, strict_json, tiny_folder, write_rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with CommandForks(tmp_path_factory.mktemp("forks")) as server:
        yield server


@pytest.fixture
def answer(forks, model):
    """Runs the command on the tiny model, with few tokens and no summary unless the arguments say otherwise."""

    def run(*arguments: object, **how):
        defaults = ["--model", model, "--quiet", "--max-tokens", 6, "--kv-memory", "16M", "--ignore-eos"]
        return forks.start([*defaults, *arguments], **how).wait()

    return run


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "in.jsonl", [{"id": f"r{number}", "prompt": f"count to {number}"} for number in range(5)])


def check_refused(ended, code: int, meaning: str, *words: str) -> None:
    """One sentence, which holds `words`, then the line with the code; no traceback, nothing on standard output."""
    assert ended.code == code, ended.stderr
    assert ended.said == [ended.sentence, f"doorbell: exit code {code} ({meaning})"], ended.stderr
    for word in words:
        assert word in ended.sentence
    assert ended.stderr.splitlines() == ended.said
    assert ended.stdout == b""


# -- start -----------------------------------------------------------------------------------------------------------


def test_help_and_slips_import_nothing_heavy():
    program = (
        "import sys\nfrom engine.generate import main\ntry:\n    main(sys.argv[1:])\nfinally:\n"
        "    print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    for argument, code in (("--help", 0), ("--no-such-option", 2), ("--top-k=x", 2)):
        done = subprocess.run([sys.executable, "-c", program, argument], cwd=ROOT, capture_output=True, text=True, timeout=20)
        assert done.returncode == code
        assert done.stderr.splitlines()[-1] == "[]", done.stderr
    for option in ("--max-tokens", "--kv-memory", "--resume", "--threads"):
        assert option in subprocess.run(
            [sys.executable, "-m", "engine.generate", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=20
        ).stdout


def test_help_and_slips_are_immediate():
    for argument in ("--help", "--no-such-option"):
        best = min(timed([sys.executable, "-m", "engine.generate", argument]) for _ in range(3))
        assert best < 1.0


def timed(command: list[str]) -> float:
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=20)
    return time.monotonic() - started


# -- usage: exit code 2 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--prompt", "a", "--tp", 4], ["--tp 4", "single process", "torchrun --standalone --nproc-per-node 4"]),
        (["--prompt", "a", "--input", "x"], ["--prompt", "--input", "not both"]),
        ([], ["--prompt", "--input"]),
        (["--prompt", "a", "--no-such"], ["No such option", "--no-such"]),
        (["--prompt", "a", "--temperature", "-1"], ["temperature"]),
        (["--prompt", "a", "--temperature", "nan"], ["temperature"]),
        (["--prompt", "a", "--top-p", "1.5"], ["top_p"]),
        (["--prompt", "a", "--kv-memory", "plenty"], ["plenty", "512M"]),
        (["--prompt", "a", "--seed", str(2**63)], ["seed"]),
        (["--prompt", "a", "--resume"], ["--resume", "--output"]),
        (["--prompt", "a", "--retry-failed"], ["--retry-failed", "--resume"]),
        (["--prompt", "a", "--output", "x", "--resume", "--overwrite"], ["--resume", "--overwrite"]),
        (["--prompt", "a", "--dtype", "float16"], ["float16", "CPU"]),
        (["--prompt", "a", "--max-model-len", "100000"], ["100000", "2048"]),
        (["--input", "/no/such/rows.jsonl"], ["/no/such/rows.jsonl", "No such file"]),
    ],
)
def test_usage(answer, arguments, words):
    check_refused(answer(*arguments), 2, "usage", *words)


def test_weights_in_fp8_and_a_shard_alone_are_other_runs(answer, rows, tmp_path, forks, model):
    """They answer, say what they are, and what they began is not continued by a plain run."""
    out = tmp_path / "out.jsonl"
    for options, word in ((["--dtype", "fp8"], "dtype"), (["--shard-of", 2], "shard_of")):
        arguments = ["--model", model, "--max-tokens", 3, "--kv-memory", "16M", "--ignore-eos", "--input", rows, "--output", out]
        ended = forks.start([*arguments, "--overwrite", *options]).wait()
        assert ended.code == 0 and len(read_rows(out)) == 5, ended.stderr
        assert ("fp8 matrices, float32 on cpu" if word == "dtype" else "note: --shard-of 2: this process") in ended.stderr
        check_refused(answer("--input", rows, "--output", out, "--resume", "--max-tokens", 3), 2, "usage", word)


def test_input_of_another_encoding(answer, tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes('{"prompt": "a"}\n'.encode("utf-16"))
    check_refused(answer("--input", path), 2, "usage", "UTF-16", "iconv")


def test_existing_output_is_kept(answer, rows, tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("something\n")
    check_refused(answer("--input", rows, "--output", output), 2, "usage", str(output), "--resume", "--overwrite")
    assert output.read_text() == "something\n"
    assert answer("--input", rows, "--output", output, "--overwrite").code == 0
    assert len(read_rows(output)) == 5


@pytest.mark.parametrize("kind", ["same name", "symbolic link", "hard link", "standard input"])
def test_output_onto_the_input(answer, rows, tmp_path, kind):
    content, output, how = rows.read_bytes(), rows, {}
    if kind == "symbolic link":
        output = tmp_path / "link"
        output.symlink_to(rows)
    if kind == "hard link":
        output = tmp_path / "link"
        output.hardlink_to(rows)
    if kind == "standard input":
        how = {"stdin": rows}
    source = "-" if kind == "standard input" else rows
    ended = answer("--input", source, "--output", output, "--overwrite", **how)
    check_refused(ended, 2, "usage", str(output), "is the input file")
    assert rows.read_bytes() == content


# -- the model: exit code 3 ------------------------------------------------------------------------------------------


def test_missing_model(answer, tmp_path):
    ended = answer("--prompt", "a", "--model", tmp_path / "none")
    check_refused(ended, 3, "model or configuration", str(tmp_path / "none"), "does not exist")


def test_model_without_weights(answer, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    check_refused(answer("--prompt", "a", "--model", folder), 3, "model or configuration", str(folder))


# -- rows: exit codes 0 and 4 ----------------------------------------------------------------------------------------


def test_bad_rows_are_answered_with_errors(answer, tmp_path):
    lines = [{"prompt": "a"}, "{oops", {"prompt": ""}, {"prompt": "b", "temprature": 1}, {"id": "last", "prompt": "c"}]
    rows, output = write_rows(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    ended = answer("--input", rows, "--output", output)
    assert ended.code == 4 and ended.last_line == "doorbell: exit code 4 (some rows failed)", ended.stderr
    results = {row["index"]: row for row in read_rows(output)}
    assert [results[index]["status"] for index in range(5)] == ["ok", "error", "error", "error", "ok"]
    assert results[4]["id"] == "last"
    record = side_record(output)
    assert record["counts"] == {"rows": 5, "ok": 2, "failed": 3, "resumed": 0}
    assert record["exit"] == {"code": 4, "reason": "some rows failed"}
    assert answer("--input", rows, "--output", output, "--overwrite", "--allow-failed-rows").code == 0
    assert answer("--input", rows, "--limit", 1).code == 0  # the bad ones are not reached


def test_strict_ends_at_the_first_bad_row(answer, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, "{oops", *({"prompt": "b"} for _ in range(200))])
    output = tmp_path / "out.jsonl"
    ended = answer("--input", rows, "--output", output, "--strict", "--max-tokens", 50)
    assert ended.code == 4 and "--strict: line 2" in ended.sentence, ended.stderr
    results = read_rows(output)
    assert 1 <= len(results) < 100
    assert next(row for row in results if row["index"] == 1)["status"] == "error"
    assert side_record(output)["counts"]["rows"] == len(results)


def test_standard_input_and_output(answer, rows):
    ended = answer("--input", "-", stdin=rows)
    results = [strict_json(line) for line in ended.stdout.splitlines()]
    assert ended.code == 0 and sorted(row["id"] for row in results) == [f"r{number}" for number in range(5)]
    assert ended.stderr == ""


def test_input_from_a_named_pipe(answer, forks, model, rows, tmp_path):
    """As in `--input <(zcat rows.gz)`: it can be read only once."""
    pipe = tmp_path / "pipe"
    subprocess.run(["mkfifo", pipe], check=True)
    with subprocess.Popen(["cp", rows, pipe]) as writer:
        command = ["--model", model, "--quiet", "--max-tokens", 3, "--input", pipe, "--output", tmp_path / "out.jsonl"]
        running = forks.start(command)
        deadline = time.monotonic() + 20
        while not running.is_over() and time.monotonic() < deadline:
            time.sleep(0.02)
        was_over = running.is_over()
        if not was_over:
            running.kill()
        ended = running.wait()
        writer.kill()
    assert was_over, "it never ended"
    assert ended.code == 0, ended.stderr
    assert len(read_rows(tmp_path / "out.jsonl")) == 5


def test_openai_rows(answer, tmp_path):
    bodies = [{"messages": [{"role": "user", "content": "hello"}]}, {"messages": []}]
    lines = [
        {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", **body}}
        for number, body in enumerate(bodies)
    ]
    ended = answer("--input", write_rows(tmp_path / "in.jsonl", lines), "--openai")
    results = {row["custom_id"]: row for row in map(strict_json, ended.stdout.splitlines())}
    assert ended.code == 4 and set(results) == {"c0", "c1"}
    assert results["c0"]["response"]["status_code"] == 200 and results["c0"]["error"] is None
    choice = results["c0"]["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "length" and isinstance(choice["message"]["content"], str)
    assert results["c0"]["response"]["body"]["usage"]["completion_tokens"] == 6
    assert results["c1"]["error"]["code"] == "invalid_messages"


def test_logprobs_are_strict_json(answer, rows):
    """Filtered tokens have a log-probability of minus infinity, which JSON cannot hold."""
    ended = answer("--input", rows, "--logprobs", 3, "--temperature", 1, "--top-k", 1, "--logit-bias", "7=-100", "--token-ids")
    assert ended.code == 0, ended.stderr
    for row in map(strict_json, ended.stdout.splitlines()):
        entries = row["logprobs"]["content"]
        assert len(entries) == 6 == len(row["token_ids"])
        assert all(len(entry["top_logprobs"]) == 3 and entry["logprob"] <= 0 for entry in entries)


def test_n_answers_of_a_row(answer, rows):
    ended = answer("--input", rows, "--n", 3, "--temperature", 1, "--seed", 3, "--limit", 1)
    row = strict_json(ended.stdout)
    assert len(row["text"]) == 3 and len(set(row["text"])) == 3
    assert row["finish_reason"] == ["length"] * 3 and row["completion_tokens"] == 18


def test_several_prompts_write_rows(answer):
    ended = answer("--prompt", "one", "--prompt", "two", "--prompt", "three", "--limit", 2)
    assert sorted(strict_json(line)["index"] for line in ended.stdout.splitlines()) == [0, 1]


# -- rendering -------------------------------------------------------------------------------------------------------


def rendered(ended) -> list[str]:
    assert ended.code == 0, ended.stderr
    return [strict_json(line)["text"] for line in ended.stdout.splitlines()]


def test_chat_raw_and_system(answer, rows):
    start, end = "<|im_start|>", "<|im_end|>\n"
    chat = f"{start}user\nhi{end}{start}assistant\n"
    assert rendered(answer("--prompt", "hi", "--dry-run")) == [chat]
    assert rendered(answer("--prompt", "hi", "--dry-run", "--raw")) == ["hi"]
    assert rendered(answer("--prompt", "hi", "--dry-run", "--system", "Be brief.")) == [f"{start}system\nBe brief.{end}{chat}"]
    assert rendered(answer("--input", rows, "--dry-run", "--limit", 1)) == ["count to 0"]
    expected = f"{start}user\ncount to 0{end}{start}assistant\n"
    assert rendered(answer("--input", rows, "--dry-run", "--limit", 1, "--chat")) == [expected]


def test_dry_run_reads_no_weights(answer, forks):
    """145 GB would be needed, and the answer is there in a moment; the folder's files are checked all the same."""
    ended = forks.start(["--model", "qwen2.5-72b", "--load-format", "dummy", "--prompt", "hi", "--dry-run", "--raw"]).wait()
    assert strict_json(ended.stdout)["token_ids"] == list(b"hi")
    assert ended.code == 0 and ended.seconds < 10


# -- continuing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def half_done(answer, rows, tmp_path):
    """An output that holds two of five rows."""
    output = tmp_path / "out.jsonl"
    assert answer("--input", rows, "--output", output, "--seed", 1).code == 0
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:2]))
    return output


def test_resume(answer, rows, half_done):
    kept = half_done.read_bytes()
    assert answer("--input", rows, "--output", half_done, "--seed", 1, "--resume").code == 0
    assert half_done.read_bytes().startswith(kept)
    assert sorted(row["index"] for row in read_rows(half_done)) == [0, 1, 2, 3, 4]
    assert side_record(half_done)["counts"] == {"rows": 5, "ok": 5, "failed": 0, "resumed": 2}


def test_resume_goes_on_with_the_seed_that_was_drawn(answer, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": f"count to {number}"} for number in range(4)])
    output = tmp_path / "out.jsonl"
    command = ["--input", rows, "--output", output, "--temperature", 1, "--max-tokens", 6, "--ignore-eos"]
    assert answer(*command).code == 0
    whole = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(whole[:2]))
    assert answer(*command, "--resume").code == 0
    assert sorted(output.read_bytes().splitlines(keepends=True)) == sorted(whole)


@pytest.mark.parametrize("change", ["temperature", "model", "input", "seed", "openai"])
def test_resume_of_another_run(answer, rows, half_done, tmp_path, change):
    kept = half_done.read_bytes()
    arguments: list[object] = ["--input", rows, "--output", half_done, "--resume", "--seed", 2 if change == "seed" else 1]
    arguments += {"temperature": ["--temperature", 0.5], "openai": ["--openai"]}.get(change, [])
    if change == "model":
        arguments += ["--model", tiny_folder(tmp_path / "other", seed=1)]
    if change == "input":
        write_rows(rows, [{"prompt": "something else"}])
    word = {"model": "model.weights", "input": "input."}.get(change, f".{change}")
    check_refused(answer(*arguments), 2, "usage", "cannot resume", word, "--overwrite")
    assert half_done.read_bytes() == kept


def test_failed_rows_are_done_until_retried(answer, tmp_path):
    rows = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, "{oops", {"prompt": "b"}])
    output = tmp_path / "out.jsonl"
    command = ["--input", rows, "--output", output, "--seed", 1]
    assert answer(*command).code == 4
    written = output.read_bytes()
    assert answer(*command, "--resume").code == 4
    assert output.read_bytes() == written
    assert answer(*command, "--resume", "--retry-failed").code == 4
    assert sorted(row["index"] for row in read_rows(output)) == [0, 1, 2]
    assert read_rows(output)[-1]["index"] == 1  # tried again, hence last
    assert json.loads(output.read_bytes().splitlines()[-1])["error"]["code"] == "invalid_json"
