"""A real model for a GPU machine without network, to which little can be carried at a time: packed in parts, rebuilt there.

    python -m tests.gpu.carry_model pack models/smollm2-135m build/carry      # where the model is: build/carry/part-1-of-N, ...
    python -m tests.gpu.carry_model unpack build/carry build/carried-model    # where all parts are
    python -m pytest -q -s tests/gpu/test_smollm2_text.py --carried-model build/carried-model

Matrices, the embedding among them, travel as e4m3 with an fp32 scale a row and come out as bf16, so the model that is put
together is not the one that was packed. It is the one that the expected tokens come from, which travel along: what a CPU answers
with it in fp32.
"""

from __future__ import annotations

import json
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kernels.quantize import FP8, Fp8Weight, dequantize, quantize

MAX_PART_BYTES = 58_000_000
SCALE = ".scale"  # behind the name of a matrix
WEIGHTS, EXPECTED, CONFIG = "fp8.safetensors", "expected.json", "config.json"
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "The three primary colours are red,",
    "A poem about the moon:\n\n",
    "Question: Why is the sky blue?\nAnswer:",
    "1, 2, 3, 4, 5, 6,",
)
NUM_TOKENS = 64


def pack(model: Path, folder: Path, prompts: Sequence[str] = PROMPTS, part_bytes: int = MAX_PART_BYTES) -> list[Path]:
    """Write `model` into parts of at most `part_bytes` in `folder`, which is made, or emptied of older parts. Returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source, rebuilt, archive = Path(scratch) / "packed", Path(scratch) / "rebuilt", Path(scratch) / "all.tar.gz"
        source.mkdir()
        for path in model.iterdir():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy(path, source)
        save_file(compact(model), source / WEIGHTS)
        rebuild(source, rebuilt)
        (source / EXPECTED).write_text(json.dumps(expected_tokens(rebuilt, prompts)), encoding="utf-8")
        with tarfile.open(archive, "w:gz") as tar:
            for path in sorted(source.iterdir(), key=lambda path: path.stat().st_size):
                tar.add(path, path.name)
        data = archive.read_bytes()
    chunks = [data[first : first + part_bytes] for first in range(0, len(data), part_bytes)]
    parts = [folder / f"part-{number}-of-{len(chunks)}" for number in range(1, len(chunks) + 1)]
    for path, chunk in zip(parts, chunks):
        path.write_bytes(chunk)
    return parts


def unpack(folder: Path, model: Path) -> None:
    """Make the model folder `model`, which must not exist, from the parts in `folder`. *Raises* `click.UsageError` naming what is
    missing."""
    parts = list(folder.glob("part-*"))
    count = max((int(part.name.split("-")[3]) for part in parts), default=0)
    wanted = [folder / f"part-{number}-of-{count}" for number in range(1, count + 1)]
    missing = [path.name for path in wanted if path not in parts]
    if missing or not parts or len(parts) > count:
        raise click.UsageError(f"the parts in {folder} are not one model: {', '.join(missing) or f'{len(parts)} of {count}'}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive, source = Path(scratch) / "all.tar.gz", Path(scratch) / "packed"
        with archive.open("wb") as file:
            for path in wanted:
                file.write(path.read_bytes())
        with tarfile.open(archive) as tar:
            tar.extractall(source, filter="data")
        rebuild(source, model)


def compact(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of `model`: matrices as e4m3 with their scales, the others in bf16."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                tensor = file.get_tensor(name)
                if tensor.dim() == 2:
                    matrix = quantize(tensor, num_scales=1)  # quick; which model it becomes does not matter
                    found[name], found[name + SCALE] = matrix.data, matrix.scale
                else:
                    found[name] = tensor.to(torch.bfloat16)
    return found


def rebuild(source: Path, model: Path) -> None:
    """Make the Hugging Face folder `model` from what was packed."""
    model.mkdir(parents=True)
    for path in source.iterdir():
        if path.name != WEIGHTS:
            shutil.copy(path, model)
    tensors = load_file(source / WEIGHTS)
    plain = {
        name: dequantize(Fp8Weight(tensor, tensors[name + SCALE]), torch.bfloat16) if tensor.dtype == FP8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith(SCALE)
    }
    save_file(plain, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / CONFIG).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    (model / CONFIG).write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2), encoding="utf-8")


def expected_tokens(model: Path, prompts: Sequence[str]) -> dict[str, list]:
    """`prompts` as token ids, and the `answers` of eager steps on this machine's CPU in fp32: greedy, `NUM_TOKENS` each."""
    from engine.text import Text
    from tests.cpu.engine_harness import answer, request

    text = Text.load(model)
    ids = [text.encode(prompt) for prompt in prompts]
    requests = [request(prompt, row, max_tokens=NUM_TOKENS) for row, prompt in enumerate(ids)]
    run = answer(model, requests, text=text, dtype="float32", device="cpu", kv_memory_bytes=1 << 28, threads=None)
    return {"prompts": ids, "answers": run.token_ids}


@click.group()
def main() -> None:
    """Carry a model to a machine without network."""


@main.command("pack")
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("folder", type=click.Path(path_type=Path))
def pack_command(model: Path, folder: Path) -> None:
    """Write MODEL into parts in FOLDER."""
    for path in pack(model, folder):
        click.echo(f"{path}  {path.stat().st_size} bytes")


@main.command("unpack")
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("model", type=click.Path(path_type=Path))
def unpack_command(folder: Path, model: Path) -> None:
    """Make the folder MODEL from the parts in FOLDER."""
    unpack(folder, model)
    click.echo(f"{model}  {sum(path.stat().st_size for path in model.iterdir())} bytes")


if __name__ == "__main__":
    main()
