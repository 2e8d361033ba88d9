"""From settings to a replica that can step: configuration, plan, weights, KV cache, in that order, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from comm.choice import connect
from comm.communicator import Communicator
from comm.device_communicator import DeviceCommunicator
from comm.loopback import LoopbackCommunicator
from comm.single import SingleCommunicator
from engine.checkpoint import Checkpoint
from engine.config import ModelConfig, load_config
from engine.eager import EagerStep
from engine.graph.loading import DraftModel, obstacle_to_graphs, open_graphs, speculates_on_device
from engine.kv_cache import KvCache
from engine.memory import choose_num_pages, page_bytes
from engine.pages import PagePool
from engine.phases import Phases
from engine.profile.clock import clock_of
from engine.profile.profiler import Profiler
from engine.profile.step_profiler import NO_PROFILER
from engine.replica import Replica
from engine.scheduler import Limits, Scheduler
from engine.settings import DRAFT_PLACEMENTS, DRAFT_WAITS, MAX_NUM_DRAFTS, EngineSettings
from engine.shapes import named_config
from engine.shard_plan import ShardPlan
from engine.weights import ModelWeights, dummy_weights, load_weights
from kernels.fp8_linear import WAYS
from launch.errors import KernelBuildError, ModelError, UsageError
from launch.world import World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_STEP_TOKENS = {"cpu": 512, "cuda": 4096}


@dataclass(frozen=True)
class Blueprint:
    """All that is known before a weight is read. Making one has no cost and refuses what cannot work.

    `dtype`: of activations, of the KV cache, and of all weights that are not FP8; `is_fp8`: whether the matrices are.
    `draft`: the draft model's own, whole, as if it ran alone; None without one. `graph_draft`: the same as this rank has it in
    graphs, if it has it: a shard where the draft model is split over the ranks.
    """

    settings: EngineSettings
    config: ModelConfig
    plan: ShardPlan
    checkpoint: Checkpoint | None
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    notes: tuple[str, ...]
    draft: Blueprint | None = None
    graph_draft: Blueprint | None = None

    @property
    def is_fp8(self) -> bool:
        return self.settings.dtype == "fp8"


def draw_blueprint(settings: EngineSettings, world: World) -> Blueprint:
    """Check everything that can be checked without reading weights. Same outcome on every rank.

    *Raises* `ModelError` or `UsageError` naming what is wrong.
    """
    if settings.fp8_products not in WAYS:
        raise UsageError(f"fp8_products must be {' or '.join(WAYS)}, not {settings.fp8_products!r}")
    check_speculation(settings)
    check_shard_of(settings, world)
    config, checkpoint = _open_model(settings)
    plan = ShardPlan.make(config, settings.shard_of or world.size, world.rank)
    device = torch.device(world.device)
    dtype, notes = choose_dtype(settings.dtype, config, device)
    max_model_len = settings.max_model_len or config.max_positions
    if max_model_len > config.max_positions:
        raise UsageError(
            f"--max-model-len {max_model_len} is past the model's limit of {config.max_positions} positions; "
            "a longer context needs a rope scaling entry (such as yarn) in the model's config.json"
        )
    notes += _shard_notes(settings) + config.notes + (() if checkpoint is None else tuple(checkpoint.notes))
    draft = _draw_draft(settings, device, max_model_len)
    graph_draft = _split_draft(draft, plan) if draft is not None and settings.draft_placement == "split" else draft
    return Blueprint(settings, config, plan, checkpoint, device, dtype, max_model_len, notes, draft, graph_draft)


def check_speculation(settings: EngineSettings) -> None:
    """*Raises* `UsageError` for options that contradict each other or would go unused."""
    if settings.is_ngram and settings.draft_model is not None:
        raise UsageError("--ngram and --draft-model are two sources of drafts; give one of them")
    if settings.num_drafts is not None and not settings.is_ngram and settings.draft_model is None:
        raise UsageError("--num-drafts goes with --ngram or --draft-model")
    if settings.num_drafts is not None and not 1 <= settings.num_drafts <= MAX_NUM_DRAFTS:
        raise UsageError(f"--num-drafts must be 1 to {MAX_NUM_DRAFTS}, not {settings.num_drafts}")
    if settings.max_speculative_rows is not None and not settings.is_ngram and settings.draft_model is None:
        raise UsageError("--max-speculative-rows goes with --ngram or --draft-model")
    if settings.max_speculative_rows is not None and settings.max_speculative_rows < 1:
        raise UsageError(f"--max-speculative-rows must be a number of rows from 1 on, not {settings.max_speculative_rows}")
    if settings.draft_placement not in DRAFT_PLACEMENTS:
        raise UsageError(f"--draft-placement must be {' or '.join(DRAFT_PLACEMENTS)}, not {settings.draft_placement!r}")
    if settings.draft_placement != DRAFT_PLACEMENTS[0] and settings.draft_model is None:
        raise UsageError("--draft-placement goes with --draft-model")
    if settings.draft_wait not in DRAFT_WAITS:
        raise UsageError(f"--draft-wait must be {' or '.join(DRAFT_WAITS)}, not {settings.draft_wait!r}")
    if settings.draft_wait != DRAFT_WAITS[0] and settings.draft_placement != "first":
        raise UsageError("--draft-wait goes with --draft-placement first, where drafts are handed on")
    if settings.draft_kv_memory_bytes is not None and settings.draft_model is None:
        raise UsageError("--draft-kv-memory goes with --draft-model")


def check_shard_of(settings: EngineSettings, world: World) -> None:
    """*Raises* `UsageError` where `shard_of` does not go with the way the processes were started."""
    if settings.shard_of is None:
        return
    if settings.shard_of < 1:
        raise UsageError(f"--shard-of must be a number of ranks from 1 on, not {settings.shard_of}")
    if world.size > 1:
        raise UsageError(f"--shard-of computes one shard in a single process, but torchrun started {world.size}")
    if settings.is_gpu_sharing:
        raise UsageError("--shard-of computes one shard in a single process; it has no GPU to share")


def _shard_notes(settings: EngineSettings) -> tuple[str, ...]:
    if settings.shard_of is None:
        return ()
    return (
        f"--shard-of {settings.shard_of}: this process computes the shard of rank 0 of {settings.shard_of} and adds nothing from "
        "the others, so its answers are meaningless; only its times and memory are those of a rank, without communication",
    )


def open_communicator(settings: EngineSettings, world: World) -> Communicator:
    """The way to the peers that the settings ask for. *Collective*. *Raises* as `comm.choice.connect`, and `UsageError` where a
    shard without peers is to add in a certain way."""
    if settings.shard_of is not None:
        if settings.all_reduce != "auto":
            raise UsageError(f"--all-reduce {settings.all_reduce} is how ranks add, and --shard-of adds nothing")
        return LoopbackCommunicator(settings.shard_of)
    return connect(world, settings.comm, all_reduce=settings.all_reduce)


def _draw_draft(settings: EngineSettings, device: torch.device, max_model_len: int) -> Blueprint | None:
    """The draft model is loaded like the target (format, device, dtype), but whole, on one rank."""
    if settings.draft_model is None:
        return None
    own = replace(
        settings, model=settings.draft_model, max_model_len=None, draft_model=None, num_drafts=None, draft_kv_memory_bytes=None,
        max_speculative_rows=None, shard_of=None, draft_placement=DRAFT_PLACEMENTS[0], draft_wait=DRAFT_WAITS[0],
    )  # fmt: skip
    try:
        draft = draw_blueprint(own, World(device=device))
    except (ModelError, UsageError) as error:
        raise type(error)(f"--draft-model: {error}") from None
    return replace(draft, max_model_len=min(draft.max_model_len, max_model_len))


def _split_draft(draft: Blueprint, target: ShardPlan) -> Blueprint:
    """The shard of the draft model that goes with the shard `target`. *Raises* `ModelError` for too many ranks."""
    try:
        return replace(draft, plan=ShardPlan.make(draft.config, target.size, target.rank))
    except ModelError as error:
        raise ModelError(f"--draft-placement split: {error}") from None


def _open_model(settings: EngineSettings) -> tuple[ModelConfig, Checkpoint | None]:
    folder = Path(settings.model)
    if settings.load_format == "dummy":
        return (load_config(folder) if folder.is_dir() else named_config(settings.model)), None
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise ModelError(
            f"model folder {settings.model!r} {what}; give a Hugging Face model folder, or run 'make model' for the default one"
        )
    config = load_config(folder)
    return config, Checkpoint.open(folder, config)


def choose_dtype(asked: str, config: ModelConfig, device: torch.device) -> tuple[torch.dtype, tuple[str, ...]]:
    """The dtype of weights and activations, and what a user should know about the choice."""
    if asked in ("auto", "fp8"):
        return (torch.bfloat16 if device.type == "cuda" else torch.float32), ()
    dtype = DTYPES[asked]
    if dtype is torch.float16 and device.type == "cpu":
        raise UsageError("--dtype float16 is not supported on a CPU; use float32 (exact) or bfloat16")
    if dtype is torch.float16 and config.family == "qwen2":
        return dtype, ("float16 can overflow in Qwen2.5's last layers, which gives garbage or NaN; bfloat16 is safe",)
    if dtype is torch.bfloat16 and device.type == "cpu":
        return dtype, ("bfloat16 on a CPU is slow unless the CPU has bf16 instructions; float32 is the default there",)
    return dtype, ()


STOCK_BYTES = 512 << 20  # of activations; steps of small models, which is what ranks share GPUs for, stay below


def _stock_up(device: torch.device, is_gpu_sharing: bool) -> None:
    """Let torch hold memory for the steps to come; after captures, which give back what it holds. Where ranks share a GPU, asking
    for more waits for the peers' kernels, and these may wait for this rank: eight ranks stood still so until the deadline.
    """
    if is_gpu_sharing and device.type == "cuda":
        torch.empty(STOCK_BYTES, dtype=torch.uint8, device=device)


def build_replica(
    blueprint: Blueprint,
    world: World,
    comm: Communicator,
    progress: Callable[[int, int], None] | None = None,
    num_ids: int | None = None,
    phases: Phases | None = None,
) -> Replica:
    """Read the weights, reserve the KV cache, and set up graphs if there are to be any. *Collective*.

    `progress(done_bytes, total_bytes)`. `num_ids`, on rank 0: ids that the tokenizer has; None for the whole vocabulary.
    `phases`: is told of the ends of `weights` (with the cache) and `graphs` (kernels that had to be built included).
    """
    phases = phases or Phases()
    settings, config, plan = blueprint.settings, blueprint.config, blueprint.plan
    weights = load_blueprint_weights(blueprint, progress)
    draft = blueprint.graph_draft if speculates_on_device(settings, blueprint.device, comm) else None
    if draft is not None and settings.draft_kv_memory_bytes is not None:
        raise UsageError("--draft-kv-memory is not for graphs, where the draft model has the target's pages; give --kv-memory")
    is_handed = draft is not None and settings.draft_placement == "first" and isinstance(comm, DeviceCommunicator)
    has_draft = draft is not None and not (is_handed and comm.rank)
    draft_weights = load_blueprint_weights(draft) if has_draft else None
    draft_page = page_bytes(draft.config, draft.plan, draft.dtype, settings.page_size) if has_draft else 0
    num_pages = choose_num_pages(
        settings, config, plan, blueprint.dtype, blueprint.device, blueprint.max_model_len, world.local_size, comm, draft_page
    )
    kv = _allocate_cache(blueprint, num_pages)
    draft_step = None
    if has_draft:
        draft_comm = comm if draft.plan.size > 1 else SingleCommunicator()
        draft_step = EagerStep(draft.config, draft.plan, draft_weights, draft_comm, _allocate_cache(draft, num_pages))
    draft_model = None if draft is None else DraftModel(draft_step, settings.draft_model, is_handed)
    phases.end("weights")
    is_cpu = blueprint.device.type == "cpu"
    pool = PagePool(num_pages, settings.page_size, settings.is_prefix_reuse, is_contiguous=is_cpu)
    scheduler = Scheduler(scheduler_limits(blueprint, num_pages), pool)
    backend = EagerStep(config, plan, weights, comm, kv)
    profiler = Profiler(clock_of(blueprint.device)) if settings.is_profiled else NO_PROFILER
    replica = Replica(scheduler, backend, comm, config.full_vocab, blueprint.device, profiler)
    stock_up = partial(_stock_up, blueprint.device, settings.is_gpu_sharing)
    replica.why_single = obstacle_to_graphs(settings, blueprint.device, comm)
    if not replica.why_single:
        num_ids = comm.broadcast_ints([config.full_vocab if num_ids is None else num_ids] if comm.rank == 0 else None)[0]
        try:
            replica.burst_backend, replica.backend = open_graphs(
                backend, num_ids, scheduler.limits, settings, stock_up, profiler, draft_model, ranks_per_gpu(settings, world)
            )
        except (KernelBuildError, ImportError) as error:
            # The others may not have met it; and guesses are not made without graphs, once they were to be made in them.
            if comm.size > 1 or speculates_on_device(settings, blueprint.device, comm):
                raise
            replica.why_single = f"the kernels are not to be had: {error}"
    stock_up()
    phases.end("graphs")
    return replica


def _allocate_cache(blueprint: Blueprint, num_pages: int) -> KvCache:
    config, page_size = blueprint.config, blueprint.settings.page_size
    heads = blueprint.plan.local_kv_heads
    return KvCache.allocate(
        config.num_layers, num_pages, page_size, heads, config.head_dim, blueprint.dtype, blueprint.device
    )


def ranks_per_gpu(settings: EngineSettings, world: World) -> int:
    """The most that any GPU of this machine has."""
    return -(-world.local_size // torch.cuda.device_count()) if settings.is_gpu_sharing else 1


def load_blueprint_weights(blueprint: Blueprint, progress: Callable[[int, int], None] | None = None) -> ModelWeights:
    """This rank's weights, read or random. `progress(done_bytes, total_bytes)`."""
    if blueprint.checkpoint is None:
        seed = blueprint.settings.dummy_seed
        return dummy_weights(blueprint.config, blueprint.plan, blueprint.dtype, blueprint.device, seed, blueprint.is_fp8)
    return load_weights(blueprint.checkpoint, blueprint.plan, blueprint.dtype, blueprint.device, progress, blueprint.is_fp8)


def scheduler_limits(blueprint: Blueprint, num_pages: int) -> Limits:
    """The limits of a step, given the KV cache."""
    settings = blueprint.settings
    return Limits(
        max_batch=settings.max_batch,
        max_step_tokens=settings.max_step_tokens or DEFAULT_STEP_TOKENS[blueprint.device.type],
        max_model_len=min(blueprint.max_model_len, num_pages * settings.page_size),
    )
