"""The attention of decode steps on a GPU: our kernel, or FlashInfer's for numbers of rows at which a table calls it faster."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from engine.eager import EagerStep
from engine.rope import inverse_frequencies
from kernels.attention_choice import Heads, is_flashinfer_faster
from kernels.build import Build
from kernels.decode_attention import HEAD_DIMS, MAX_GROUP, DecodeAttention, HeadNorms, load_decode_attention
from kernels.decode_write import load_decode_write
from kernels.flashinfer_attention import FlashInferAttention, is_installed, why_not
from kernels.rotary import rotary_turns


class ChosenAttention:
    """Launches as `DecodeAttention`: by `library` for `library_rows` rows without norms and window that are not rotated
    yet, else by `own`."""

    def __init__(self, own: DecodeAttention, library: FlashInferAttention, library_rows: frozenset[int]):
        self._own, self._library, self._library_rows = own, library, library_rows
        self.max_rows, self.turns = own.max_rows, own.turns
        self.description = f"attention of {_ranges(sorted(library_rows))} rows by FlashInfer"

    def launch(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        norms: HeadNorms | None = None,
        window: int | None = None,
        is_early: bool = True,
        is_rotated: bool = False,
    ) -> torch.Tensor:
        """As `DecodeAttention.launch`. `is_early` is no matter to FlashInfer, which reads nothing early."""
        if norms is None and window is None and not is_rotated and out.shape[0] in self._library_rows:
            return self._library.launch(qkv, positions, page_table, keys, values, out)
        return self._own.launch(qkv, positions, page_table, keys, values, out, None, norms, window, is_early, is_rotated)


def open_attention(
    build: Build, step: EagerStep, max_rows: int, max_context: int, num_sms: int, is_pdl: bool
) -> DecodeAttention | ChosenAttention | None:
    """The attention for the model of `step`, of up to `max_rows` rows of `max_context` tokens; None if no kernel takes its shape.

    *Raises* `DoorbellError` when one of ours cannot be compiled; without FlashInfer's, ours does it all.
    """
    config, plan, size = step.config, step.plan, step.kv.page_size
    is_taken = config.head_dim in HEAD_DIMS and plan.q_per_unit <= MAX_GROUP and size & (size - 1) == 0
    if not is_taken:
        return None
    inv_freq = inverse_frequencies(config.rope, config.head_dim).to(step.device)
    turns = rotary_turns(max_context, inv_freq, config.rope.attention_factor, step.dtype)
    num_q, num_kv = plan.local_q_heads, plan.local_kv_heads
    kernel = load_decode_attention(build, step.dtype, config.head_dim)
    own = DecodeAttention(kernel, num_q, num_kv, size, turns, max_rows, max_context, num_sms, is_pdl=is_pdl)
    rows = library_rows(Heads(config.head_dim, num_q, num_kv, size), max_rows, max_context)
    if not rows or not _can_use_library(step):
        return own
    write = load_decode_write(build, step.dtype)
    return with_library(
        own, lambda: FlashInferAttention(write, num_q, num_kv, size, turns, max(rows), num_sms, is_pdl), rows
    )  # fmt: skip


def with_library(
    own: DecodeAttention, open_library: Callable[[], FlashInferAttention], rows: frozenset[int]
) -> DecodeAttention | ChosenAttention:
    """Both, or `own` alone where the library cannot be opened."""
    try:
        return ChosenAttention(own, open_library(), rows)
    except Exception as error:  # an optional package that another compiler builds: whatever ails it, there is our kernel
        print(f"doorbell: FlashInfer's attention is not used: {error}", file=sys.stderr)
        return own


def _can_use_library(step: EagerStep) -> bool:
    """Whether FlashInfer is there and can attend for this model."""
    plan, capability = step.plan, torch.cuda.get_device_capability(step.device)
    heads = (step.config.head_dim, plan.local_q_heads, plan.local_kv_heads)
    return is_installed() and why_not(step.dtype, *heads, step.kv.page_size, capability) is None


def library_rows(heads: Heads, max_rows: int, max_context: int) -> frozenset[int]:
    """Numbers of rows up to `max_rows` at which FlashInfer is to attend."""
    return frozenset(rows for rows in range(1, max_rows + 1) if is_flashinfer_faster(heads, rows, max_context))


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in words: `1-4, 9`."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    return ", ".join(f"{first}-{last}" if first < last else f"{first}" for first, last in zip(firsts, lasts))
