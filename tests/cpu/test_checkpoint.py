"""Model folders that are broken, odd or merely untidy. Cases 16, 17, 19, 20, 35 and their kin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import engine.checkpoint
from engine.checkpoint import Checkpoint
from engine.config import load_config
from engine.shard_plan import ShardPlan
from engine.weights import load_weights
from launch.errors import ModelError
from tests.cpu.tiny import edit_config, make_model, save_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    untied, tied = make_model("qwen2"), make_model("qwen2", tie_word_embeddings=True)
    return {
        "single": save_model(untied, base / "single"),
        "sharded": save_model(untied, base / "sharded", max_shard_size="100KB"),
        "tied": save_model(tied, base / "tied"),
    }


@pytest.fixture
def folder_of(originals, tmp_path):
    def copy(name: str) -> Path:
        shutil.copytree(originals[name], tmp_path / name)
        return tmp_path / name

    return copy


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint.open(folder, load_config(folder))


def load(folder: Path):
    checkpoint = open_checkpoint(folder)
    plan = ShardPlan.make(checkpoint.config, 1, 0)
    return checkpoint, load_weights(checkpoint, plan, torch.float32, torch.device("cpu"))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        open_checkpoint(folder)
    return str(error.value)


def rewrite(path: Path, **changes) -> None:
    """Replace (or with None remove) tensors of a safetensors file; `__` in a name stands for a dot."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_single_and_sharded_hold_the_same(originals):
    for name in ("single", "sharded"):
        checkpoint, weights = load(originals[name])
        assert checkpoint.notes == [] and checkpoint.warnings == []
        expected = load_file(originals["single"] / "model.safetensors")
        assert torch.equal(weights.layers[1].down, expected["model.layers.1.mlp.down_proj.weight"])
    assert len(shards(originals["sharded"])) > 2
    assert open_checkpoint(originals["single"]).fingerprint != open_checkpoint(originals["tied"]).fingerprint


def test_untied_without_a_head_is_refused(folder_of):
    """Case 16."""
    folder = folder_of("tied")
    edit_config(folder, tie_word_embeddings=False)
    assert "lm_head.weight" in (message := refusal(folder)) and "not tied" in message


@pytest.mark.parametrize("is_equal", [True, False])
def test_tied_with_a_head_follows_the_config(folder_of, is_equal):
    """Case 17: the embedding is used either way; a different head is worth one warning, from rank 0."""
    folder = folder_of("tied")
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone()
    head[-1, -1] += 0 if is_equal else 1
    rewrite(folder / "model.safetensors", lm_head__weight=head)
    checkpoint, weights = load(folder)
    assert torch.equal(weights.head, embedding) and weights.head is weights.embedding
    assert len(checkpoint.warnings) == (0 if is_equal else 1)
    assert any("lm_head.weight" in note for note in checkpoint.notes)
    other = open_checkpoint(folder)
    load_weights(other, ShardPlan.make(other.config, 2, 1), torch.float32, torch.device("cpu"))
    assert other.warnings == []


def test_every_missing_shard_is_listed(folder_of):
    """Case 19."""
    folder = folder_of("sharded")
    gone = shards(folder)[1:3]
    for path in gone:
        path.unlink()
    assert all(path.name in refusal(folder) for path in gone)


@pytest.mark.parametrize("name", ["model.safetensors", "consolidated.00.safetensors", "adapter_model.safetensors"])
def test_stray_files_are_ignored_with_a_note(folder_of, name):
    """Case 20: an old file with the same tensor names but other values, and not even a valid file, changes nothing."""
    folder = folder_of("sharded")
    expected = load(folder)[1].layers[0].qkv
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.full((128, 64), 9.0)}, folder / name)
    checkpoint, weights = load(folder)
    assert torch.equal(weights.layers[0].qkv, expected)
    assert len(checkpoint.notes) == 1 and name in checkpoint.notes[0]
    (folder / name).write_bytes(b"garbage")
    assert torch.equal(load(folder)[1].layers[0].qkv, expected)


def test_tensors_the_index_does_not_name_are_ignored(folder_of):
    """A tensor duplicated in a second shard with other values: the index says which one counts."""
    folder = folder_of("sharded")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = "model.layers.0.mlp.up_proj.weight"
    other = next(path for path in shards(folder) if path.name != index[name])
    expected = load(folder)[1].layers[0].gate_up
    rewrite(other, **{name.replace(".", "__"): torch.zeros(100, 64)})
    checkpoint, weights = load(folder)
    assert torch.equal(weights.layers[0].gate_up, expected)
    assert name in checkpoint.notes[0] and other.name in checkpoint.notes[0]


def test_tensor_named_by_the_index_but_absent_from_its_file(folder_of):
    folder = folder_of("sharded")
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    name = "model.norm.weight"
    rewrite(folder / index[name], **{name.replace(".", "__"): None})
    assert name in (message := refusal(folder)) and index[name] in message


def test_missing_unexpected_and_misshapen_tensors_are_named(folder_of):
    path = folder_of("single") / "model.safetensors"
    rewrite(path, model__layers__1__self_attn__q_proj__bias=None)
    assert "model.layers.1.self_attn.q_proj.bias" in refusal(path.parent)
    rewrite(path, model__layers__1__self_attn__q_proj__bias=torch.zeros(64))
    assert "[64]" in (message := refusal(path.parent)) and "[128]" in message and "q_proj.bias" in message
    rewrite(path, model__layers__1__self_attn__q_proj__bias=torch.zeros(128), model__layers__0__extra=torch.ones(1))
    assert "model.layers.0.extra" in refusal(path.parent)
    rewrite(path, model__layers__0__extra=None, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert "I8" in (message := refusal(path.parent)) and "model.norm.weight" in message


def test_more_layers_on_disk_than_in_the_config(folder_of):
    folder = folder_of("single")
    edit_config(folder, num_hidden_layers=1, layer_types=None)
    assert "model.layers.1." in refusal(folder)


def test_head_dim_is_checked_against_the_tensors(folder_of):
    """Case 35: an explicit head_dim is used; one that does not fit the tensors is named, with both shapes."""
    folder = folder_of("single")
    load(folder)
    edit_config(folder, head_dim=32)
    assert "q_proj" in (message := refusal(folder)) and "[256, 64]" in message
    edit_config(folder, head_dim=None)
    assert "q_proj" in refusal(folder)


def test_known_leftovers_are_ignored(folder_of):
    folder = folder_of("single")
    rewrite(folder / "model.safetensors", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    assert "inv_freq" in open_checkpoint(folder).notes[0]


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated_files(folder_of, keep):
    path = folder_of("single") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "truncated" in (message := refusal(path.parent)) and "model.safetensors" in message


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{}x",
        (9).to_bytes(8, "little") + b'{"a": 1} ',
        (4).to_bytes(8, "little") + b"\xff\xff\xff\xff",
    ],
)
def test_corrupt_files(folder_of, content):
    path = folder_of("single") / "model.safetensors"
    path.write_bytes(content)
    assert "model.safetensors" in refusal(path.parent)


@pytest.mark.parametrize("offsets", [[4, 8], [0, 6], [-4, 0], [0, 4, 8], "04", [0, 2.5]])
def test_headers_that_contradict_themselves(folder_of, offsets):
    path = folder_of("single") / "model.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert "corrupt" in refusal(path.parent)


def test_git_lfs_pointer(folder_of):
    path = folder_of("single") / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in refusal(path.parent)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "a/b.safetensors", "a\\b", "", 3, None])
def test_index_with_unsafe_paths(folder_of, name):
    folder = folder_of("sharded")
    data = json.loads((folder / INDEX).read_text())
    data["weight_map"]["model.norm.weight"] = name
    (folder / INDEX).write_text(json.dumps(data))
    assert "plain names" in refusal(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "version https://git-lfs"]
)
def test_index_that_is_not_one(folder_of, text):
    folder = folder_of("sharded")
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


@pytest.mark.parametrize(
    "names, word",
    [
        ([], "no weights"),
        (["pytorch_model.bin"], ".bin"),
        (["model-q4.gguf"], "GGUF"),
        (["adapter_model.safetensors"], "adapter"),
        (["model-00001-of-00002.safetensors"], "missing index"),
    ],
)
def test_folders_without_loadable_weights(folder_of, names, word):
    folder = folder_of("single")
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).touch()
    assert word in refusal(folder)


def test_symlinked_files_load(folder_of):
    """The layout of the Hugging Face cache: files are links into a blob folder."""
    folder = folder_of("single")
    (folder / "model.safetensors").rename(folder.parent / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    load(folder)


def test_no_weight_is_read_before_the_check(folder_of, monkeypatch):
    folder = folder_of("single")
    rewrite(folder / "model.safetensors", model__norm__weight=None)
    monkeypatch.setattr("engine.checkpoint.safe_open", lambda *a, **k: pytest.fail("weights were opened"))
    assert "model.norm.weight" in refusal(folder)


@pytest.mark.parametrize("axis, pieces", [(0, [(0, 3, 7), (8, 20, 2)]), (1, [(0, 3, 7), (8, 20, 2)])])
@pytest.mark.parametrize("block_bytes", [1, 300, 1 << 20])
def test_pieces_arrive_in_blocks(tmp_path, monkeypatch, axis, pieces, block_bytes):
    """However small the blocks, the same slices; no block is larger than it may be, but for a single row."""
    folder = save_model(make_model(), tmp_path)
    name = "model.layers.0.mlp.gate_proj.weight"
    full = load_file(folder / "model.safetensors")[name]
    monkeypatch.setattr(engine.checkpoint, "BLOCK_BYTES", block_bytes)
    wanted = torch.full((11, full.shape[1]) if axis == 0 else (full.shape[0], 11), float("nan"))
    for start, begin, length in pieces:
        wanted.narrow(axis, start, length).copy_(full.narrow(axis, begin, length))
    found, blocks = torch.full_like(wanted, float("nan")), []

    def put(out: torch.Tensor, block: torch.Tensor) -> None:
        blocks.append(block.shape)
        out.copy_(block)

    Checkpoint.open(folder, load_config(folder)).read_pieces(name, axis, pieces, found, put)
    torch.testing.assert_close(found, wanted, atol=0, rtol=0, equal_nan=True)
    assert all(rows == 1 or 4 * rows * columns <= block_bytes for rows, columns in blocks)
    assert len(blocks) == 2 if block_bytes > 300 else len(blocks) > 4
