"""How many KV pages a rank can hold."""

from __future__ import annotations

import torch

from comm.communicator import Communicator
from engine.config import ModelConfig
from engine.settings import DEFAULT_KV_SHARE_CPU, DEFAULT_KV_SHARE_GPU, EngineSettings
from engine.shard_plan import ShardPlan
from launch.errors import ModelError, UsageError
from launch.machine import available_memory_bytes


def page_bytes(config: ModelConfig, plan: ShardPlan, dtype: torch.dtype, page_size: int) -> int:
    """Bytes of one page on one rank: keys and values of all layers."""
    return 2 * config.num_layers * page_size * plan.local_kv_heads * config.head_dim * dtype.itemsize


def choose_num_pages(
    settings: EngineSettings,
    config: ModelConfig,
    plan: ShardPlan,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    local_ranks: int,
    comm: Communicator,
    draft_page_bytes: int = 0,
) -> int:
    """Pages of the KV cache, equal on all ranks. *Collective*. `draft_page_bytes`: of a draft model, for each.

    Never more than `max_batch` rows of `max_model_len` tokens can use.
    *Raises* `UsageError` if the asked-for memory, `ModelError` if the free memory, cannot hold a single page.
    """
    one_page = page_bytes(config, plan, dtype, settings.page_size) + draft_page_bytes
    if device.type == "cuda" and settings.is_gpu_sharing:
        comm.barrier()  # what is free is read when all ranks of the GPU hold their weights
    budget = kv_budget_bytes(settings, device, local_ranks)
    wanted = settings.max_batch * -(-max_model_len // settings.page_size)
    num_pages = min(wanted, budget // one_page, (1 << 31) // settings.page_size)
    num_pages = _smallest(num_pages, comm)
    if num_pages < 1 and settings.kv_memory_bytes is not None:
        raise UsageError(
            f"--kv-memory {budget} bytes cannot hold one KV page of {one_page} bytes "
            f"({settings.page_size} tokens, {config.num_layers} layers); give at least that much"
        )
    if num_pages < 1:
        raise ModelError(f"no memory is left for the KV cache: a page needs {one_page} bytes, {max(budget, 0)} are free")
    return num_pages


def kv_budget_bytes(settings: EngineSettings, device: torch.device, local_ranks: int) -> int:
    """Bytes for one rank's KV cache: as asked, or a share of what is free now."""
    if settings.kv_memory_bytes is not None:
        return settings.kv_memory_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading needed and let go of is free as well
        free, total = torch.cuda.mem_get_info(device)
        sharers = -(-local_ranks // torch.cuda.device_count()) if settings.is_gpu_sharing else 1
        return int(free - (1.0 - DEFAULT_KV_SHARE_GPU) * total) // sharers
    return int(available_memory_bytes() * DEFAULT_KV_SHARE_CPU) // local_ranks


def _smallest(value: int, comm: Communicator) -> int:
    # fp64 holds every int up to 2**53 exactly; pages are far fewer.
    gathered = comm.gather(torch.tensor([value], dtype=torch.float64))
    return comm.broadcast_ints(None if gathered is None else [int(gathered.min())])[0]
