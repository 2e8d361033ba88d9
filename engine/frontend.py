"""The text side of a model, on rank 0: tokenizer, sampling defaults, stop ids. Shared by the command and the Python API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.byte_text import ByteText
from engine.drafts.loading import check_same_tokens
from engine.generation_defaults import GenerationDefaults, load_generation_defaults
from engine.loading import Blueprint
from engine.options import parse_options
from engine.prepare import RowPreparer
from engine.refused import Refused
from engine.sampling_params import SamplingParams
from engine.text import Text
from launch.errors import UsageError


@dataclass(frozen=True)
class Frontend:
    """`eos_ids`: ids that end any row. `num_ids`: ids that model and tokenizer both have; later ones are never chosen."""

    text: Text | ByteText
    defaults: GenerationDefaults
    eos_ids: frozenset[int]
    num_ids: int

    @classmethod
    def load(cls, blueprint: Blueprint, options: Mapping[str, object], use_generation_config: bool = True) -> Frontend:
        """`options`: sampling options that come over the model's own, under the names of a row.

        *Raises* `UsageError` for a wrong option, `ModelError` for a broken tokenizer or generation_config.json, or for a
        draft model with another tokenizer.
        """
        folder = Path(blueprint.settings.model)
        config = blueprint.config
        text = Text.load(folder) if folder.is_dir() else ByteText(config.full_vocab)
        check_same_tokens(blueprint, text)
        try:
            checked = parse_options(options, SamplingParams())
        except Refused as error:
            raise UsageError(error.message) from None
        given = {name: getattr(checked, name) for name in options}
        defaults = load_generation_defaults(folder, given, use_generation_config)
        eos_ids = frozenset(text.eos_ids(config.eos_token_ids, defaults.eos_token_ids))
        return cls(text, defaults, eos_ids, min(config.full_vocab, text.vocab_size))

    def preparer(self, max_tokens_total: int, run_seed: int, is_chat: bool) -> RowPreparer:
        return RowPreparer(self.text, self.eos_ids, self.num_ids, max_tokens_total, run_seed, is_chat)

    def stop_names(self) -> list[str]:
        """The ids that end a row with their texts, for people."""
        token_bytes = self.text.token_bytes
        return [f"{token_id} {token_bytes[token_id].decode('utf-8', 'replace')!r}" for token_id in sorted(self.eos_ids)]


def checked_seed(seed: int) -> int:
    """`seed`, if it is one. *Raises* `UsageError`."""
    try:
        parse_options({"seed": seed}, SamplingParams())
    except Refused as error:
        raise UsageError(error.message) from None
    return seed
