"""A folder of safetensors files: what is in it, whether it fits the model, and slices of its tensors.

`Checkpoint.open` reads headers only. Everything that can be wrong with the folder is found there and named,
before a single weight is read: nothing is loaded that the index does not name, nothing stays uninitialised,
nothing is guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open

from engine.config import ModelConfig
from engine.families import LAYER_TENSORS, MODEL_TENSORS, TensorRule
from engine.safetensors_header import TensorInfo, read_header
from engine.weight_index import find_weight_files
from launch.errors import ModelError

FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LEFTOVER_SUFFIXES = ("rotary_emb.inv_freq",)  # buffers old exporters wrote; computed from the config here
SAMPLE_BYTES = 1024  # from the middle of a tensor: training changes every value of what it changes
BLOCK_BYTES = 32 << 20  # read at a time: what a rank holds in host memory beside its shard
COMPARE_ROWS = 2048  # rows of the head compared at a time: a few tens of MB for the widest tied model


Put = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass
class Checkpoint:
    """The tensors of one model folder, by name. Open with `Checkpoint.open`.

    `notes`: harmless remarks (ignored files and leftovers). `warnings`: remarks the user should see once, from
    rank 0.
    """

    folder: Path
    config: ModelConfig
    tensors: dict[str, TensorInfo]
    is_head_ignored: bool = False
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, folder: Path, config: ModelConfig) -> Checkpoint:
        """Read the index and all headers of `folder` and check them against `config`.

        *Raises* `ModelError` naming missing files, broken files, and missing, unexpected or misshapen tensors.
        """
        files, index, notes = find_weight_files(folder)
        headers = {name: read_header(folder / name) for name in files}
        tensors, strays = _select(headers, index, folder)
        checkpoint = cls(folder, config, tensors, notes=notes + strays)
        checkpoint._drop_leftovers()
        checkpoint._check()
        return checkpoint

    @property
    def fingerprint(self) -> str:
        """16 hex digits over names, dtypes, shapes and places of all tensors, and over a sample of each one's values.

        Without the values, two fine-tunings of one model would be the same. *Cost*: one small read a tensor.
        *Raises* `ModelError` when a file cannot be read.
        """
        digest = hashlib.sha256()
        for name, info in sorted(self.tensors.items()):
            digest.update(f"{name} {info.path.name} {info.dtype} {info.shape} {info.begin}\n".encode())
            digest.update(_sample(info))
        return digest.hexdigest()[:16]

    def read_pieces(
        self, name: str, axis: int, pieces: Sequence[tuple[int, int, int]], out: torch.Tensor, put: Put = torch.Tensor.copy_
    ) -> None:
        """Copy slices of tensor `name` along `axis` (0 or 1) into `out`, converting dtype and moving to its device.

        `pieces`: `(start in out, start in the tensor, length)` along `axis`; the other dimension is taken whole.
        `put(part of out, block)`: how a block in host memory gets there. *Cost*: touches only the pages of the file that hold the
        slices, in blocks of `BLOCK_BYTES`, and lets go of them before it returns.
        """
        info = self.tensors[name]
        try:
            with safe_open(info.path, framework="pt") as file:
                source = file.get_slice(name)
                for start, begin, length in pieces:
                    target = out.narrow(axis, start, length)
                    for rows in _row_blocks(target):
                        if axis == 0:
                            block = source[begin + rows.start : begin + rows.stop]
                        else:
                            block = source[rows, begin : begin + length]
                        put(target[rows], block)
        except Exception as error:  # safetensors raises its own type, and OSError when the file vanished
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(f"{info.path}: the tensor {name!r} cannot be read: {error}") from error

    def check_ignored_head(self) -> None:
        """In a tied model that holds a head of its own, add a warning if that head differs from the embedding.

        Call on one rank. *Cost*: reads both matrices, up to the first difference.
        """
        if not self.is_head_ignored:
            return
        head, embedding = self.tensors[HEAD], self.tensors[EMBEDDING]
        is_equal = head.shape == embedding.shape and all(
            torch.equal(*pair) for pair in zip(self._row_blocks(HEAD), self._row_blocks(EMBEDDING))
        )
        if not is_equal:
            self.warnings.append(
                f"the checkpoint holds a {HEAD} that differs from the embedding, but config.json ties the two; "
                "the embedding is used"
            )

    def _row_blocks(self, name: str) -> Iterable[torch.Tensor]:
        rows, columns = self.tensors[name].shape
        for begin in range(0, rows, COMPARE_ROWS):
            length = min(COMPARE_ROWS, rows - begin)
            block = torch.empty(length, columns)
            self.read_pieces(name, 0, [(0, begin, length)], block)
            yield block

    def _drop_leftovers(self) -> None:
        for name in [name for name in self.tensors if name.endswith(LEFTOVER_SUFFIXES)]:
            del self.tensors[name]
            self.notes.append(f"the leftover tensor {name} is ignored")
        if self.config.is_tied and HEAD in self.tensors:
            self.is_head_ignored = True
            self.notes.append(f"the tensor {HEAD} is ignored, because config.json says it is tied to the embedding")

    def _check(self) -> None:
        expected = expected_shapes(self.config)
        missing = [name for name in expected if name not in self.tensors]
        if missing:
            hint = " (config.json says the head is not tied to the embedding)" if HEAD in missing else ""
            raise ModelError(f"{self.folder}: the checkpoint lacks {_listed(missing)}{hint}")
        known = set(expected) | ({HEAD} if self.is_head_ignored else set())
        unexpected = [name for name in self.tensors if name not in known]
        if unexpected:
            raise ModelError(
                f"{self.folder}: the checkpoint holds tensors that a {self.config.family} model of this config.json "
                f"does not have: {_listed(unexpected)}"
            )
        for name, info in self.tensors.items():
            if info.dtype not in FLOAT_DTYPES:
                raise ModelError(
                    f"{info.path}: the tensor {name} has the dtype {info.dtype}; supported are "
                    f"{', '.join(FLOAT_DTYPES)}, so quantised weights must be exported unquantised"
                )
        for name, shape in expected.items():
            info = self.tensors[name]
            if info.shape != shape:
                raise ModelError(
                    f"{info.path}: the tensor {name} has the shape {list(info.shape)}, but config.json asks for "
                    f"{list(shape)}"
                )


def _row_blocks(target: torch.Tensor) -> Iterator[slice]:
    """Rows of `target` in runs of at most `BLOCK_BYTES`, if its elements had the 4 bytes of fp32; at least one a run."""
    row_bytes = 4 * target[0].numel() if target.shape[0] else 1
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, target.shape[0], step):
        yield slice(first, min(first + step, target.shape[0]))


def _sample(info: TensorInfo) -> bytes:
    try:
        with info.path.open("rb") as file:
            file.seek(max(info.begin, (info.begin + info.end - SAMPLE_BYTES) // 2))
            return file.read(min(SAMPLE_BYTES, info.end - info.begin))
    except OSError as error:
        raise ModelError(f"{info.path} cannot be read: {error.strerror or error}") from None


def full_sizes(config: ModelConfig) -> dict[str, int]:
    """Full extent of each dimension name of `engine/families.py`."""
    return {
        "hidden": config.hidden_size,
        "q": config.full_heads * config.head_dim,
        "kv": config.full_kv_heads * config.head_dim,
        "head_dim": config.head_dim,
        "mlp": config.intermediate_size,
        "vocab": config.full_vocab,
    }


def model_rules(config: ModelConfig) -> tuple[list[TensorRule], list[TensorRule]]:
    """The rules of one layer and those outside the layers, as far as they apply to `config`."""

    def applicable(rules: Sequence[TensorRule]) -> list[TensorRule]:
        return [rule for rule in rules if rule.flag is None or getattr(config, rule.flag)]

    return applicable(LAYER_TENSORS), applicable(MODEL_TENSORS)


def layer_tensor_name(layer: int, rule: TensorRule) -> str:
    return f"model.layers.{layer}.{rule.source}"


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` must hold."""
    sizes = full_sizes(config)
    layer_rules, model_rules_ = model_rules(config)
    shapes = {rule.source: tuple(sizes[dim] for dim in rule.dims) for rule in model_rules_}
    for layer in range(config.num_layers):
        for rule in layer_rules:
            shapes[layer_tensor_name(layer, rule)] = tuple(sizes[dim] for dim in rule.dims)
    return shapes


def _select(
    headers: dict[str, dict[str, TensorInfo]], index: dict[str, str] | None, folder: Path
) -> tuple[dict[str, TensorInfo], list[str]]:
    """The tensors to use (exactly those of the index where there is one), and notes on the others."""
    if index is None:
        (header,) = headers.values()
        return dict(header), []
    absent = [name for name, file in index.items() if name not in headers[file]]
    if absent:
        places = [f"{name} (should be in {index[name]})" for name in absent]
        raise ModelError(f"{folder}: the index names tensors that their files do not hold: {_listed(places)}")
    strays = [f"{n} in {file}" for file, header in headers.items() for n in header if index.get(n) != file]
    notes = [f"tensors that the index does not name are ignored: {_listed(strays)}"] if strays else []
    return {name: headers[file][name] for name, file in index.items()}, notes


def _listed(names: Sequence[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
