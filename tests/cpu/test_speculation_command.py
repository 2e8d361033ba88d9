"""Speculation from the command line: the options, the summary, the last line, the side file."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest

from comm.device_signal import WAITS
from engine.generate import command
from engine.settings import DRAFT_WAITS
from tests.cpu.tiny import make_model, save_model
from tests.cpu.tiny_tokenizer import build_tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny_tokenizer(save_model(make_model("qwen2", vocab_size=512), tmp_path_factory.mktemp("model")))


def generate(folder, output, *options: str) -> tuple[list[dict], dict, str]:
    rows = output.with_name("in.jsonl")
    rows.write_text("\n".join(json.dumps({"prompt": text}) for text in ("one two one two", "What is your name?")))
    arguments = ["--model", str(folder), "--input", str(rows), "--output", str(output), "--max-tokens", "30", "--seed", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "engine.generate", *arguments, "--temperature", "1", "--ignore-eos", "--threads", "1", *options],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    record = json.loads(output.with_name(f"{output.name}.meta.json").read_text())
    return sorted(answers, key=lambda row: row["index"]), record, done.stderr


def test_a_run_with_a_draft_model_says_how_it_went(folder, tmp_path):
    plain, record, said = generate(folder, tmp_path / "plain.jsonl")
    assert record["speculation"] is None and "speculation     off" in said and "drafts accepted" not in said
    rows, record, said = generate(folder, tmp_path / "drafted.jsonl", "--draft-model", str(folder), "--num-drafts", "5")
    assert rows == plain
    assert f"speculation     up to 5 drafts a row and step from {folder}" in said
    # 30 tokens a row: one from the prompt, 4 times 6, and 5 with the last 4 drafts.
    assert record["speculation"] == {
        "proposed": 48, "accepted": 48, "acceptance": 1.0, "mean_accepted": 4.8, "tokens_per_step": 5.8,
    }
    line = "doorbell: speculation: 48 of 48 drafts accepted (100.0 %), 4.80 a proposal, 5.80 tokens a step and row"
    assert line in said.splitlines()


def settings_of(*options: str):
    return command.main(args=list(options), standalone_mode=False).engine_settings()


def test_the_options_reach_the_settings():
    settings = settings_of("--ngram", "--num-drafts", "7")
    assert (settings.is_ngram, settings.draft_model, settings.num_drafts) == (True, None, 7)
    settings = settings_of("--draft-model", "some/folder", "--draft-kv-memory", "2M")
    assert (settings.is_ngram, settings.draft_model, settings.num_drafts) == (False, "some/folder", None)
    assert settings.draft_kv_memory_bytes == 2 << 20
    assert (settings.draft_placement, settings.draft_wait) == ("all", "kernel") and settings.max_speculative_rows is None
    assert settings_of("--ngram", "--max-speculative-rows", "40").max_speculative_rows == 40
    settings = settings_of("--draft-model", "some/folder", "--draft-placement", "first", "--draft-wait", "stream")
    assert (settings.draft_placement, settings.draft_wait) == ("first", "stream")
    assert settings_of("--draft-model", "some/folder", "--draft-placement", "split").draft_placement == "split"
    assert DRAFT_WAITS == WAITS


def test_other_values_are_refused_by_name():
    for option, words in (("--draft-placement", "'all', 'first', 'split'"), ("--draft-wait", "'kernel', 'stream'")):
        with pytest.raises(click.BadParameter, match=f"'half' is not one of {words}"):
            settings_of("--draft-model", "some/folder", option, "half")
