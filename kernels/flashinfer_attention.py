"""FlashInfer's decode attention in the place of ours, where FlashInfer is installed (extra `flashinfer`).

Of its kernels for sm_90 only XQA (`flashinfer.xqa`) can be part of a captured step: it reads lengths and page tables on the
device, while the wrappers with `plan` want lengths on the host at every step. It only attends, so `decode_write` runs before it.
`kernels.attention_choice` says when the two together are faster than our one kernel.
"""

from __future__ import annotations

import importlib.util

import torch

from kernels.decode_write import launch_decode_write
from kernels.launch_kernel import Kernel
from kernels.split_grid import MAX_GROUP

# Of what XQA can be compiled for, what we have. It takes fp16 as well, which is nobody's choice here.
HEAD_DIMS, PAGE_SIZES = (64, 128), (16, 32, 64, 128)
CAPABILITY = (9, 0)
# A score that counts for nothing beside any other, and is all that a row without tokens has: its output is then 0, not 0 / 0.
# XQA starts its maxima here; less would not do.
NO_SCORE = -1e5
PART_BYTES = 1 << 10  # of maxima and sums that a CTA leaves beside its share of an output, with room to spare


def is_installed() -> bool:
    """Whether FlashInfer can be imported; does not import it, which takes seconds."""
    return importlib.util.find_spec("flashinfer") is not None


def why_not(
    dtype: torch.dtype, head_dim: int, num_q: int, num_kv: int, page_size: int, capability: tuple[int, int]
) -> str | None:
    """Why XQA does not attend with such heads and pages on a GPU of this compute capability; None if it does.

    `num_q`, `num_kv`: local query and KV heads. Does not ask whether FlashInfer is installed.
    """
    if capability != CAPABILITY:
        return f"FlashInfer's XQA is used on GPUs of compute capability 9.0 only, not {capability[0]}.{capability[1]}"
    if dtype != torch.bfloat16:
        return f"FlashInfer's XQA is used for bf16 only, not {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer's XQA is used for heads of {HEAD_DIMS} elements, not {head_dim}"
    if num_q % num_kv or not 1 <= num_q // num_kv <= MAX_GROUP:
        return f"FlashInfer's XQA is used for 1 to {MAX_GROUP} query heads a KV head, not {num_q} for {num_kv}"
    if page_size not in PAGE_SIZES:
        return f"FlashInfer's XQA takes pages of {PAGE_SIZES} tokens, not {page_size}"
    return None


class FlashInferAttention:
    """Launches `decode_write` and XQA for one shape of heads; one serves all layers, one launch after the other on one stream.

    `write`: of `load_decode_write`. Other arguments as of `DecodeAttention`. To be made before a capture: XQA is compiled for the
    shape, which takes about a minute, unless FlashInfer's cache has it. Memory: `workspace_bytes`, allocated here. *Raises*
    `ValueError` for shapes that `why_not` names, `ImportError` without FlashInfer, and what its compiler raises.
    """

    def __init__(
        self,
        write: Kernel,
        local_q_heads: int,
        local_kv_heads: int,
        page_size: int,
        turns: torch.Tensor,
        max_rows: int,
        num_sms: int,
        is_pdl: bool = True,
    ):
        head_dim, device = turns.shape[1], turns.device
        reason = why_not(
            turns.dtype, head_dim, local_q_heads, local_kv_heads, page_size, torch.cuda.get_device_capability(device)
        )
        if reason is not None:
            raise ValueError(reason)
        from flashinfer.xqa import xqa

        self._xqa, self._write, self._turns = xqa, write, turns
        self._num_sms, self._is_pdl = num_sms, is_pdl
        self.num_q, self.num_kv, self.page_size, self.max_rows = local_q_heads, local_kv_heads, page_size, max_rows
        group = local_q_heads // local_kv_heads
        num_shares = max(num_sms, max_rows * local_kv_heads)  # XQA deals a row out to at most a CTA an SM
        share_bytes = group * head_dim * turns.dtype.itemsize + PART_BYTES
        self._queries = torch.zeros(max_rows, local_q_heads, head_dim, dtype=turns.dtype, device=device)
        self._lengths = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._scratch = torch.empty(num_shares * share_bytes, dtype=torch.uint8, device=device)
        self._arrived = torch.zeros(max_rows * local_kv_heads, dtype=torch.int32, device=device)  # XQA leaves them 0
        self._sinks = torch.full((local_kv_heads, group), NO_SCORE, dtype=torch.float32, device=device)
        self._compile()

    @property
    def workspace_bytes(self) -> int:
        parts = (self._queries, self._lengths, self._scratch, self._arrived, self._sinks)
        return sum(part.numel() * part.element_size() for part in parts)

    def _compile(self) -> None:
        """Attend a row that is not there."""
        keys = self._queries.new_zeros(self.page_size, self.num_kv, self._queries.shape[2])
        page_table = torch.zeros(1, 1, dtype=torch.int32, device=keys.device)
        self.attend(page_table, keys, keys, torch.empty_like(self._queries[:1]))

    def launch(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        page_table: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """As `DecodeAttention.launch` without bias, norms and window, in two launches; reads nothing early."""
        rows = out.shape[0]
        launch_decode_write(
            self._write, qkv, self._turns, positions, page_table, self._queries[:rows], keys, values, self._lengths[:rows],
            self.page_size, self._is_pdl,
        )  # fmt: skip
        return self.attend(page_table, keys, values, out)

    def attend(self, page_table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """XQA alone, for the queries and lengths of the last `launch`. Returns `out`."""
        rows, head_dim = out.shape[0], out.shape[2]
        if not 1 <= rows <= self.max_rows or not out.is_contiguous() or not page_table.is_contiguous():
            raise ValueError(f"attention takes 1 to {self.max_rows} contiguous rows and page tables, not {list(out.shape)}")
        pages = (-1, self.page_size, self.num_kv, head_dim)
        self._xqa(
            self._queries[:rows, None],
            keys.view(pages),
            values.view(pages),
            page_table,
            self._lengths[:rows, None].view(torch.uint32),
            out[:, None],
            self._scratch,
            self._arrived.view(torch.uint32),
            self.num_kv,
            self.page_size,
            sinks=self._sinks,
            kv_layout="NHD",
            sm_count=self._num_sms,
            enable_pdl=self._is_pdl,
        )
        return out
