"""The part of the engine that every rank runs alike: apply rank 0's message, schedule, compute, collect the logits."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as Ints
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch

from comm.communicator import Communicator
from engine.graph.burst import MAX_BURST_STEPS, Burst
from engine.graph.row_state import LastTokens
from engine.graph.step import BurstBackend
from engine.profile.marks import NO_MARKS, Marks
from engine.profile.step_profiler import NO_PROFILER, StepProfiler
from engine.scheduler import ScheduledRow, Scheduler
from engine.sequence import Sequence
from engine.step_batch import RowSpan, StepBatch
from engine.step_message import StepMessage
from kernels.upload import upload


class StepBackend(Protocol):
    """Computes one step: fp32 logits `[num_logits, local_vocab]` of this rank's vocabulary rows, good until the next one.
    `description`: of how, for the start summary. `marks`: as `EagerStep.run`."""

    description: str

    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor: ...


@dataclass(frozen=True)
class Computed:
    """The `rows` of a step, and what it says about their next tokens: on rank 0 the fp32 `logits` asked for, `[n, full_vocab]`.
    If the device chooses the tokens itself, the step is the first of the burst that runs then."""

    rows: list[ScheduledRow]
    logits: torch.Tensor | None = None


class Replica:
    """One rank's schedule and step. All ranks hold equal replicas as long as they apply the same messages.

    `burst_backend`: runs steady decode on the device alone; None if nothing does, for the reason `why_single`. `burst`: what it
    runs now, if it does. `profiler`: is told of the steps.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        backend: StepBackend,
        comm: Communicator,
        full_vocab: int,
        device: torch.device,
        profiler: StepProfiler = NO_PROFILER,
    ):
        self.scheduler, self.backend, self.comm = scheduler, backend, comm
        self.full_vocab, self.device, self.profiler = full_vocab, device, profiler
        self.burst_backend: BurstBackend | None = None
        self.why_single = ""
        self.burst: Burst | None = None
        self.sequences: dict[int, Sequence] = {}
        self.digest = 0
        self._drafts: dict[int, list[int]] = {}
        self._burst_steps = self._num_drafts = 0
        self._is_chosen_alone = False

    def apply(self, ints: Ints[int]) -> StepMessage:
        """Take in one message. Its integers go into `digest`, which the ranks compare at the end of a run."""
        self.digest = zlib.crc32(array("q", ints).tobytes(), self.digest)
        message = StepMessage.decode(ints)
        for seq_id, token_ids in message.tokens:
            self._take(self.sequences[seq_id], token_ids)
        if self.burst is not None:
            self.burst.num_applied += message.steps_read
            if message.is_ahead:
                self.scheduler.go_ahead(self.burst.sequences, self.burst.num_launched - self.burst.num_applied)
            if not message.is_continued:
                self.burst_backend.end(self.burst)
                self.burst = None
        for seq_id in message.finished:
            self.scheduler.finish(seq_id)
            del self.sequences[seq_id]
        for sequence in message.added:
            self.sequences[sequence.seq_id] = sequence
            self.scheduler.add(sequence)
        self._drafts, self._burst_steps, self._num_drafts = dict(message.drafts), message.burst_steps, message.num_drafts
        self._is_chosen_alone = message.is_chosen_alone
        return message

    def _take(self, sequence: Sequence, token_ids: Ints[int]) -> None:
        rest = self.scheduler.read_ahead(sequence, token_ids)
        if self.burst is not None:
            self.scheduler.advance(sequence, rest)
        elif rest:
            self.scheduler.append(sequence, rest)

    def drop_all(self) -> None:
        """Forget every open row and give its pages back."""
        self.burst = None
        for seq_id in list(self.sequences):
            self.scheduler.finish(seq_id)
            del self.sequences[seq_id]

    def check_agreement(self) -> None:
        """Compare the digests of all ranks: a silent divergence becomes an error. *Collective*.

        *Raises* RuntimeError on rank 0 naming the ranks that went another way: a bug, or memory gone bad.
        """
        gathered = self.comm.gather(torch.tensor([self.digest], dtype=torch.float64))  # 32 bits fit exactly
        if gathered is not None and bool((gathered != gathered[0]).any()):
            strayed = (gathered != gathered[0]).nonzero().flatten().tolist()
            raise RuntimeError(f"ranks {strayed} took other steps than rank 0; the answers cannot be trusted")

    def step(self) -> Computed | None:
        """Compute the next step. *Collective*.

        None if a burst is what comes next: its steps are launched. On rank 0 `read` has the tokens of bursts.
        """
        if self.burst is not None:
            self._launch(self.burst)
            return None
        rows = self.scheduler.schedule(self._drafts)
        if self._can_burst(rows):
            self.burst = self._begin([row.sequence for row in rows])
            self._launch(self.burst)
            return None
        marks = self.profiler.marks(rows)
        last_tokens = None if self.burst_backend is None else self.burst_backend.last_tokens
        batch = build_batch(rows, self.scheduler.pool.page_size, self.device, last_tokens)
        local_logits = self.backend.run(batch, marks)
        sampled = [row.sequence for row in rows if row.is_sampled]
        if sampled and self._can_choose(len(sampled), local_logits.shape[0]):
            self._choose(rows, sampled, local_logits)
            return Computed(rows)
        self.scheduler.complete(rows)
        if batch.logit_idx.numel() == 0:
            return Computed(rows)
        logits = self.comm.gather(local_logits)
        return Computed(rows, None if logits is None else logits[:, : self.full_vocab])

    def read(self, burst: Burst) -> list[list[int]]:
        """The tokens of the next unread step of the running burst, or of the one before, by row. Rank 0 only; waits for them."""
        return self.burst_backend.read(burst)

    def room_ahead(self, limit: int) -> int:
        """How many steps, at most `limit`, the running burst could be continued by."""
        return self._room(self.burst.lengths, limit, self.burst.width)

    def can_go_ahead(self) -> bool:
        """Whether the step after the running burst could be scheduled before the burst's tokens are known, as far as this replica
        can tell: the device chooses behind it, and no row loses its pages, for what to compute again would not be known."""
        backend, running = self.burst_backend, self.scheduler.running.values()
        if self.burst.num_drafts or self.profiler.is_active or self.scheduler.limits.max_batch > backend.max_rows:
            return False
        lengths = {sequence: sequence.num_tokens - 1 for sequence in running} | self.burst.lengths
        return self.scheduler.room_ahead(lengths, 1) > 0

    def _can_choose(self, num_sampled: int, num_logits: int) -> bool:
        """Whether the device chooses the next tokens of a step's `num_sampled` rows, of which there are `num_logits`."""
        if not self._is_chosen_alone or self.burst_backend is None:
            return False
        return num_sampled == num_logits <= self.burst_backend.max_rows

    def _choose(self, rows: list[ScheduledRow], sampled: list[Sequence], local_logits: torch.Tensor) -> None:
        """Choose the next tokens of `sampled`: the first step of a burst. It goes on at once where all rows have an answer and
        nobody else could join: then the host has no part in the border between prefill and decode."""
        self.burst = self.burst_backend.choose(sampled, local_logits)
        num_more = min(sequence.max_output - sequence.num_output for sequence in sampled) - 1
        for row in rows:
            self.scheduler.complete([row], num_open=int(row.is_sampled))
        self._burst_steps, self.burst.is_settled = min(num_more, MAX_BURST_STEPS), self._is_settled(len(sampled))
        if self._burst_steps > 0 and self.burst.is_settled:
            self._launch(self.burst)

    def _is_settled(self, num_sampled: int) -> bool:
        """Whether the next step would be one of a burst, without drafts, of those `num_sampled` rows."""
        scheduler, backend = self.scheduler, self.burst_backend
        is_full = len(scheduler.running) >= scheduler.limits.max_batch
        is_plain = self._num_drafts == 0 and not self.profiler.is_active
        return is_plain and num_sampled == len(scheduler.running) <= backend.max_rows and (is_full or not scheduler.waiting)

    def _can_burst(self, rows: list[ScheduledRow]) -> bool:
        """Whether the step of `rows` can be the first of a burst: all that runs is in steady decode."""
        if self._burst_steps == 0 or self.burst_backend is None or len(rows) > self.burst_backend.max_rows:
            return False
        is_whole = len(rows) == len(self.scheduler.running)
        return is_whole and all(row.is_decode and not row.draft_ids for row in rows)

    def _begin(self, sequences: list[Sequence]) -> Burst:
        """With as many drafts as rank 0 asks for; or none where there is no room for them, or where what a row says within a step
        would change what it may say next: rank 0 knows which rows are here, and not for certain which of them run."""
        lengths = {sequence: sequence.num_computed for sequence in sequences}
        has_room = self._room(lengths, 1, 1 + self._num_drafts) > 0
        is_free = not any(sequence.rules.is_penalised for sequence in sequences)
        return self.burst_backend.begin(sequences, self._num_drafts if has_room and is_free else 0)

    def _room(self, lengths: dict[Sequence, int], limit: int, width: int) -> int:
        """How many steps of `width` tokens a row, at most `limit`, there are pages and positions for."""
        left = min(sequence.max_tokens_total - length for sequence, length in lengths.items())
        return self.scheduler.room_ahead(lengths, min(limit, left // width), width)

    def _launch(self, burst: Burst) -> None:
        """As many of the steps that rank 0 allows as there is room for."""
        lengths = burst.lengths
        num_steps = self._room(lengths, self._burst_steps, burst.width)
        if num_steps > 0:
            self.scheduler.reserve_ahead(lengths, num_steps, burst.width)
            self.burst_backend.launch(burst, num_steps)


def build_batch(
    rows: list[ScheduledRow], page_size: int, device: torch.device, last_tokens: LastTokens | None = None
) -> StepBatch:
    """Lay the scheduled tokens of `rows` one after the other; `last_tokens` has those that only the device knows.

    *Stream*: all goes to `device` in one copy, not waited for.
    """
    token_ids: list[int] = []
    ahead: list[tuple[int, int]] = []  # where, and of which row on the device
    logit_idx: list[int] = []
    spans: list[RowSpan] = []
    for row in rows:
        sequence, start = row.sequence, len(token_ids)
        token_ids += sequence.token_ids[row.first : row.first + row.num_tokens - len(row.draft_ids)]
        token_ids += row.draft_ids
        if sequence.num_ahead:
            ahead.append((start, last_tokens.rows[sequence]))
            token_ids.append(0)
        spans.append(RowSpan(start, row.num_tokens, row.first, tuple(sequence.pages), row.num_logits))
        logit_idx += range(start + row.num_tokens - row.num_logits, start + row.num_tokens)
    page_table = numpy.zeros((len(spans), max(len(span.pages) for span in spans)), numpy.int64)
    for idx, span in enumerate(spans):
        page_table[idx, : len(span.pages)] = span.pages
    positions = numpy.concatenate([numpy.arange(span.context_len, span.kv_len) for span in spans])
    row_idx = numpy.repeat(numpy.arange(len(spans)), [span.num_tokens for span in spans])
    slots = page_table[row_idx, positions // page_size] * page_size + positions % page_size
    parts = (
        numpy.array(token_ids, numpy.int64), positions, slots, numpy.array(logit_idx, numpy.int64), page_table.ravel(),
        *numpy.array(ahead, numpy.int64).reshape(-1, 2).T,
    )  # fmt: skip
    words = upload(torch.from_numpy(numpy.concatenate(parts)), device)
    *flat, pages, at, device_rows = words.split([part.size for part in parts])
    if ahead:
        flat[0].index_copy_(0, at, last_tokens.ids.index_select(0, device_rows))
    return StepBatch(*flat, tuple(spans), pages.view(page_table.shape))
