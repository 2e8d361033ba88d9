"""`config.json` in every spelling it comes in, and by name what cannot be used. Cases 22, 26, 35, 106."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from engine.config import ModelConfig, load_config, parse_config
from engine.rope import inverse_frequencies
from engine.shapes import SHAPES, named_config
from launch.errors import ModelError
from tests.cpu.tiny import LLAMA3, YARN, make_model

BASE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def parse(remove: tuple[str, ...] = (), **changes) -> ModelConfig:
    data = {**BASE, **changes}
    return parse_config({key: value for key, value in data.items() if key not in remove}, "config.json")


def refusal(remove: tuple[str, ...] = (), **changes) -> str:
    with pytest.raises(ModelError) as error:
        parse(remove, **changes)
    assert "config.json" in str(error.value)
    return str(error.value)


def test_plain_config():
    config = parse(eos_token_id=[3, 2, 3], bos_token_id=1, torch_dtype="bfloat16")
    assert (config.family, config.full_heads, config.full_kv_heads, config.head_dim) == ("qwen2", 8, 2, 8)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert (config.eos_token_ids, config.bos_token_id, config.torch_dtype) == ((3, 2), 1, "bfloat16")
    assert config.windows == (None,) * 4 and config.max_positions == 512


def test_spellings_of_rope_theta_agree():
    """Case 22: top level, inside `rope_parameters`, and both with a null top level."""
    nested = {"rope_type": "default", "rope_theta": 1e6}
    spellings = [
        parse(),
        parse(("rope_theta",), rope_parameters=nested),
        parse(rope_theta=None, rope_parameters=nested),
        parse(rope_parameters=nested),
    ]
    assert len({config.rope for config in spellings}) == 1
    assert len({config.fingerprint for config in spellings}) == 1


def test_missing_rope_theta_is_refused_where_no_default_is_implied():
    assert "'rope_theta'" in refusal(("rope_theta",))
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    config = parse(("rope_theta",), **llama)
    assert config.rope.theta == 10000.0  # Llama 1 and 2 leave it out
    assert any("rope_theta" in note for note in config.notes) and not parse((), **llama).notes


def test_rope_thetas_that_disagree_are_refused():
    assert "twice" in refusal(rope_parameters={"rope_type": "default", "rope_theta": 1e4})


@pytest.mark.parametrize("kind_key", ["type", "rope_type"])
@pytest.mark.parametrize("block_key", ["rope_scaling", "rope_parameters"])
def test_spellings_of_yarn_agree(kind_key, block_key):
    block = {kind_key: "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert parse(**{block_key: block}).rope == parse(rope_scaling={**block, "type": "yarn"}).rope


@pytest.mark.parametrize("maximum", [128, 512])
def test_yarn_stretches_the_original_length(maximum):
    """Case 26: the same model whether or not `max_position_embeddings` was raised along with the rope."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = parse(rope_scaling=yarn, max_position_embeddings=maximum)
    assert config.max_positions == 512
    assert config.rope.original_max_positions == 128


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "yarn": YARN,
    "yarn-32k": {**YARN, "original_max_position_embeddings": 32768},
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 1.7},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4},
    "yarn-no-truncate": {**YARN, "truncate": False, "original_max_position_embeddings": 4096},
    "yarn-no-original": {key: YARN[key] for key in ("rope_type", "factor", "rope_theta")},
    "llama3": LLAMA3,
    "llama3-8k": {**LLAMA3, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("maximum", [256, 131072])
def test_frequencies_equal_transformers(name, head_dim, maximum):
    model = make_model("qwen3", head_dim=head_dim, rope_parameters=ROPES[name], max_position_embeddings=maximum)
    config = parse_config({**model.config.to_dict(), "architectures": ["Qwen3ForCausalLM"]}, "config.json")
    rotary = model.model.rotary_emb
    found = inverse_frequencies(config.rope, head_dim)
    torch.testing.assert_close(found, rotary.inv_freq, rtol=1e-6, atol=1e-9)
    assert config.rope.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


def test_llama3_wavelength_borders():
    """Fast dimensions untouched, slow ones divided by the factor: the two facts that hold without transformers."""
    block = {**LLAMA3, "original_max_position_embeddings": 8192}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": 128}
    scaled = parse(("rope_theta",), rope_scaling=block, **llama)
    plain = parse(("rope_theta",), rope_parameters={"rope_theta": 5e5}, **llama)
    ratio = inverse_frequencies(plain.rope, 128) / inverse_frequencies(scaled.rope, 128)
    assert ratio[0] == 1.0 and ratio[-1] == 8.0


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "mrope", "proportional"])
def test_other_rope_kinds_are_refused_by_name(kind):
    message = refusal(rope_scaling={"type": kind, "factor": 2.0})
    assert repr(kind) in message and "yarn" in message


def test_rope_blocks_that_cannot_be_honoured_are_refused():
    assert "disagree" in refusal(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=YARN)
    assert "layer type" in refusal(rope_parameters={"full_attention": {"rope_theta": 1e4}})
    assert "partial_rotary_factor" in refusal(partial_rotary_factor=0.5)
    assert "'factor'" in refusal(rope_scaling={"type": "linear"})
    assert "'factor'" in refusal(rope_scaling={"type": "yarn", "factor": float("nan")})
    assert "high_freq_factor" in refusal(("rope_theta",), rope_scaling={**LLAMA3, "high_freq_factor": 1.0})


@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "rope_scaling", "sliding_window", "eos_token_id"])
def test_null_means_absent(key):
    """Case 35."""
    assert parse(**{key: None}) == parse((key,))


def test_head_dim_and_kv_heads_defaults():
    assert parse(head_dim=None).head_dim == 8
    assert parse(head_dim=32).head_dim == 32
    assert parse(("num_key_value_heads",)).full_kv_heads == 8
    assert "even" in refusal(head_dim=7)
    assert "'head_dim'" in refusal(hidden_size=60, num_attention_heads=8)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
    ],
)
@pytest.mark.parametrize("bad", [None, 0, -4, "8", 1.5, True, 10**30, float("nan"), [8], {}])
def test_required_sizes(key, bad):
    if key == "rms_norm_eps" and bad == 0:
        assert parse(rms_norm_eps=0).rms_norm_eps == 0.0
        return
    assert repr(key) in refusal(**{key: bad})


def test_numbers_too_long_to_print_are_refused():
    assert "'vocab_size'" in refusal(vocab_size=10**6000)  # past the digit limit of Python's own repr


@pytest.mark.parametrize("name", ["Qwen2MoeForCausalLM", "MistralForCausalLM", "Qwen2ForSequenceClassification"])
def test_other_architectures_are_refused(name):
    message = refusal(architectures=[name])
    assert name in message and "Qwen2ForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM" in message


def test_architecture_sources():
    assert parse(("architectures",)).family == "qwen2"
    assert parse(("model_type",)).family == "qwen2"
    assert "'mistral'" in refusal(("architectures",), model_type="mistral")
    assert "disagree" in refusal(model_type="llama")
    assert "neither" in refusal(("architectures", "model_type"))


def test_refusals_by_name():
    assert "'gptq'" in refusal(quantization_config={"quant_method": "gptq"})
    assert "'gelu'" in refusal(hidden_act="gelu")
    assert "'num_key_value_heads' (3)" in refusal(num_key_value_heads=3)
    assert "'int8'" in refusal(torch_dtype="int8")
    assert "'eos_token_id'" in refusal(eos_token_id="</s>")


def test_dtype_spellings_and_token_notes():
    assert parse(dtype="torch.bfloat16").torch_dtype == parse(torch_dtype="bfloat16").torch_dtype == "bfloat16"
    config = parse(eos_token_id=[151645, 2])
    assert config.eos_token_ids == (2,) and "151645" in config.notes[0]
    assert config.fingerprint == parse(eos_token_id=2).fingerprint != parse(eos_token_id=3).fingerprint


@pytest.mark.parametrize("first", [0, 1, 4])
@pytest.mark.parametrize("is_used", [False, True])
def test_windows_follow_transformers(is_used, first):
    """Case 106."""
    options = {"use_sliding_window": is_used, "sliding_window": 16, "max_window_layers": first}
    theirs = Qwen2Config(**{**BASE, **options})
    expected = tuple(16 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert parse(**options).windows == expected
    assert parse(**options, layer_types=theirs.layer_types).windows == expected
    assert parse(**options).sliding_window == (16 if is_used and first < 4 else None)


def test_window_keys_that_contradict_are_refused():
    types = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert "sliding" in refusal(layer_types=types)
    assert "4 entries" in refusal(layer_types=types[:2])
    assert "'chunked_attention'" in refusal(layer_types=["chunked_attention"] * 4)
    assert "'max_window_layers'" in refusal(use_sliding_window=True, sliding_window=16)
    assert "'llama'" in refusal(architectures=["LlamaForCausalLM"], model_type="llama", sliding_window=16)


@pytest.mark.parametrize(
    "text", ["[]", "3", "null", '"x"', "", "{", "\x00", '{"a":' * 20000, "1" * 5000, '{"hidden_size": NaN}']
)
def test_files_that_are_not_a_config(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match="config.json"):
        load_config(tmp_path)


def test_folders_that_are_not_a_model(tmp_path):
    with pytest.raises(ModelError, match="not a folder"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="GGUF"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes("{}".encode("utf-16"))
    with pytest.raises(ModelError, match="not valid JSON"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(BASE).encode())
    assert load_config(tmp_path) == parse()


@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes_have_the_size_in_their_name(name):
    billions = float(name.removeprefix("qwen2.5-").removesuffix("b"))
    assert named_config(name).num_parameters / 1e9 == pytest.approx(billions, rel=0.09)


def test_num_parameters_is_exact():
    for family in ("qwen2", "qwen3", "llama"):
        model = make_model(family)
        data = {**model.config.to_dict(), "architectures": [type(model).__name__]}
        assert parse_config(data, "config.json").num_parameters == sum(p.numel() for p in model.parameters())
    with pytest.raises(ModelError, match="qwen2.5-72b"):
        named_config("qwen2.5-9b")


def test_config_written_by_transformers_parses(tmp_path):
    model = AutoModelForCausalLM.from_config(Qwen2Config(**BASE))
    model.save_pretrained(tmp_path)
    assert load_config(tmp_path).rope == parse().rope
