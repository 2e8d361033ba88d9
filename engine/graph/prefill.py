"""Steps that prefill, on Doorbell's operators: what computes everything on a GPU that is not a burst.

A step of up to some hundred new tokens is bound by launches, so it is padded to a shape (`StepShape`) and replayed from a graph:
a prompt alone, or prompts together, beside rows that decode or not. Longer steps, and those with a chunk behind cached tokens,
are launched one by one, and nothing waits. A shape is captured when its second step comes, which is computed on the way:
neither the start nor a first token waits for graphs that nobody may need. Where a shape that is captured already is little
larger, a step is padded to that one, and its own is captured only if many come: a capture makes all rows that decode wait for as
long as dozens of such steps.

Padding is a row of its own behind the prompts, or rows that are not there: no real token sees it, and it has no slot, so nothing
of it is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from engine.graph.chunk_tokens import ChunkTokens, chunk_tokens, count_single
from engine.graph.long_prompts import LongPrompts
from engine.graph.operators import Operators
from engine.graph.prefill_step import prefill_step
from engine.graph.row_state import PADDING
from engine.graph.step_shape import (
    BUCKETS,
    MANY_STEPS,
    MAX_SQUARE_TOKENS,
    MOST_STRETCH,
    SINGLE_BUCKETS,
    StepShape,
    buckets_up_to,
    prompts_in,
)
from engine.profile.marks import NO_MARKS, Marks
from engine.rope import inverse_frequencies
from engine.scheduler import Limits
from engine.step_batch import StepBatch
from kernels.chunk_attention import Chunk, PackedRows, takes_flash
from kernels.rotary import rotary_turns
from kernels.rotary_write import NO_SLOT
from kernels.upload import upload


class PrefillStep:
    """`StepBackend` on `operators`, without graphs. *Collective*: `run`. `description`: for the start summary.

    `max_context`: tokens of the longest row. *Cost*: a table of as many positions. `long_prompts`: chooses the prompts that cuDNN
    attends, for these steps alone; None for none. `num_captured`: shapes of steps that there are graphs of, the same on all
    ranks.
    """

    num_captured = 0

    def __init__(self, operators: Operators, max_context: int, long_prompts: LongPrompts | None = None):
        self._operators, self.kv = operators, operators.kv
        self._long_prompts = LongPrompts(is_usable=False) if long_prompts is None else long_prompts
        config, device = operators.config, operators.kv.keys.device
        inv_freq = inverse_frequencies(config.rope, config.head_dim).to(device)
        num_positions = max(max_context, BUCKETS[-1])  # padding has positions as well
        self._turns = rotary_turns(num_positions, inv_freq, config.rope.attention_factor, operators.kv.keys.dtype)
        self._windows = set(config.windows)
        self.description = self._described("kernels one by one")

    def _described(self, steps: str) -> str:
        return ", ".join(filter(None, (steps, self._long_prompts.description)))

    def shape_for(self, num_single: int, lengths: Sequence[int]) -> StepShape | None:
        """The shape that a step of `num_single` rows that decode and of whole prompts of `lengths` tokens is padded to. None: it
        is launched as it is."""
        return None

    def is_long(self, lengths: Sequence[int]) -> bool:
        """Whether cuDNN attends a step of new prompts of `lengths` tokens, once one like it has come before."""
        shape = self.shape_for(0, lengths)
        num_tokens = sum(lengths) if shape is None else shape.num_tokens
        is_all_seen = any(window is None or window >= num_tokens for window in self._windows)
        return len(lengths) == 1 and is_all_seen and self._long_prompts.takes(num_tokens)

    @torch.inference_mode()
    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        """As `EagerStep.run`. *Numbers*: those of its operators. The result is good until the next call."""
        most_single = self._operators.most_single
        tokens = chunk_tokens(batch, self._turns, self.kv.page_size, self._windows, most_single, self._long_prompts)
        return self._without_padded_ids(prefill_step(self._operators, tokens, marks))

    def _without_padded_ids(self, logits: torch.Tensor) -> torch.Tensor:
        num_rows = self._operators.plan.num_vocab_rows
        if num_rows < logits.shape[1]:
            logits[:, num_rows:] = float("-inf")
        return logits


class _BucketedPrefill(PrefillStep, ABC):
    """With shapes: all but how a padded step is run. `has_logits`: what is padded are steps that ask for the logits of each row's
    last token; else those that ask for none, and are there for the cache alone, rows that decode without prompts too."""

    def __init__(
        self, operators: Operators, limits: Limits, graph_tokens: int, long_prompts: LongPrompts | None = None,
        has_logits: bool = True,
    ):  # fmt: skip
        super().__init__(operators, limits.max_model_len, long_prompts)
        self._has_logits = has_logits
        most = BUCKETS[-1] if takes_flash(operators.kv.keys) else MAX_SQUARE_TOKENS
        self._graph_tokens = min(graph_tokens, limits.max_step_tokens, most)
        self._buckets = buckets_up_to(self._graph_tokens)
        most_single = min(operators.most_single, limits.max_batch, SINGLE_BUCKETS[-1])
        self._singles = (0, *(bucket for bucket in SINGLE_BUCKETS if bucket < most_single), *[most_single] * (most_single > 0))
        longest, device = self._buckets[-1] if self._buckets else 0, operators.kv.keys.device
        width, max_pages = most_single + longest, -(-limits.max_model_len // operators.kv.page_size)

        def full(value: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        # What captured steps read, in the order of their tokens.
        self._token_ids, self._positions, self._slots = full(0, width), full(0, width), full(NO_SLOT, width)
        self._page_table = full(0, most_single, max_pages, dtype=torch.int32)
        most_prompts = prompts_in(longest)
        self._starts = full(0, most_prompts + 2, dtype=torch.int32)  # of the prompts, of the padding behind them, and its end
        self._logit_idx = full(0, most_single + most_prompts)
        self._in_order = torch.arange(longest, device=device)
        self._whole_starts = {
            bucket: torch.tensor([0, bucket], dtype=torch.int32, device=device) for bucket in self._buckets
        }

    def shape_for(self, num_single: int, lengths: Sequence[int]) -> StepShape | None:
        is_alone, num_tokens = num_single == 0 and len(lengths) == 1, sum(lengths)
        is_empty = not lengths and (self._has_logits or not num_single)
        if is_empty or num_tokens > self._graph_tokens or num_single > self._singles[-1]:
            return None
        for bucket in self._buckets:
            num_prompts = 1 if is_alone else prompts_in(bucket)
            if bucket >= num_tokens and num_prompts >= len(lengths):
                return StepShape(next(single for single in self._singles if single >= num_single), bucket, num_prompts)
        return None

    def _shape_of(self, batch: StepBatch) -> StepShape | None:
        num_single = self._count_single(batch)
        prompts = batch.rows[num_single:]
        if any(row.num_logits != self._has_logits for row in batch.rows) or any(row.context_len for row in prompts):
            return None
        return self.shape_for(num_single, [row.num_tokens for row in prompts])

    def _count_single(self, batch: StepBatch) -> int:
        is_alone = len(batch.rows) == 1 and batch.rows[0].context_len == 0
        return 0 if is_alone else count_single(batch.rows, self._singles[-1])

    @torch.inference_mode()
    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        # A step that is told its stages is launched one by one: a graph is captured without them.
        shape = self._shape_of(batch) if marks is NO_MARKS else None
        shape = None if shape is None else self._padded_to(shape)
        if shape is None:
            return super().run(batch, marks)
        if shape.num_prompts == 1:
            self._lay_out_one(batch, shape)
        else:
            self._lay_out(batch, shape)
        return self._run(shape)[: len(batch.rows)]

    def _lay_out_one(self, batch: StepBatch, shape: StepShape) -> None:
        num_tokens = batch.rows[0].num_tokens
        self._token_ids[:num_tokens].copy_(batch.token_ids)
        self._slots[:num_tokens].copy_(batch.slots)
        self._slots[num_tokens : shape.num_tokens].fill_(NO_SLOT)
        if self._has_logits:
            self._logit_idx[:1].copy_(batch.logit_idx)

    def _lay_out(self, batch: StepBatch, shape: StepShape) -> None:
        """Put the tokens where the step of `shape` reads them."""
        count = self._count_single(batch)
        end, begin = shape.num_single + shape.num_tokens, shape.num_single
        last = begin + batch.token_ids.numel() - count
        for buffer, own, padding in (
            (self._token_ids, batch.token_ids, 0),
            (self._slots, batch.slots, NO_SLOT),
            (self._positions, batch.positions, PADDING),
        ):
            if begin:
                buffer[:count].copy_(own[:count])
                buffer[count:begin].fill_(padding)
            buffer[begin:last].copy_(own[count:])
            buffer[last:end].fill_(padding)
        if count:
            pages = batch.page_table[:count]
            self._page_table[:count, : pages.shape[1]].copy_(pages)
        num_rows, moved = len(batch.rows), begin - count
        num_prompts = num_rows - count
        if self._has_logits:
            self._logit_idx[:count].copy_(batch.logit_idx[:count])
            torch.add(batch.logit_idx[count:], moved, out=self._logit_idx[count:num_rows])
            self._logit_idx[num_rows : shape.num_logits].fill_(0)
        if num_prompts:
            self._starts[1 : num_prompts + 1].copy_(self._ends(batch, count))
        self._starts[num_prompts + 1 : shape.num_prompts + 2].fill_(shape.num_tokens)

    def _ends(self, batch: StepBatch, count: int) -> torch.Tensor:
        """Where the prompts behind the first `count` rows end, of one token each, counted from the first prompt on."""
        if self._has_logits:
            return batch.logit_idx[count:] + (1 - count)
        ends = [row.start + row.num_tokens - count for row in batch.rows[count:]]
        return upload(torch.tensor(ends, dtype=torch.int64), self._starts.device)

    def _step(self, shape: StepShape) -> torch.Tensor:
        """The step of the shape, on what is in the buffers now."""
        num_logits = shape.num_logits if self._has_logits else 0
        num_single, end = shape.num_single, shape.num_single + shape.num_tokens
        if shape.num_prompts == 1:
            positions, turns = self._in_order[:end], self._turns[:end]
        else:
            positions = self._positions[:end]
            turns = self._turns.index_select(0, positions.clamp(min=0))
        chunks = {window: (self._prompts(shape, window),) for window in self._windows}
        tokens = ChunkTokens(
            self._token_ids[:end], positions, self._slots[:end], turns, self._logit_idx[:num_logits], chunks,
            num_single, self._page_table[:num_single] if num_single else None,
        )  # fmt: skip
        return self._without_padded_ids(prefill_step(self._operators, tokens))

    def _prompts(self, shape: StepShape, window: int | None) -> Chunk | PackedRows:
        begin, num_tokens = shape.num_single, shape.num_tokens
        window = None if window is None or window >= num_tokens else window
        if shape.num_prompts > 1:
            starts = self._starts[: shape.num_prompts + 2]
            return PackedRows(begin, begin + num_tokens, starts, num_tokens, window=window)
        if window is None:
            # By the shape alone, not by what has come: what is computed before a capture and what is captured are to be the same.
            return Chunk(0, num_tokens, num_tokens, is_long=self._long_prompts.takes(num_tokens))
        return PackedRows(0, num_tokens, self._whole_starts[num_tokens], num_tokens, (num_tokens,), window)

    def _padded_to(self, shape: StepShape) -> StepShape | None:
        """What a step of the shape, which has come, is to be padded to; None to launch it as it is."""
        return shape

    @abstractmethod
    def _run(self, shape: StepShape) -> torch.Tensor:
        """Logits of the step on what is in the buffers: `[shape.num_logits, local_vocab]`, or of no row without `has_logits`."""


class TwinPrefill(_BucketedPrefill):
    """Padded steps without graphs, on any device: the prefill of CPU tests."""

    def _run(self, shape: StepShape) -> torch.Tensor:
        return self._step(shape)


class GraphPrefill(_BucketedPrefill):
    """Padded steps in graphs on a GPU, of up to `graph_tokens` new tokens (0: none).

    `stock_up()` lets torch hold memory for steps to come, on the current stream, and is called while no rank runs anything: for
    ranks that share a GPU, who may not ask for any in mid-step (`engine/loading.py`). `most_rows`: of a captured step, padding
    included; None for any number.
    """

    def __init__(
        self, operators: Operators, limits: Limits, graph_tokens: int, stock_up: Callable[[], None] = lambda: None,
        most_rows: int | None = None, long_prompts: LongPrompts | None = None, has_logits: bool = True,
    ):  # fmt: skip
        super().__init__(operators, limits, graph_tokens, long_prompts, has_logits)
        self._stock_up, self._most_rows = stock_up, most_rows
        self._num_asked: Counter[StepShape] = Counter()
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        if self._buckets:
            longest = self._graph_tokens if most_rows is None else min(self._graph_tokens, most_rows)
            self.description = self._described(f"graphs up to {longest} tokens, kernels one by one above")

    def shape_for(self, num_single: int, lengths: Sequence[int]) -> StepShape | None:
        shape = super().shape_for(num_single, lengths)
        is_large = shape is not None and self._most_rows is not None and shape.num_single + shape.num_tokens > self._most_rows
        return None if is_large else shape

    def _padded_to(self, shape: StepShape) -> StepShape | None:
        if shape in self._graphs:
            return shape
        self._num_asked[shape] += 1
        most = MOST_STRETCH * (shape.num_single + shape.num_tokens)
        stand_ins = [made for made in self._graphs if made.holds(shape) and made.num_single + made.num_tokens <= most]
        if stand_ins and self._num_asked[shape] <= MANY_STEPS:
            return min(stand_ins, key=lambda made: (made.num_single + made.num_tokens, made.num_prompts))
        return shape if self._num_asked[shape] > 1 else None

    @property
    def num_captured(self) -> int:
        return len(self._graphs)

    def _run(self, shape: StepShape) -> torch.Tensor:
        if shape not in self._graphs:
            return self._first_run(shape)
        graph, logits = self._graphs[shape]
        self._operators.comm.meet()
        graph.replay()
        return logits

    def _first_run(self, shape: StepShape) -> torch.Tensor:
        """Compute the padded step plainly, which makes the libraries' workspaces and plans too, then capture it for the next.
        Waits."""
        comm = self._operators.comm
        torch.cuda.synchronize()
        comm.barrier()
        with torch.cuda.stream(self._stream):
            self._stock_up()
            comm.barrier()
            found = self._step(shape)
        torch.cuda.synchronize()
        # A capture frees and takes memory: where ranks share a GPU, nobody runs any while somebody captures.
        comm.barrier()
        graph = torch.cuda.CUDAGraph()
        # Other threads (rows being read, the watch over the peers) may do as they please meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = self._step(shape)
        self._graphs[shape] = graph, logits
        self._stock_up()
        comm.barrier()
        return found
