"""From an eager step to graphs of the same model: same weights, same cache."""

from __future__ import annotations

from collections.abc import Callable

import torch

from comm.communicator import Communicator
from engine.eager import EagerStep
from engine.graph.cuda_operators import open_operators
from engine.graph.prefill import GraphPrefill, PrefillStep
from engine.graph.row_state import RowState
from engine.graph.step import BurstBackend, GraphStep, buckets_for
from engine.profile.step_profiler import NO_PROFILER, StepProfiler
from engine.scheduler import Limits
from engine.settings import EngineSettings

CAPABILITY = (9, 0)  # of the GPUs that the kernels are compiled for (`kernels.build.DEFAULT_ARCH`)


def obstacle_to_graphs(
    settings: EngineSettings, device: torch.device, comm: Communicator, capability: tuple[int, int] | None = None
) -> str:
    """Why decode steps are not captured, in a clause; empty if they are. The same on all ranks, whose GPUs are of one kind.

    `capability`: of the GPU; None asks it.
    """
    if device.type != "cuda":
        return "on a CPU"
    if settings.is_eager:
        return "as --eager asks"
    major, minor = capability or torch.cuda.get_device_capability(device)
    if (major, minor) != CAPABILITY:
        return f"our kernels are for Hopper GPUs, and this one has compute capability {major}.{minor}"
    if settings.is_ngram or settings.draft_model is not None:
        return "drafts are made between the steps"
    return "" if comm.is_capturable else f"the all-reduce {comm.name} cannot be captured"


def open_graphs(
    step: EagerStep, num_ids: int, limits: Limits, settings: EngineSettings, stock_up: Callable[[], None],
    profiler: StepProfiler = NO_PROFILER,
) -> tuple[BurstBackend, PrefillStep]:  # fmt: skip
    """What decodes and what prefills. *Collective*.

    Decode steps are captured here, for all batches up to `limits.max_batch` rows, or to the largest bucket; prompts of up to
    `settings.graph_tokens` tokens by the second of each bucket. `num_ids`: ids from here on are never chosen.
    `stock_up`: of `GraphPrefill`.
    """
    max_rows, max_pages = buckets_for(limits.max_batch)[-1], -(-limits.max_model_len // step.kv.page_size)
    operators, check = open_operators(
        step,
        num_ids,
        max_rows,
        limits.max_model_len,
        is_fp8_scaled=settings.fp8_products == "scaled",
        overlap_tokens=settings.overlap_tokens,
    )

    def check_all() -> None:
        check()
        step.comm.check()

    state = RowState(max_rows, max_pages, step.config.full_vocab, step.device, check_all)
    prefill = GraphPrefill(operators, limits, settings.graph_tokens, stock_up)
    return GraphStep(operators, state, limits.max_batch, profiler), prefill
