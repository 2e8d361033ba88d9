"""Which files of a model folder hold its weights: the ones the index names, or the one `model.safetensors`."""

from __future__ import annotations

from pathlib import Path

from engine.config import read_json
from engine.config_fields import shown
from launch.errors import ModelError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = {
    "*.gguf": "GGUF files",
    "pytorch_model*.bin": "pickled .bin files",
    "*.bin": "pickled .bin files",
    "*.pth": "pickled .pth files",
    "*.h5": "TensorFlow files",
}


def find_weight_files(folder: Path) -> tuple[list[str], dict[str, str] | None, list[str]]:
    """File names to read, the index's map of tensor to file name (None without an index), and notes on ignored files.

    An index wins over a `model.safetensors` beside it, which is then an old leftover. *Raises* `ModelError`.
    """
    if (folder / INDEX).exists():
        index = _read_index(folder / INDEX)
        files = sorted(set(index.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{folder}: the index names files that are not there: {', '.join(missing)}; fetch them")
    elif (folder / SINGLE).is_file():
        index, files = None, [SINGLE]
    else:
        raise ModelError(_nothing_to_load(folder))
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in files)
    notes = [f"the file {name} is ignored, because it does not belong to the model's weights" for name in others]
    return files, index, notes


def _read_index(path: Path) -> dict[str, str]:
    data = read_json(path)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path} has no 'weight_map' that maps tensor names to file names")
    for name in weight_map.values():
        if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
            raise ModelError(f"{path} names the file {shown(name)}; only plain names in the same folder are allowed")
    return weight_map


def _nothing_to_load(folder: Path) -> str:
    """The sentence for a folder without loadable weights, by what it holds instead."""
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if any(name.startswith("adapter_model") for name in found):
        return f"{folder} holds an adapter (adapter_model.safetensors), not a model; merge it into its base model first"
    if found:
        return f"{folder} has neither {SINGLE} nor {INDEX}, only {', '.join(found[:4])}; fetch the missing index"
    for pattern, name in OTHER_FORMATS.items():
        if any(folder.glob(pattern)):
            return f"{folder} holds its weights as {name}; only safetensors are loaded, so convert them first"
    return f"{folder} holds no weights: neither {SINGLE} nor {INDEX} is there"
