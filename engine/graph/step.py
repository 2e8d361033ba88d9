"""What runs the steps of a burst: graphs on a GPU, or the step itself, again and again, as their twin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.graph.burst import Burst
from engine.graph.decode_step import decode_step
from engine.graph.operators import Operators
from engine.graph.row_state import LastTokens, RowState, Speculable
from engine.graph.speculative_step import DeviceDrafter, Judge, speculative_step
from engine.profile.marks import NO_MARKS, Launches, Marks, StageMarks
from engine.profile.step_profiler import NO_PROFILER, StepProfiler
from engine.sequence import Sequence
from kernels.accept_drafts import NOT_TAKEN
from kernels.graph_nodes import count_kernel_nodes
from kernels.launch_kernel import Kernel

REJECTED = NOT_TAKEN - 1  # in place of a token that a draft's failing left unchosen
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a captured step


class BurstBackend(Protocol):
    """Runs bursts of up to `max_rows` rows. *Collective*, but for `read`: all ranks make the same calls.

    `description`: of the steps, for the start summary. `last_tokens`: of the rows of the burst that was begun or chosen last.
    `speculable`: what bursts with drafts may be, and
    `drafter`: who guesses; None for none.
    """

    max_rows: int
    description: str
    last_tokens: LastTokens
    speculable: Speculable | None
    drafter: DeviceDrafter | None

    def begin(self, sequences: list[Sequence], num_drafts: int = 0) -> Burst:
        """A burst of rows in steady decode: one token to compute each, of the last burst those that only the device knows.
        Nothing is launched yet. With `num_drafts`, no row's rules may depend on what it said before."""

    def launch(self, burst: Burst, num_steps: int) -> None:
        """Launch the burst's next `num_steps` steps, for which the rows have pages. Waits for nothing."""

    def read(self, burst: Burst) -> list[list[int]]:
        """The tokens of the burst's next unread step, by row, at least one; `NO_TOKEN` where there was nothing to choose from.
        Waits for it."""

    def end(self, burst: Burst) -> None:
        """All of the burst's tokens that count are in its sequences."""

    def choose(self, sequences: list[Sequence], logits: torch.Tensor) -> Burst:
        """Choose the next tokens of `sequences` by what a step beside bursts says: `logits` fp32 `[len(sequences), local_vocab]`,
        those of their last tokens. The step is the first of the burst that is returned, which may go on. Only while no burst
        runs, though tokens of the last may be unread. Waits for nothing."""


@dataclass(frozen=True)
class StepKind:
    """`num_rows`: of the step, padding included."""

    num_rows: int
    is_filtered: bool = False
    num_drafts: int = 0


class _StateBackend(ABC):
    """A backend on a `RowState`: all but how a step is run. `drafter`: of steps with drafts; goes with `state.speculable`."""

    def __init__(
        self, operators: Operators, state: RowState, max_rows: int, profiler: StepProfiler, drafter: DeviceDrafter | None
    ):
        self._operators = operators  # graphs read its tables: they must outlive this object's making
        self.state, self.max_rows, self._profiler, self._drafter = state, max_rows, profiler, drafter
        self.speculable = state.speculable
        self._judge: Judge | None = None

    @property
    def drafter(self) -> DeviceDrafter | None:
        return self._drafter

    @property
    def last_tokens(self) -> LastTokens:
        return self.state.last_tokens

    def replace_drafter(self, drafter: DeviceDrafter, judge: Judge | None = None) -> None:
        """For benches: guess by another drafter from now on, and have `judge` say what holds. *Collective*. Only while no burst
        runs."""
        self._drafter, self._judge = drafter, judge

    def begin(self, sequences: list[Sequence], num_drafts: int = 0) -> Burst:
        is_filtered = any(sequence.rules.is_active(sequence.num_output) for sequence in sequences)
        if num_drafts:
            self._drafter.catch_up(sequences)
        self._prepare(StepKind(self._padded(len(sequences)), is_filtered, num_drafts))
        self.state.begin(sequences, is_filtered, num_drafts > 0)
        self._profiler.begin_burst(len(sequences), is_filtered, num_drafts)
        return Burst(list(sequences), self.state.num_launched, is_filtered, num_drafts)

    def launch(self, burst: Burst, num_steps: int) -> None:
        kind = StepKind(self._padded(len(burst.sequences)), burst.is_filtered, burst.num_drafts)
        self._prepare(kind)  # of a burst that a step beside bursts began
        with self._profiler.launching(num_steps):
            self.state.extend(burst.sequences, list(burst.lengths.values()), num_steps * burst.width)
            self._operators.comm.meet()
            for _ in range(num_steps):
                marks = self._run(kind, self._profiler.is_due())
                self._profiler.end_burst_step(marks)
        if burst.num_drafts:
            self._drafter.note_launch()
        self.state.num_launched += num_steps
        burst.num_launched += num_steps

    def read(self, burst: Burst) -> list[list[int]]:
        step, num_words = burst.first_step + burst.num_read, len(burst.sequences) * burst.width
        ids = self.state.ring.read(step, num_words, self.state.check)
        self._profiler.note_read()
        burst.num_read += 1
        rows = (ids[at : at + burst.width] for at in range(0, num_words, burst.width))
        return [[token_id for token_id in row if token_id != REJECTED] for row in rows]

    def end(self, burst: Burst) -> None:
        if burst.num_drafts:
            self._drafter.note_end(burst.sequences)

    def choose(self, sequences: list[Sequence], logits: torch.Tensor) -> Burst:
        is_filtered = any(sequence.rules.is_active(sequence.num_output) for sequence in sequences)
        self.state.begin(sequences, is_filtered)
        self.state.extend(sequences, [sequence.num_tokens - 1 for sequence in sequences], 1)
        rows = self.state.rows(len(sequences), is_filtered)
        self._operators.advance(rows, *self._operators.choose(rows, logits))
        self.state.num_launched += 1
        return Burst(list(sequences), self.state.num_launched - 1, is_filtered, num_launched=1)

    def _step(self, state: RowState, kind: StepKind, marks: Marks = NO_MARKS) -> None:
        if kind.num_drafts:
            rows = state.speculative_rows(kind.num_rows, kind.is_filtered)
            speculative_step(self._operators, self._drafter, rows, kind.num_drafts, marks, self._judge)
        else:
            decode_step(self._operators, state.rows(kind.num_rows, kind.is_filtered), marks)

    def _padded(self, num_rows: int) -> int:
        """The rows of a step for `num_rows` rows."""
        return num_rows

    @abstractmethod
    def _prepare(self, kind: StepKind) -> None:
        """Make what steps of this kind need, if it is not there."""

    @abstractmethod
    def _run(self, kind: StepKind, is_due: bool) -> Marks:
        """Launch a step; returns its marks. `is_due`: it is to have some."""


class TwinBurst(_StateBackend):
    """`BurstBackend` without graphs, on any device: the bursts of CPU tests."""

    description = "plain steps"

    def __init__(
        self,
        operators: Operators,
        state: RowState,
        profiler: StepProfiler = NO_PROFILER,
        drafter: DeviceDrafter | None = None,
    ):
        super().__init__(operators, state, state.max_rows, profiler, drafter)

    def _prepare(self, kind: StepKind) -> None:
        pass  # a step that is not captured needs nothing

    def _run(self, kind: StepKind, is_due: bool) -> Marks:
        marks = self._profiler.new_marks() if is_due else NO_MARKS
        self._step(self.state, kind, marks)
        return marks


@dataclass(frozen=True)
class ProfiledGraph:
    """A step captured with its marks, whose events are nodes of `graph`."""

    graph: torch.cuda.CUDAGraph
    marks: StageMarks


class GraphStep(_StateBackend):
    """`BurstBackend` of graphs on a GPU: one a kind of step, holding exactly one step. Rows up to the bucket are padding.

    *Collective*: captures all buckets up to that of `max_batch` rows when it is made; the GPU must be idle, as it is at start.
    The graphs of filtered steps and of steps with drafts are captured by the first burst that needs them, which waits for the
    GPU: most runs need none, or few. In a run that is profiled each graph has a variant with events between the stages.
    """

    def __init__(
        self,
        operators: Operators,
        state: RowState,
        max_batch: int,
        profiler: StepProfiler = NO_PROFILER,
        drafter: DeviceDrafter | None = None,
    ):
        self._buckets = buckets_for(max_batch)
        super().__init__(operators, state, min(max_batch, self._buckets[-1]), profiler, drafter)
        self._graphs: dict[StepKind, torch.cuda.CUDAGraph] = {}
        self._profiled: dict[StepKind, ProfiledGraph] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        torch.cuda.synchronize()  # what was loaded on other streams is there
        # The largest first: the smaller ones then fit into memory that the pool has already.
        for bucket in reversed(self._buckets):
            kind = StepKind(bucket)
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                self._step(state, kind)  # libraries make workspaces at the first call, which no graph may hold
            self._capture(kind)
        torch.cuda.synchronize()
        state.restart()
        self.description = f"graphs of {', '.join(map(str, self._buckets))} rows; {operators.description}"

    def _prepare(self, kind: StepKind) -> None:
        if kind in self._graphs:
            return
        # Nothing of the rows may run twice, so the warm-up is on rows that are not there; of a filtered step the one new part.
        weights = self._operators.weights
        with torch.inference_mode():
            torch.cuda.synchronize()
            self._operators.comm.barrier()  # to allocate is to wait for peers that share the GPU, so none of them runs anything
            state = self.state.scratch(kind.num_rows)
            rows = state.rows(kind.num_rows, kind.is_filtered)
            self._stream.wait_stream(torch.cuda.current_stream())  # which fills `state`
            with torch.cuda.stream(self._stream):
                if kind.num_drafts:
                    self._step(state, kind)
                    self._drafter.note_launch()
                else:
                    x = torch.zeros_like(weights.final_norm).expand(len(rows), -1).contiguous()
                    self._operators.choose(rows, self._operators.linear(x, weights.head))
        self._capture(kind)

    @torch.inference_mode()
    def _capture(self, kind: StepKind) -> None:
        torch.cuda.synchronize()
        # A capture frees and takes memory. Where ranks share a GPU that waits for the peers' kernels, and these may wait for this
        # rank: so nobody runs any while somebody captures.
        self._operators.comm.barrier()
        self.state.rows(kind.num_rows, kind.is_filtered)  # what only filtered steps need is not to be made by a graph
        self._graphs[kind] = self._captured(kind)
        if self._profiler.is_active:
            self._profiled[kind] = self._captured_with_marks(kind)
        self._operators.comm.barrier()

    def _captured(self, kind: StepKind) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            self._step(self.state, kind)
        return graph

    def _captured_with_marks(self, kind: StepKind) -> ProfiledGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # what it launches is counted in the graph itself
        before = Kernel.num_launched
        with self._capturing(graph):
            marks = self._profiler.new_marks()
            self._step(self.state, kind, marks)
        marks.launches = Launches(Kernel.num_launched - before, count_kernel_nodes(graph.raw_cuda_graph()))
        graph.instantiate()
        return ProfiledGraph(graph, marks)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        """Other threads (rows being read, the watch over the peers) may do as they please meanwhile."""
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def replace_drafter(self, drafter: DeviceDrafter, judge: Judge | None = None) -> None:
        super().replace_drafter(drafter, judge)
        torch.cuda.synchronize()
        for made in (self._graphs, self._profiled):
            for kind in [kind for kind in made if kind.num_drafts]:
                del made[kind]

    def _padded(self, num_rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def _run(self, kind: StepKind, is_due: bool) -> Marks:
        if not is_due:
            self._graphs[kind].replay()
            return NO_MARKS
        profiled = self._profiled[kind]
        self._profiler.settle(profiled.marks)
        profiled.graph.replay()
        return profiled.marks


def buckets_for(max_batch: int) -> tuple[int, ...]:
    """The buckets that batches of up to `max_batch` rows need; larger batches than the last bucket get none."""
    return tuple(bucket for idx, bucket in enumerate(BUCKETS) if idx == 0 or BUCKETS[idx - 1] < max_batch)
