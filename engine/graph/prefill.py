"""Steps that prefill, on Doorbell's operators: what computes everything on a GPU that is not a burst.

A prompt alone of up to a few hundred tokens is bound by launches, so its step is padded to a bucket and replayed from a graph.
Above, and for chunks behind cached tokens, several prompts, or prompts beside rows that decode, the same operators are launched
one by one, and nothing waits. A bucket is captured when its second prompt comes, which is computed on the way: neither the start
nor a first token waits for graphs that nobody may need.

Padding comes behind the prompt: no real token sees it, and it has no slot, so nothing of it is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from engine.graph.chunk_tokens import ChunkTokens, chunk_tokens
from engine.graph.operators import Operators
from engine.graph.prefill_step import prefill_step
from engine.profile.marks import NO_MARKS, Marks
from engine.rope import inverse_frequencies
from engine.scheduler import Limits
from engine.step_batch import StepBatch
from kernels.chunk_attention import Chunk
from kernels.paged_attention import causal_mask
from kernels.rotary import rotary_turns
from kernels.rotary_write import NO_SLOT

# Tokens of a captured step. Denser from 128 on, where multiplications begin to outweigh the reading of the weights, so that
# padding costs time.
BUCKETS = (16, 32, 64, 128, 192, 256, 384, 512)


def buckets_up_to(num_tokens: int) -> tuple[int, ...]:
    """The buckets for prompts of up to `num_tokens` tokens; longer ones than the last bucket take none."""
    return tuple(bucket for idx, bucket in enumerate(BUCKETS) if num_tokens > (BUCKETS[idx - 1] if idx else 0))


class PrefillStep:
    """`StepBackend` on `operators`, without graphs. *Collective*: `run`. `description`: for the start summary.

    `max_context`: tokens of the longest row. *Cost*: a table of as many positions.
    """

    def __init__(self, operators: Operators, max_context: int):
        self._operators, self.kv = operators, operators.kv
        config, device = operators.config, operators.kv.keys.device
        inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        num_positions = max(max_context, BUCKETS[-1])  # padding has positions as well
        self._turns = rotary_turns(num_positions, inv_freq, config.rope.attention_factor, operators.kv.keys.dtype)
        self._windows = set(config.windows)
        self.description = "kernels one by one"

    def bucket(self, num_rows: int, num_tokens: int) -> int | None:
        """The bucket of a prompt of `num_tokens` tokens, nothing of it cached, among `num_rows` in the step. None: no graph."""
        return None

    @torch.inference_mode()
    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        """As `EagerStep.run`. *Numbers*: those of its operators. The result is good until the next call."""
        tokens = chunk_tokens(batch, self._turns, self.kv.page_size, self._windows, self._operators.most_single)
        return self._without_padded_ids(prefill_step(self._operators, tokens, marks))

    def _without_padded_ids(self, logits: torch.Tensor) -> torch.Tensor:
        num_rows = self._operators.plan.num_vocab_rows
        if num_rows < logits.shape[1]:
            logits[:, num_rows:] = float("-inf")
        return logits


class _BucketedPrefill(PrefillStep, ABC):
    """With buckets: all but how a bucket's step is run."""

    def __init__(self, operators: Operators, limits: Limits, graph_tokens: int):
        super().__init__(operators, limits.max_model_len)
        self._graph_tokens = min(graph_tokens, limits.max_step_tokens, limits.max_model_len, BUCKETS[-1])
        self._buckets = buckets_up_to(self._graph_tokens)
        longest, device = self._buckets[-1] if self._buckets else 0, operators.kv.keys.device
        self._token_ids = torch.zeros(longest, dtype=torch.int64, device=device)
        self._slots = torch.full((longest,), NO_SLOT, dtype=torch.int64, device=device)
        self._last = torch.zeros(1, dtype=torch.int64, device=device)
        self._positions = torch.arange(longest, device=device)

    def bucket(self, num_rows: int, num_tokens: int) -> int | None:
        if num_rows > 1 or num_tokens > self._graph_tokens:
            return None
        return next(bucket for bucket in self._buckets if bucket >= num_tokens)

    @torch.inference_mode()
    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        row = batch.rows[0]
        bucket = None
        # A step that is told its stages is launched one by one: a graph is captured without them.
        if row.context_len == 0 and batch.logit_idx.numel() == 1 and marks is NO_MARKS:
            bucket = self.bucket(len(batch.rows), row.num_tokens)
        if bucket is None or not self._is_due(bucket):
            return super().run(batch, marks)
        self._token_ids[: row.num_tokens].copy_(batch.token_ids)
        self._slots[: row.num_tokens].copy_(batch.slots)
        self._slots[row.num_tokens : bucket].fill_(NO_SLOT)
        self._last.copy_(batch.logit_idx)
        return self._run(bucket)

    def _step(self, bucket: int) -> torch.Tensor:
        """The step of the bucket, on what is in the buffers now."""
        chunks = {window: self._whole(bucket, window) for window in self._windows}
        tokens = ChunkTokens(
            self._token_ids[:bucket], self._positions[:bucket], self._slots[:bucket], self._turns[:bucket], self._last, chunks
        )
        return self._without_padded_ids(prefill_step(self._operators, tokens))

    def _whole(self, bucket: int, window: int | None) -> tuple[Chunk, ...]:
        mask = None
        if window is not None and window < bucket:
            mask = causal_mask(bucket, 0, 0, window, self._turns.dtype, self._turns.device)
        return (Chunk(0, 1, bucket, bucket, mask=mask),)

    def _is_due(self, bucket: int) -> bool:
        """Whether a prompt of the bucket, which has come, is to be padded to it."""
        return True

    @abstractmethod
    def _run(self, bucket: int) -> torch.Tensor: ...


class TwinPrefill(_BucketedPrefill):
    """Padded steps without graphs, on any device: the prefill of CPU tests."""

    def _run(self, bucket: int) -> torch.Tensor:
        return self._step(bucket)


class GraphPrefill(_BucketedPrefill):
    """Padded steps in graphs on a GPU, for prompts of up to `graph_tokens` tokens (0: none).

    `stock_up()` lets torch hold memory for steps to come, on the current stream, and is called while no rank runs anything: for
    ranks that share a GPU, who may not ask for any in mid-step (`engine/loading.py`).
    """

    def __init__(
        self, operators: Operators, limits: Limits, graph_tokens: int, stock_up: Callable[[], None] = lambda: None
    ):
        super().__init__(operators, limits, graph_tokens)
        self._stock_up = stock_up
        self._asked_for: set[int] = set()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        if self._buckets:
            self.description = f"graphs up to {self._graph_tokens} tokens, kernels one by one above"

    def _is_due(self, bucket: int) -> bool:
        is_due = bucket in self._asked_for
        self._asked_for.add(bucket)
        return is_due

    def _run(self, bucket: int) -> torch.Tensor:
        if bucket not in self._graphs:
            return self._first_run(bucket)
        graph, logits = self._graphs[bucket]
        graph.replay()
        return logits

    def _first_run(self, bucket: int) -> torch.Tensor:
        """Compute the padded step plainly, which makes the libraries' workspaces as well, then capture it for the next. Waits."""
        comm = self._operators.comm
        torch.cuda.synchronize()
        comm.barrier()
        with torch.cuda.stream(self._stream):
            self._stock_up()
            comm.barrier()
            found = self._step(bucket)
        torch.cuda.synchronize()
        # A capture frees and takes memory: where ranks share a GPU, nobody runs any while somebody captures.
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        # Other threads (rows being read, the watch over the peers) may do as they please meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = self._step(bucket)
        self._graphs[bucket] = graph, logits
        self._stock_up()
        comm.barrier()
        return found
