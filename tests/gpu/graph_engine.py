"""The engine of one GPU in a test: eager, or with graphs of either kind of operators."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from comm.single import SingleCommunicator
from engine.graph.operators import TorchOperators
from engine.graph.row_state import RowState
from engine.graph.step import GraphStep, buckets_for
from engine.loading import build_replica, draw_blueprint
from engine.replica import Replica
from engine.request import Request
from engine.settings import EngineSettings
from launch.world import World
from tests.cpu.engine_harness import Run, lead_all

STEPS = ("eager", "torch", "cuda")  # torch and cuda: graphs of torch's operators and of our own


def open_replica(folder: Path, steps: str, **settings) -> Replica:
    settings = {"kv_memory_bytes": 1 << 26, "device": "cuda", "dtype": "float32", **settings}
    world = World(device=torch.device("cuda", 0))
    torch.cuda.set_device(0)
    blueprint = draw_blueprint(EngineSettings(str(folder), is_eager=steps != "cuda", **settings), world)
    replica = build_replica(blueprint, world, SingleCommunicator())
    if steps == "torch":
        replica.burst_backend = torch_graphs(replica)
    assert (replica.burst_backend is None) == (steps == "eager"), replica.why_single
    return replica


def torch_graphs(replica: Replica) -> GraphStep:
    step, limits = replica.backend, replica.scheduler.limits
    operators = TorchOperators(step.config, step.plan, step.weights, replica.comm, step.kv, replica.full_vocab)
    max_pages = -(-limits.max_model_len // step.kv.page_size)
    state = RowState(buckets_for(limits.max_batch)[-1], max_pages, replica.full_vocab, step.device, replica.comm.check)
    return GraphStep(operators, state, limits.max_batch, replica.profiler)


def answer_on_gpu(replica: Replica, requests: Sequence[Request], **options) -> Run:
    run = Run(answers=[[] for _ in requests])
    lead_all(replica, requests, run, **options)
    assert not replica.sequences and replica.scheduler.pool.num_available == replica.scheduler.pool.num_pages
    return run
