"""What runs the steps of a burst: graphs on a GPU, or the step itself, again and again, as their twin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.graph.burst import Burst
from engine.graph.decode_step import decode_step
from engine.graph.operators import Operators
from engine.graph.row_state import DeviceRows, RowState
from engine.profile.marks import NO_MARKS, Launches, Marks, StageMarks
from engine.profile.step_profiler import NO_PROFILER, StepProfiler
from engine.sequence import Sequence
from kernels.graph_nodes import count_kernel_nodes
from kernels.launch_kernel import Kernel

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows of a captured step


class BurstBackend(Protocol):
    """Runs bursts of up to `max_rows` rows. *Collective*, but for `read`: all ranks make the same calls.

    `description`: of the steps, for the start summary.
    """

    max_rows: int
    description: str

    def begin(self, sequences: list[Sequence]) -> Burst:
        """A burst of rows in steady decode: one token to compute each. Nothing is launched yet."""

    def launch(self, burst: Burst, num_steps: int) -> None:
        """Launch the burst's next `num_steps` steps, for which the rows have pages. Waits for nothing."""

    def read(self, burst: Burst) -> list[int]:
        """The tokens of the burst's next unread step, by row; `NO_TOKEN` where there was nothing to choose from. Waits for it."""


class _StateBackend(ABC):
    """A backend on a `RowState`: all but how a step is run."""

    def __init__(self, state: RowState, max_rows: int, profiler: StepProfiler):
        self.state, self.max_rows, self._profiler = state, max_rows, profiler

    def begin(self, sequences: list[Sequence]) -> Burst:
        is_filtered = any(sequence.rules.is_active(sequence.num_output) for sequence in sequences)
        self._prepare(len(sequences), is_filtered)
        self.state.begin(sequences, is_filtered)
        self._profiler.begin_burst(len(sequences), is_filtered)
        positions = [sequence.num_computed for sequence in sequences]
        return Burst(list(sequences), self.state.num_launched, positions, is_filtered)

    def launch(self, burst: Burst, num_steps: int) -> None:
        positions = [first + burst.num_launched for first in burst.positions]
        with self._profiler.launching(num_steps):
            self.state.extend(burst.sequences, positions, num_steps)
            for _ in range(num_steps):
                marks = self._run(len(burst.sequences), burst.is_filtered, self._profiler.is_due())
                self._profiler.end_burst_step(marks)
        self.state.num_launched += num_steps
        burst.num_launched += num_steps

    def read(self, burst: Burst) -> list[int]:
        ids = self.state.ring.read(burst.first_step + burst.num_read, len(burst.sequences), self.state.check)
        self._profiler.note_read()
        burst.num_read += 1
        return ids

    @abstractmethod
    def _prepare(self, num_rows: int, is_filtered: bool) -> None:
        """Make what steps of this kind need, if it is not there."""

    @abstractmethod
    def _run(self, num_rows: int, is_filtered: bool, is_due: bool) -> Marks:
        """Launch a step; returns its marks. `is_due`: it is to have some."""


class TwinBurst(_StateBackend):
    """`BurstBackend` without graphs, on any device: the bursts of CPU tests."""

    def __init__(self, operators: Operators, state: RowState, profiler: StepProfiler = NO_PROFILER):
        super().__init__(state, state.max_rows, profiler)
        self.description = "plain steps"
        self._operators = operators

    def _prepare(self, num_rows: int, is_filtered: bool) -> None:
        pass  # a step that is not captured needs nothing

    def _run(self, num_rows: int, is_filtered: bool, is_due: bool) -> Marks:
        marks = self._profiler.new_marks() if is_due else NO_MARKS
        decode_step(self._operators, self.state.rows(num_rows, is_filtered), marks)
        return marks


@dataclass(frozen=True)
class ProfiledGraph:
    """A step captured with its marks, whose events are nodes of `graph`."""

    graph: torch.cuda.CUDAGraph
    marks: StageMarks


class GraphStep(_StateBackend):
    """`BurstBackend` of graphs on a GPU: one a bucket, holding exactly one step. Rows up to the bucket are padding.

    *Collective*: captures all buckets up to that of `max_batch` rows when it is made; the GPU must be idle, as it is at start.
    The graphs of filtered steps are captured by the first burst that needs them, which waits for the GPU: most runs need none, or
    few. In a run that is profiled each graph has a variant with events between the stages.
    """

    def __init__(self, operators: Operators, state: RowState, max_batch: int, profiler: StepProfiler = NO_PROFILER):
        self._buckets = buckets_for(max_batch)
        super().__init__(state, min(max_batch, self._buckets[-1]), profiler)
        self._operators = operators  # the graphs read its tables: they must outlive this object's making
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._profiled: dict[tuple[int, bool], ProfiledGraph] = {}
        self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        torch.cuda.synchronize()  # what was loaded on other streams is there
        # The largest first: the smaller ones then fit into memory that the pool has already.
        for bucket in reversed(self._buckets):
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                decode_step(operators, state.rows(bucket))  # libraries make workspaces at the first call, which no graph may hold
            self._capture(bucket, is_filtered=False)
        torch.cuda.synchronize()
        state.restart()
        self.description = f"graphs of {', '.join(map(str, self._buckets))} rows; {operators.description}"

    def _prepare(self, num_rows: int, is_filtered: bool) -> None:
        bucket = self._bucket(num_rows)
        if (bucket, is_filtered) in self._graphs:
            return
        # Nothing of the rows may run twice, so the warm-up is of the one part that is new, on rows that are not there.
        weights = self._operators.weights
        with torch.inference_mode():
            rows = self.state.scratch(bucket).rows(bucket, is_filtered)
            torch.cuda.synchronize()
            with torch.cuda.stream(self._stream):
                x = torch.zeros(bucket, weights.final_norm.numel(), dtype=weights.final_norm.dtype, device=rows.step.device)
                self._operators.choose(rows, self._operators.linear(x, weights.head))
        self._capture(bucket, is_filtered)

    @torch.inference_mode()
    def _capture(self, bucket: int, is_filtered: bool) -> None:
        torch.cuda.synchronize()
        # A capture frees and takes memory. Where ranks share a GPU that waits for the peers' kernels, and these may wait for this
        # rank: so nobody runs any while somebody captures.
        self._operators.comm.barrier()
        rows = self.state.rows(bucket, is_filtered)
        self._graphs[bucket, is_filtered] = self._captured(rows)
        if self._profiler.is_active:
            self._profiled[bucket, is_filtered] = self._captured_with_marks(rows)
        self._operators.comm.barrier()

    def _captured(self, rows: DeviceRows) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            decode_step(self._operators, rows)
        return graph

    def _captured_with_marks(self, rows: DeviceRows) -> ProfiledGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)  # what it launches is counted in the graph itself
        before = Kernel.num_launched
        with self._capturing(graph):
            marks = self._profiler.new_marks()
            decode_step(self._operators, rows, marks)
        marks.launches = Launches(Kernel.num_launched - before, count_kernel_nodes(graph.raw_cuda_graph()))
        graph.instantiate()
        return ProfiledGraph(graph, marks)

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        """Other threads (rows being read, the watch over the peers) may do as they please meanwhile."""
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")

    def _bucket(self, num_rows: int) -> int:
        return next(bucket for bucket in self._buckets if bucket >= num_rows)

    def _run(self, num_rows: int, is_filtered: bool, is_due: bool) -> Marks:
        place = self._bucket(num_rows), is_filtered
        if not is_due:
            self._graphs[place].replay()
            return NO_MARKS
        profiled = self._profiled[place]
        self._profiler.settle(profiled.marks)
        profiled.graph.replay()
        return profiled.marks


def buckets_for(max_batch: int) -> tuple[int, ...]:
    """The buckets that batches of up to `max_batch` rows need; larger batches than the last bucket get none."""
    return tuple(bucket for idx, bucket in enumerate(BUCKETS) if idx == 0 or BUCKETS[idx - 1] < max_batch)
