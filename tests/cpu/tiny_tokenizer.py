"""A small byte-level BPE tokenizer in the manner of Qwen2.5's, made on the spot in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LINES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "One two three four five six seven eight nine ten; the user said: count to ten, please.",
    "A tensor-parallel engine splits every matrix over the ranks and adds the parts with an all-reduce.",
    "What is the capital of France? The capital of France is Paris. What is your name? My name is Ada.",
    "def answer(question):\n    return 'forty-two' if question else None\n\n\nprint(answer('why'))...",
    "Straße, déjà vu, 你好，世界！ 今天天气很好。 Привет, мир. こんにちは 🙂🙃 👩‍🔬",
    "system user assistant message content role prompt token stream stop string end of text",
)


def build_tiny_tokenizer(folder: str | Path, vocab_size: int = 512) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder` (made if missing).

    `vocab_size`: tokens in all, at least 259 (256 bytes and 3 specials) and at most 590; the specials come last, as
    in Qwen2.5: `<|endoftext|>` is `vocab_size - 3`, `<|im_start|>` `vocab_size - 2`, `<|im_end|>` (EOS) `vocab_size -
    1`.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_LINES, trainer)
    tokenizer.add_special_tokens(list(SPECIALS))
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the training text gives {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder
