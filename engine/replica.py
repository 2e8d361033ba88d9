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
    """The `rows` of a step, and what it says about their next tokens: on rank 0 the fp32 `logits` asked for, `[n, full_vocab]`;
    or `chosen`, whose next unread step has the tokens of the rows that are sampled. If that is the running burst, its other steps
    are launched already."""

    rows: list[ScheduledRow]
    logits: torch.Tensor | None = None
    chosen: Burst | None = None


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
            take = self.scheduler.append if self.burst is None else self.scheduler.advance
            take(self.sequences[seq_id], token_ids)
        if self.burst is not None:
            self.burst.num_applied += message.steps_read
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

        None if a burst is what comes next: its steps are launched, and on rank 0 `read_burst` has their tokens.
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
        batch = build_batch(rows, self.scheduler.pool.page_size, self.device)
        local_logits = self.backend.run(batch, marks)
        sampled = [row.sequence for row in rows if row.is_sampled]
        if sampled and self._can_choose(len(sampled), local_logits.shape[0]):
            return Computed(rows, chosen=self._choose(rows, sampled, local_logits))
        self.scheduler.complete(rows)
        if batch.logit_idx.numel() == 0:
            return Computed(rows)
        logits = self.comm.gather(local_logits)
        return Computed(rows, None if logits is None else logits[:, : self.full_vocab])

    def read_choice(self, chosen: Burst) -> list[list[int]]:
        """The tokens of a step that no burst went on from. Rank 0 only; waits for them."""
        return self.burst_backend.read(chosen)

    def read_burst(self) -> list[list[int]]:
        """The tokens of the running burst's next unread step, by row. Rank 0 only; waits for them."""
        return self.burst_backend.read(self.burst)

    def room_ahead(self, limit: int) -> int:
        """How many steps, at most `limit`, the running burst could be continued by."""
        return self._room(self.burst.lengths, limit, self.burst.width)

    def _can_choose(self, num_sampled: int, num_logits: int) -> bool:
        """Whether the device chooses the next tokens of a step's `num_sampled` rows, of which there are `num_logits`."""
        if not self._is_chosen_alone or self.burst_backend is None:
            return False
        return num_sampled == num_logits <= self.burst_backend.max_rows

    def _choose(self, rows: list[ScheduledRow], sampled: list[Sequence], local_logits: torch.Tensor) -> Burst:
        """Choose the next tokens of `sampled`, and go on at once with steps of a burst, where all rows have an answer and nobody
        else could join: then the host has no part in the border between prefill and decode."""
        chosen = self.burst_backend.choose(sampled, local_logits)
        num_more = min(sequence.max_output - sequence.num_output for sequence in sampled) - 1
        lengths = {sequence: len(sequence.token_ids) for sequence in sampled}
        num_steps = self._room(lengths, min(num_more, MAX_BURST_STEPS), 1) if self._is_settled(len(sampled)) else 0
        self.scheduler.complete(rows, num_open=int(num_steps > 0))
        if num_steps > 0:
            self.burst, self._burst_steps = chosen, num_steps
            self._launch(chosen)
        return chosen

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
        """With as many drafts as rank 0 asks for, or none where there is no room for them."""
        lengths = {sequence: sequence.num_computed for sequence in sequences}
        has_room = self._room(lengths, 1, 1 + self._num_drafts) > 0
        return self.burst_backend.begin(sequences, self._num_drafts if has_room else 0)

    def _room(self, lengths: dict[Sequence, int], limit: int, width: int) -> int:
        """How many steps of `width` tokens a row, at most `limit`, there are pages and positions for."""
        left = min(sequence.max_tokens_total - length for sequence, length in lengths.items())
        return self.scheduler.room_ahead(lengths, min(limit, left // width), width)

    def _launch(self, burst: Burst) -> None:
        """As many of the steps that rank 0 allows as there is room for."""
        lengths = burst.lengths
        num_steps = self._room(lengths, self._burst_steps, burst.width)
        self.scheduler.reserve_ahead(lengths, num_steps, burst.width)
        self.burst_backend.launch(burst, num_steps)


def build_batch(rows: list[ScheduledRow], page_size: int, device: torch.device) -> StepBatch:
    """Lay the scheduled tokens of `rows` one after the other. *Stream*: all goes to `device` in one copy, not waited for."""
    token_ids: list[int] = []
    logit_idx: list[int] = []
    spans: list[RowSpan] = []
    for row in rows:
        sequence, start = row.sequence, len(token_ids)
        token_ids += sequence.token_ids[row.first : row.first + row.num_tokens - len(row.draft_ids)]
        token_ids += row.draft_ids
        spans.append(RowSpan(start, row.num_tokens, row.first, tuple(sequence.pages), row.num_logits))
        logit_idx += range(start + row.num_tokens - row.num_logits, start + row.num_tokens)
    page_table = numpy.zeros((len(spans), max(len(span.pages) for span in spans)), numpy.int64)
    for idx, span in enumerate(spans):
        page_table[idx, : len(span.pages)] = span.pages
    positions = numpy.concatenate([numpy.arange(span.context_len, span.kv_len) for span in spans])
    row_idx = numpy.repeat(numpy.arange(len(spans)), [span.num_tokens for span in spans])
    slots = page_table[row_idx, positions // page_size] * page_size + positions % page_size
    parts = (numpy.array(token_ids, numpy.int64), positions, slots, numpy.array(logit_idx, numpy.int64), page_table.ravel())
    words = upload(torch.from_numpy(numpy.concatenate(parts)), device)
    *flat, pages = words.split([part.size for part in parts])
    return StepBatch(*flat, tuple(spans), pages.view(page_table.shape))
