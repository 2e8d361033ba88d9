"""The operators of a step as Doorbell's kernels, where there is one for the shape, and torch's where there is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm.device_checks import UNIT_BYTES
from comm.device_collectives import norm_grid
from comm.device_communicator import DeviceCommunicator
from comm.device_single import DeviceSingle
from engine.eager import EagerStep
from engine.graph.chosen_attention import ChosenAttention, open_attention
from engine.graph.chunk_tokens import ChunkTokens
from engine.graph.operators import TorchOperators
from engine.graph.row_state import DeviceRows
from engine.weights import LayerWeights
from kernels.accept_drafts import launch_accept_drafts, load_accept_drafts
from kernels.add_norm import add_norm, launch_add_norm, load_add_norm, takes_add_norm
from kernels.advance_rows import launch_advance_rows, load_advance_rows
from kernels.build import Build, default_cache_folder
from kernels.chunk_attention import chunk_attention
from kernels.decode_attention import DecodeAttention, HeadNorms
from kernels.elements import VECTOR_BYTES
from kernels.embed import MAX_ROWS as MAX_EMBED_ROWS
from kernels.embed import launch_embed, load_embed
from kernels.filter_logits import MAX_IDS, filter_logits, launch_filter_logits, load_filter_logits
from kernels.fp8_linear import ScaledLinear, open_scaled_linear
from kernels.gemv import Gemv, load_gemv
from kernels.launch_kernel import Kernel
from kernels.quantize import Fp8Weight
from kernels.rotary_write import NO_SLOT, launch_rotary_write, load_rotary_write, rotary_write, takes_rotary_write
from kernels.silu_mul import MAX_ROWS as MAX_SILU_ROWS
from kernels.silu_mul import launch_silu_mul, load_silu_mul, silu_mul

FUSED_ROWS = 64  # up to here the sum, the residual and the norm are one kernel; more rows take more of its calls


@dataclass(frozen=True)
class EndKernels:
    """The small kernels: how a step begins and ends, and of steps of many tokens what lies between their products."""

    embed: Kernel
    silu_mul: Kernel
    filters: Kernel
    advance: Kernel
    accept: Kernel
    add_norm: Kernel
    rotary_write: Kernel


@dataclass(frozen=True)
class ChainedRows:
    """Rows of which some are tokens of the same row; `slots` int64 `[rows]` and `turns` `[rows, head_dim]`: of each."""

    rows: DeviceRows
    slots: torch.Tensor
    turns: torch.Tensor


class CudaOperators(TorchOperators):
    """`peers` holds the collectives; `attention` is None for shapes that its kernel does not take. `scaled`: for many rows by
    an FP8 matrix; None widens the matrix. A product of few rows is fp32 parts `[num_parts, rows, out]`, of more a tensor of the
    model's dtype. A residual of many rows may be up to date on each row's own rank alone, until `residual_rows`."""

    def __init__(
        self,
        step: EagerStep,
        num_ids: int,
        peers: DeviceCommunicator | DeviceSingle,
        attention: DecodeAttention | ChosenAttention | None,
        gemv: Gemv,
        ends: EndKernels,
        scaled: ScaledLinear | None = None,
    ):
        super().__init__(step.config, step.plan, step.weights, step.comm, step.kv, num_ids)
        self._peers, self._attention, self._gemv, self._ends, self._scaled = peers, attention, gemv, ends, scaled
        self._summands: torch.Tensor | None = None  # of the product that is about to be summed
        row_bytes = step.config.hidden_size * step.dtype.itemsize
        self._is_norm_fused, self._is_sum_fused = peers.is_norm_fused and _takes_norm(row_bytes), takes_add_norm(row_bytes)
        self._is_rotary_fused = takes_rotary_write(step.config.head_dim, step.dtype)
        self._norms = [
            None if layer.q_norm is None else HeadNorms(layer.q_norm, layer.k_norm, step.config.rms_norm_eps)
            for layer in step.weights.layers
        ]
        parts = ["products of few rows"] * (step.dtype == torch.bfloat16) + ["attention"] * (attention is not None)
        parts += ["norm"] * (self._is_norm_fused or self._is_sum_fused) + ["choice"]
        self.description = f"own kernels for {', '.join(parts)}"
        self.most_single = 0 if attention is None else attention.max_rows

    def prepare(self, rows: DeviceRows) -> Any:
        if self._attention is None:
            return super().prepare(rows)
        return self._prepare_chained(rows) if rows.is_chained else rows

    def _prepare_chained(self, rows: DeviceRows) -> ChainedRows:
        positions, size = rows.positions.clamp(min=0), self.kv.page_size
        pages = rows.page_table.gather(1, (positions // size)[:, None])[:, 0]
        slots = torch.where(rows.positions < 0, NO_SLOT, pages * size + positions % size)
        return ChainedRows(rows, slots, self._attention.turns.index_select(0, positions))

    def embed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table, num_rows = self.weights.embedding, token_ids.numel()
        if table.shape[1] * table.element_size() % VECTOR_BYTES or num_rows > MAX_EMBED_ROWS:
            return super().embed(token_ids)
        x, residual = (torch.empty(num_rows, table.shape[1], dtype=table.dtype, device=table.device) for _ in range(2))
        return launch_embed(self._ends.embed, token_ids, table, *self.plan.vocab_range, x, residual), residual

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._gemv.takes(x, weight):
            return self._gemv.linear(x, weight, bias)
        return self._product(x, weight, bias)

    def _product(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """By a library."""
        if self._scaled is not None and self._scaled.takes(x, weight):
            return self._scaled.linear(x, weight, bias)
        return super().linear(x, weight, bias)

    def gate_up(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        if self._gemv.takes(x, layer.gate_up, is_gate_up=True):
            return self._gemv.gate_up(x, layer.gate_up, layer.gate_up_bias)
        both = self._product(x, layer.gate_up, layer.gate_up_bias)
        if both.shape[0] > MAX_SILU_ROWS:
            return silu_mul(both)
        return launch_silu_mul(self._ends.silu_mul, both, both.new_empty(both.shape[0], both.shape[1] // 2))

    def attention(self, shared: Any, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        if self._attention is None:
            return super().attention(shared, layer_idx, self._rounded(qkv))
        if isinstance(shared, ChainedRows):
            return self._attend_chained(shared, layer_idx, qkv)
        num_q, num_kv, head_dim = self.plan.local_q_heads, self.plan.local_kv_heads, self.config.head_dim
        heads = torch.empty(len(shared), num_q, head_dim, dtype=self.kv.keys.dtype, device=qkv.device)
        qkv = qkv.view(*qkv.shape[:-1], num_q + 2 * num_kv, head_dim)
        is_early = layer_idx > 0 or not shared.is_fresh
        return self._attend_rows(layer_idx, qkv, shared.positions, shared.page_table, heads, is_early).flatten(1)

    def _attend_chained(self, shared: ChainedRows, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        """All keys and values are written first, then every token reads those before it, its row's other new ones among them."""
        heads, rows = self._heads_of(self._rounded(qkv)), shared.rows
        keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
        self._norm_heads(heads, layer_idx)
        self._write(heads, shared.turns, shared.slots, keys, values)
        out = torch.empty(len(rows), self.plan.local_q_heads, heads.shape[2], dtype=heads.dtype, device=heads.device)
        window = self.config.windows[layer_idx]
        self._attention.launch(
            heads, rows.positions, rows.page_table, keys, values, out, window=window, is_early=False, is_rotated=True
        )
        return out.flatten(1)

    def _attend_rows(
        self,
        layer_idx: int,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        out: torch.Tensor,
        is_early: bool,
    ) -> torch.Tensor:
        """Rows of one token each. `is_early`: of `DecodeAttention.launch`."""
        return self._attention.launch(
            qkv,
            positions,
            page_table,
            self.kv.keys[layer_idx],
            self.kv.values[layer_idx],
            out,
            norms=self._norms[layer_idx],
            window=self.config.windows[layer_idx],
            is_early=is_early,
        )

    def attend(self, tokens: ChunkTokens, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        heads, num_single = self._heads_of(self._rounded(qkv)), tokens.num_single
        out = None
        if num_single:
            out = torch.empty(heads.shape[0], self.plan.local_q_heads, heads.shape[2], dtype=heads.dtype, device=heads.device)
            # Not early: what they read has been uploaded for this very step.
            self._attend_rows(
                layer_idx, heads[:num_single], tokens.positions[:num_single], tokens.page_table, out[:num_single], is_early=False
            )
        if num_single < heads.shape[0]:
            keys, values = self.kv.keys[layer_idx], self.kv.values[layer_idx]
            self._norm_heads(heads[num_single:], layer_idx)
            self._write(heads[num_single:], tokens.turns[num_single:], tokens.slots[num_single:], keys, values)
            out = chunk_attention(heads, keys, values, tokens.chunks[self.config.windows[layer_idx]], self.kv.page_size, out)
        return out.flatten(1)

    def _write(self, *operands: torch.Tensor) -> None:
        if self._is_rotary_fused:
            launch_rotary_write(self._ends.rotary_write, *operands)
        else:
            rotary_write(*operands)

    def reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x is self._summands:
            self._summands = None
            self.comm.meet(is_idle=True)
            return self._peers.collectives.all_reduce_two_shot_norm(x, residual, weight, self.config.rms_norm_eps)
        if not self._is_norm_fused or residual.shape[0] > FUSED_ROWS:
            total = self.comm.all_reduce(self._rounded(x))
            return self._add_norm(total, residual, weight, total)  # the sum is nobody's but ours: its memory serves again
        normed = torch.empty_like(residual)
        collectives = self._peers.collectives
        self.comm.meet(is_idle=True)
        eps = self.config.rms_norm_eps
        return collectives.all_reduce_lamport_norm(x, residual, weight, eps, normed, is_next_early=True)  # a product is next

    def summand(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        out = self._room_for_summands(x.shape[0])
        if out is None:
            return super().summand(x, weight, bias)
        self._summands = out
        if self._scaled is not None and self._scaled.takes(x, weight):
            return self._scaled.linear(x, weight, bias, out)
        if isinstance(weight, Fp8Weight) or weight.is_mkldnn:
            return out.copy_(super().linear(x, weight, bias))
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    def _room_for_summands(self, num_rows: int) -> torch.Tensor | None:
        """Where the product of so many rows has to be for sum and norm in two shots; None for another way."""
        if num_rows <= FUSED_ROWS:
            return None
        return self._peers.summands(num_rows, self.config.hidden_size, self.kv.keys.dtype)

    def residual_rows(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        num_rows, picked = residual.shape[0], super().residual_rows(residual, rows)
        if self._room_for_summands(num_rows) is None:
            return picked
        share = -(-num_rows // self.comm.size)
        others = torch.div(rows, share, rounding_mode="floor") != self.comm.rank
        return self.comm.all_reduce(picked.masked_fill_(others[:, None], 0.0))

    def _add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if not self._is_sum_fused:
            return out.copy_(add_norm(x, residual, weight, self.config.rms_norm_eps))
        return launch_add_norm(self._ends.add_norm, x, residual, weight, self.config.rms_norm_eps, out)

    def choose(self, rows: DeviceRows, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.whole(logits)
        if rows.filters is not None:
            logits = self._filter(rows, logits)
        values = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
        self.comm.meet(is_idle=True)
        ids = self._peers.vocabulary.draw(logits, self.first_id, self.num_valid, rows.draw, values=values)
        return ids, values

    def _filter(self, rows: DeviceRows, logits: torch.Tensor) -> torch.Tensor:
        local_vocab = logits.shape[1]
        self.comm.meet(is_idle=True)
        full = logits.float().contiguous() if self.comm.size == 1 else self._peers.vocabulary.gather(logits.contiguous()).float()
        operands = (full, self.num_ids, rows.token_ids, rows.positions, rows.draw.temperatures, rows.filters)
        if self.num_ids <= MAX_IDS:
            launch_filter_logits(self._ends.filters, *operands, is_pdl=self._peers.is_one_rank_per_gpu)
        else:
            filter_logits(*operands)
        first = self.comm.rank * local_vocab
        return full[:, first : first + local_vocab]

    def whole(self, product: torch.Tensor) -> torch.Tensor:
        return product if product.dim() == 2 else product.sum(0) if product.shape[0] > 1 else product[0]

    def _rounded(self, product: torch.Tensor) -> torch.Tensor:
        """A product as one tensor of the model's dtype."""
        return self.whole(product).to(self.kv.keys.dtype)

    def advance(self, rows: DeviceRows, ids: torch.Tensor, values: torch.Tensor) -> None:
        launch_advance_rows(self._ends.advance, ids, values, rows.token_ids, rows.positions, rows.step, rows.ring.device_words)

    def accept(
        self, rows: DeviceRows, history: torch.Tensor, drafts: torch.Tensor, ids: torch.Tensor, values: torch.Tensor
    ) -> None:
        launch_accept_drafts(
            self._ends.accept, ids, values, drafts, rows.token_ids, rows.positions, history, rows.step, rows.ring.device_words
        )


def open_operators(
    step: EagerStep,
    num_ids: int,
    max_rows: int,
    max_context: int,
    is_fp8_scaled: bool = True,
    ranks_per_gpu: int = 1,
) -> tuple[CudaOperators, Callable[[], None]]:
    """Operators for the model of `step`, and what raises when one of their kernels gave up. *Collective*.

    `max_rows` rows at once in steady decode, of up to `max_context` tokens. `is_fp8_scaled`: many rows meet FP8 matrices as FP8
    themselves. `ranks_per_gpu`: of other processes too, for a model that is whole on each.
    *Raises* `DoorbellError` when a kernel cannot be compiled.
    """
    build, comm = Build(default_cache_folder()), step.comm
    torch.cuda.set_device(step.device)  # a kernel is loaded on the current one
    peers = comm if isinstance(comm, DeviceCommunicator) else DeviceSingle(build, torch.cuda.current_device(), ranks_per_gpu)
    is_pdl = peers.is_one_rank_per_gpu  # else a kernel that waits early holds room that a peer's kernel may need first
    num_sms = torch.cuda.get_device_properties(step.device).multi_processor_count
    attention = open_attention(build, step, max_rows, max_context, num_sms, is_pdl)
    gemv = Gemv(load_gemv(build), num_sms, is_pdl)
    ends = EndKernels(
        load_embed(build, step.dtype),
        load_silu_mul(build, step.dtype),
        load_filter_logits(build),
        load_advance_rows(build),
        load_accept_drafts(build),
        load_add_norm(build, step.dtype),
        load_rotary_write(build, step.dtype),
    )
    scaled = open_scaled_linear(build) if is_fp8_scaled else None
    operators = CudaOperators(step, num_ids, peers, attention, gemv, ends, scaled)
    if isinstance(attention, ChosenAttention):
        operators.description += f"; {attention.description}"
    return operators, peers.check


def _takes_norm(row_bytes: int) -> bool:
    if row_bytes % UNIT_BYTES:
        return False
    try:
        norm_grid(row_bytes // UNIT_BYTES)
    except ValueError:
        return False
    return True
