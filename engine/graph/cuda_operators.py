"""The operators of a decode step as Doorbell's kernels, where there is one for the shape, and torch's where there is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm.device_collectives import UNIT_BYTES, norm_grid
from comm.device_communicator import DeviceCommunicator
from comm.device_single import DeviceSingle
from engine.eager import EagerStep
from engine.graph.operators import TorchOperators
from engine.graph.row_state import DeviceRows
from engine.rope import inverse_frequencies
from engine.weights import LayerWeights
from kernels.advance_rows import launch_advance_rows, load_advance_rows
from kernels.build import Build, default_cache_folder
from kernels.decode_attention import HEAD_DIMS, MAX_GROUP, DecodeAttention, HeadNorms, load_decode_attention
from kernels.elements import VECTOR_BYTES
from kernels.embed import launch_embed, load_embed
from kernels.filter_logits import MAX_IDS, filter_logits, launch_filter_logits, load_filter_logits
from kernels.gemv import Gemv, load_gemv
from kernels.launch_kernel import Kernel
from kernels.rotary import rotary_turns
from kernels.silu_mul import launch_silu_mul, load_silu_mul

FUSED_ROWS = 64  # up to here the sum, the residual and the norm are one kernel; more rows take more of its calls


@dataclass(frozen=True)
class EndKernels:
    """The small kernels: how a step begins and ends, and the middle of a wide MLP."""

    embed: Kernel
    silu_mul: Kernel
    filters: Kernel
    advance: Kernel


class CudaOperators(TorchOperators):
    """`peers` holds the collectives; `attention` is None for shapes that its kernel does not take. A product of few rows is fp32
    parts `[num_parts, rows, out]`, of more rows a tensor of the model's dtype."""

    def __init__(
        self,
        step: EagerStep,
        num_ids: int,
        peers: DeviceCommunicator | DeviceSingle,
        attention: DecodeAttention | None,
        gemv: Gemv,
        ends: EndKernels,
    ):
        super().__init__(step.config, step.plan, step.weights, step.comm, step.kv, num_ids)
        self._peers, self._attention, self._gemv, self._ends = peers, attention, gemv, ends
        self._is_norm_fused = _takes_norm(step.config.hidden_size * step.dtype.itemsize)
        self._norms = [
            None if layer.q_norm is None else HeadNorms(layer.q_norm, layer.k_norm, step.config.rms_norm_eps)
            for layer in step.weights.layers
        ]
        parts = ["products of few rows"] * (step.dtype == torch.bfloat16) + ["attention"] * (attention is not None)
        parts += ["norm"] * self._is_norm_fused + ["choice"]
        self.description = f"own kernels for {', '.join(parts)}"

    def prepare(self, rows: DeviceRows) -> Any:
        return super().prepare(rows) if self._attention is None else rows

    def embed(self, rows: DeviceRows) -> tuple[torch.Tensor, torch.Tensor]:
        table = self.weights.embedding
        if table.shape[1] * table.element_size() % VECTOR_BYTES:
            return super().embed(rows)
        x, residual = (torch.empty(len(rows), table.shape[1], dtype=table.dtype, device=table.device) for _ in range(2))
        return launch_embed(self._ends.embed, rows.token_ids, table, *self.plan.vocab_range, x, residual), residual

    def linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self._gemv.takes(x, weight):
            return self._gemv.linear(x, weight, bias)
        return super().linear(x, weight, bias)

    def gate_up(self, x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
        if self._gemv.takes(x, layer.gate_up, is_gate_up=True):
            return self._gemv.gate_up(x, layer.gate_up, layer.gate_up_bias)
        both = super().linear(x, layer.gate_up, layer.gate_up_bias)
        return launch_silu_mul(self._ends.silu_mul, both, both.new_empty(both.shape[0], both.shape[1] // 2))

    def attention(self, shared: Any, layer_idx: int, qkv: torch.Tensor) -> torch.Tensor:
        if self._attention is None:
            return super().attention(shared, layer_idx, self._whole(qkv))
        num_q, num_kv, head_dim = self.plan.local_q_heads, self.plan.local_kv_heads, self.config.head_dim
        heads = torch.empty(len(shared), num_q, head_dim, dtype=self.kv.keys.dtype, device=qkv.device)
        self._attention.launch(
            qkv.view(*qkv.shape[:-1], num_q + 2 * num_kv, head_dim),
            shared.positions,
            shared.page_table,
            self.kv.keys[layer_idx],
            self.kv.values[layer_idx],
            heads,
            norms=self._norms[layer_idx],
            window=self.config.windows[layer_idx],
        )
        return heads.flatten(1)

    def reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self._is_norm_fused or residual.shape[0] > FUSED_ROWS:
            return super().reduce_norm(self._whole(x), residual, weight)
        normed = torch.empty_like(residual)
        collectives = self._peers.collectives
        return collectives.all_reduce_lamport_norm(x, residual, weight, self.config.rms_norm_eps, normed)

    def choose(self, rows: DeviceRows, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = logits if logits.dim() == 2 else logits.sum(0) if logits.shape[0] > 1 else logits[0]
        if rows.filters is not None:
            logits = self._filter(rows, logits)
        values = torch.empty(len(rows), dtype=torch.float32, device=logits.device)
        ids = self._peers.vocabulary.draw(logits, self.first_id, self.num_valid, rows.draw, values=values)
        return ids, values

    def _filter(self, rows: DeviceRows, logits: torch.Tensor) -> torch.Tensor:
        local_vocab = logits.shape[1]
        full = logits.float().contiguous() if self.comm.size == 1 else self._peers.vocabulary.gather(logits.contiguous()).float()
        operands = (full, self.num_ids, rows.token_ids, rows.positions, rows.draw.temperatures, rows.filters)
        if self.num_ids <= MAX_IDS:
            launch_filter_logits(self._ends.filters, *operands, is_pdl=self._peers.is_one_rank_per_gpu)
        else:
            filter_logits(*operands)
        first = self.comm.rank * local_vocab
        return full[:, first : first + local_vocab]

    def _whole(self, product: torch.Tensor) -> torch.Tensor:
        return product if product.dim() == 2 else product.sum(0).to(self.kv.keys.dtype)

    def advance(self, rows: DeviceRows, ids: torch.Tensor, values: torch.Tensor) -> None:
        launch_advance_rows(self._ends.advance, ids, values, rows.token_ids, rows.positions, rows.step, rows.ring.device_words)


def open_operators(step: EagerStep, num_ids: int, max_rows: int, max_context: int) -> tuple[CudaOperators, Callable[[], None]]:
    """Operators for the model of `step`, and what raises when one of their kernels gave up. *Collective*.

    `max_rows` rows at once, of up to `max_context` tokens. *Raises* `DoorbellError` when a kernel cannot be compiled.
    """
    build, comm = Build(default_cache_folder()), step.comm
    torch.cuda.set_device(step.device)  # a kernel is loaded on the current one
    peers = comm if isinstance(comm, DeviceCommunicator) else DeviceSingle(build, torch.cuda.current_device())
    is_pdl = peers.is_one_rank_per_gpu  # else a kernel that waits early holds room that a peer's kernel may need first
    num_sms = torch.cuda.get_device_properties(step.device).multi_processor_count
    attention = _open_attention(build, step, max_rows, max_context, num_sms, is_pdl)
    gemv = Gemv(load_gemv(build), num_sms, is_pdl)
    ends = EndKernels(
        load_embed(build, step.dtype), load_silu_mul(build, step.dtype), load_filter_logits(build), load_advance_rows(build)
    )
    operators = CudaOperators(step, num_ids, peers, attention, gemv, ends)
    return operators, peers.check


def _open_attention(
    build: Build, step: EagerStep, max_rows: int, max_context: int, num_sms: int, is_pdl: bool
) -> DecodeAttention | None:
    config, plan, size = step.config, step.plan, step.kv.page_size
    is_taken = config.head_dim in HEAD_DIMS and plan.q_per_unit <= MAX_GROUP and size & (size - 1) == 0
    if not is_taken:
        return None
    inv_freq = inverse_frequencies(config.rope, config.head_dim).to(step.device)
    turns = rotary_turns(max_context, inv_freq, config.rope.attention_factor, step.dtype)
    kernel = load_decode_attention(build, step.dtype, config.head_dim)
    return DecodeAttention(
        kernel, plan.local_q_heads, plan.local_kv_heads, size, turns, max_rows, max_context, num_sms, is_pdl=is_pdl
    )


def _takes_norm(row_bytes: int) -> bool:
    if row_bytes % UNIT_BYTES:
        return False
    try:
        norm_grid(row_bytes // UNIT_BYTES)
    except ValueError:
        return False
    return True
