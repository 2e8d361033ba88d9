"""The graphs of a profiled run on a CPU: a graph that is made up notes what was captured and does it again at every replay."""

from __future__ import annotations

import contextlib

import pytest
import torch

from engine.graph import step
from engine.graph.operators import TorchOperators
from engine.graph.row_state import RowState
from engine.graph.step import GraphStep, buckets_for
from engine.profile.marks import NO_MARKS, STAGES, Launches
from engine.profile.profiler import BURST_PERIOD
from tests.cpu.engine_harness import CPU, answer
from tests.cpu.test_profile import rows
from tests.cpu.tiny import make_model, save_model

NUM_KERNELS = 35


class MadeUpGraphs:
    """In the place of torch's graphs and of `decode_step`: within a capture a step is noted and not run."""

    def __init__(self, monkeypatch):
        self.capturing, self.replayed, self.decode_step = None, [], step.decode_step
        monkeypatch.setattr(step, "decode_step", self.run)
        monkeypatch.setattr(step, "count_kernel_nodes", lambda graph: NUM_KERNELS)
        for name, value in (
            ("CUDAGraph", lambda keep_graph=False: MadeUpGraph(self, keep_graph)),
            ("graph", self.capture),
            ("graph_pool_handle", lambda: 0),
            ("Stream", lambda: None),
            ("stream", lambda stream: contextlib.nullcontext()),
            ("synchronize", lambda: None),
        ):
            monkeypatch.setattr(torch.cuda, name, value)

    @contextlib.contextmanager
    def capture(self, graph, **options):
        self.capturing = graph
        yield
        self.capturing = None

    def run(self, *args):
        if self.capturing is None:
            self.decode_step(*args)
        else:
            self.capturing.args = args


class MadeUpGraph:
    def __init__(self, graphs: MadeUpGraphs, is_kept: bool):
        self.graphs, self.is_kept, self.is_ready, self.args = graphs, is_kept, not is_kept, ()

    def raw_cuda_graph(self):
        assert self.is_kept
        return self

    def instantiate(self):
        self.is_ready = True

    def replay(self):
        assert self.is_ready
        operators, device_rows, *marks = self.args
        is_marked = marks[0] is not NO_MARKS
        self.graphs.replayed.append((len(device_rows), is_marked))
        if is_marked:  # its events get new times
            launches = marks[0].launches
            marks[0].__init__(marks[0]._clock)
            marks[0].launches = launches
        self.graphs.decode_step(*self.args)


@pytest.mark.parametrize("is_profiled", (True, False))
def test_a_profiled_step_is_the_variant_of_its_bucket(tmp_path, monkeypatch, is_profiled):
    model = save_model(make_model("qwen2", max_position_embeddings=256), tmp_path)
    plain = answer(model, rows(), max_batch=4)
    made, profilers = MadeUpGraphs(monkeypatch), []

    def bursts(replica):
        backend, limits = replica.backend, replica.scheduler.limits
        profilers.append(replica.profiler)
        operators = TorchOperators(
            backend.config, backend.plan, backend.weights, replica.comm, backend.kv, num_ids=replica.full_vocab
        )
        max_pages = -(-limits.max_model_len // backend.kv.page_size)
        state = RowState(buckets_for(limits.max_batch)[-1], max_pages, replica.full_vocab, CPU, replica.comm.check)
        return GraphStep(operators, state, limits.max_batch, replica.profiler)

    run = answer(model, rows(), bursts=bursts, max_batch=4, is_profiled=is_profiled)
    assert run.answers == plain.answers and run.stats.num_waits == 0
    wanted = [(4, is_profiled and number % BURST_PERIOD == 1) for number in range(39)]  # the second of a burst, and so on
    assert made.replayed == wanted
    if is_profiled:
        burst = profilers[0].profile().kinds["burst"]
        assert burst.launches == Launches(0, NUM_KERNELS) and all(burst.stages[stage] > 0 for stage in STAGES)
        assert sum(burst.stages.values()) == pytest.approx(burst.wall_us)
        steps = [profiled for profiled in profilers[0].profile().steps if profiled.work.kind == "burst"]
        assert all(span.us >= 0 for profiled in steps for span in profiled.spans), "times of another replay"
