"""From an eager step to graphs of the same model: same weights, same cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from comm.communicator import Communicator
from engine.eager import EagerStep
from engine.graph.cuda_operators import FUSED_ROWS, open_operators
from engine.graph.drafters import HandedDrafts, ModelDrafts, NgramDrafts
from engine.graph.long_prompts import open_long_prompts
from engine.graph.prefill import GraphPrefill, PrefillStep
from engine.graph.row_state import RowState, Speculable
from engine.graph.speculative_step import DeviceDrafter
from engine.graph.step import BurstBackend, GraphStep, buckets_for
from engine.graph.step_shape import tokens_worth_a_graph
from engine.profile.step_profiler import NO_PROFILER, StepProfiler
from engine.scheduler import Limits
from engine.settings import DEFAULT_SPECULATIVE_ROWS, MAX_ADAPTIVE_DRAFTS, EngineSettings
from kernels.build import Build, default_cache_folder
from kernels.ngram_drafts import launch_ngram_drafts, load_ngram_drafts

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
    return "" if comm.is_capturable else f"the all-reduce {comm.name} cannot be captured"


def speculates_on_device(settings: EngineSettings, device: torch.device, comm: Communicator) -> bool:
    """Whether guesses are made and verified inside of captured steps; the same on all ranks."""
    is_asked = settings.is_ngram or settings.draft_model is not None
    return is_asked and not obstacle_to_graphs(settings, device, comm)


@dataclass(frozen=True)
class DraftModel:
    """A draft model. `step`: with weights, and a cache with a page for each of the target's; None on a rank that is handed its
    drafts. Where its plan is of several ranks, its communicator is the target's. `name`: for the start summary. `is_handed`: rank
    0 alone has the model."""

    step: EagerStep | None
    name: str
    is_handed: bool = False


def open_graphs(
    step: EagerStep, num_ids: int, limits: Limits, settings: EngineSettings, stock_up: Callable[[], None],
    profiler: StepProfiler = NO_PROFILER, draft: DraftModel | None = None, ranks_per_gpu: int = 1,
) -> tuple[BurstBackend, PrefillStep]:  # fmt: skip
    """What decodes and what prefills. *Collective*.

    Decode steps are captured here, for all batches up to `limits.max_batch` rows, or to the largest bucket; steps that prefill up
    to `settings.graph_tokens` new tokens by the second of each shape. `num_ids`: ids from here on are never chosen.
    `stock_up`: of `GraphPrefill`. `draft`: what guesses; with `settings.is_ngram` the rows themselves do. `ranks_per_gpu`: above
    1, kernels of one rank leave room for the peers'.
    """
    max_rows, max_pages = buckets_for(limits.max_batch)[-1], -(-limits.max_model_len // step.kv.page_size)
    speculable = _speculable(settings, limits) if draft is not None or settings.is_ngram else None
    operators, check = open_operators(
        step,
        num_ids,
        max_rows if speculable is None else max(max_rows, speculable.padded_rows * speculable.width),
        limits.max_model_len,
        is_fp8_scaled=settings.fp8_products == "scaled",
    )
    checks = [check, step.comm.check]
    drafter: DeviceDrafter | None = None
    if draft is not None:
        if draft.step is not None:
            drafter, check_draft = _open_draft(draft, num_ids, speculable, limits, ranks_per_gpu, settings.graph_tokens)
            checks.append(check_draft)
        if draft.is_handed:
            channels = step.comm.draft_channels(Build(default_cache_folder()), settings.draft_wait)
            drafter = HandedDrafts(drafter, channels, draft.name)
    elif settings.is_ngram:
        drafter = NgramDrafts(partial(launch_ngram_drafts, load_ngram_drafts(Build(default_cache_folder()))))

    def check_all() -> None:
        for one in checks:
            one()

    state = RowState(max_rows, max_pages, step.config.full_vocab, step.device, check_all, speculable)
    graph_tokens = settings.graph_tokens
    if graph_tokens is None:
        graph_tokens = _tokens_worth_a_graph(step, settings.dtype == "fp8" and settings.fp8_products == "scaled")
    # In a graph no rank can wait for the others before it adds the sums of many rows, as ranks that share a GPU have to.
    most_rows, long_prompts = FUSED_ROWS if ranks_per_gpu > 1 else None, open_long_prompts(step.kv.keys, ranks_per_gpu)
    prefill = GraphPrefill(operators, limits, graph_tokens, stock_up, most_rows, long_prompts)
    return GraphStep(operators, state, limits.max_batch, profiler, drafter), prefill


def _tokens_worth_a_graph(step: EagerStep, is_fp8: bool = False) -> int:
    layer = step.weights.layers[0]
    num_elems = sum(part.shape.numel() for part in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return tokens_worth_a_graph(num_elems, is_fp8)


def _speculable(settings: EngineSettings, limits: Limits) -> Speculable:
    largest = buckets_for(limits.max_batch)[-1]
    max_rows = min(limits.max_batch, settings.max_speculative_rows or DEFAULT_SPECULATIVE_ROWS, largest)
    num_padding = buckets_for(max_rows)[-1] - max_rows
    return Speculable(max_rows, settings.num_drafts or MAX_ADAPTIVE_DRAFTS, limits.max_model_len, num_padding)


def _open_draft(
    draft: DraftModel, num_ids: int, speculable: Speculable, limits: Limits, ranks_per_gpu: int, graph_tokens: int | None
) -> tuple[ModelDrafts, Callable[[], None]]:
    """The drafter, and what raises when one of its kernels gave up."""
    step, size = draft.step, draft.step.plan.size
    operators, check = open_operators(
        step, min(num_ids, step.config.full_vocab), 2 * speculable.padded_rows, limits.max_model_len, ranks_per_gpu=ranks_per_gpu
    )
    long_prompts = open_long_prompts(step.kv.keys, ranks_per_gpu)
    if ranks_per_gpu > 1:  # a capture asks for memory, which ranks that share a GPU may not do each for itself
        prefill = PrefillStep(operators, limits.max_model_len, long_prompts)
    else:
        graph_tokens = _tokens_worth_a_graph(step) if graph_tokens is None else graph_tokens
        prefill = GraphPrefill(operators, limits, graph_tokens, long_prompts=long_prompts, has_logits=False)
    name = draft.name if size == 1 else f"{draft.name}, split over {size} ranks"
    return ModelDrafts(operators, prefill, limits.max_step_tokens, name), check
