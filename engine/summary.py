"""What is about to run, in a few lines on stderr, and the same facts as a record for the side file."""

from __future__ import annotations

from dataclasses import asdict

from comm.communicator import Communicator
from engine.loading import Blueprint
from engine.replica import Replica
from engine.sampling_params import SamplingParams
from launch.threads import ThreadChoice


def summary_lines(
    blueprint: Blueprint,
    replica: Replica,
    comm: Communicator,
    threads: ThreadChoice,
    num_used_ids: int,
    stop_names: list[str],
    defaults: SamplingParams,
    defaults_source: str,
    seed: int,
) -> list[str]:
    """Lines of `name: value`. Every choice that was made for the user carries its reason."""
    config, plan, limits = blueprint.config, blueprint.plan, replica.scheduler.limits
    pool = replica.scheduler.pool
    kv_tokens = pool.num_pages * pool.page_size
    facts = {
        "model": f"{blueprint.settings.model} ({config.family}, {config.num_layers} layers, hidden {config.hidden_size})",
        "dtype": f"{str(blueprint.dtype).removeprefix('torch.')} on {blueprint.device}, {threads.number} threads a rank ({threads.reason})",
        "tensor parallel": f"{plan.size} ({plan.padding_summary})",
        "vocabulary": f"{config.full_vocab} ({num_used_ids} used), {plan.local_vocab * plan.size} with padding",
        "KV cache": f"{kv_tokens} tokens in {pool.num_pages} pages; a row has up to {limits.max_model_len} tokens",
        "batch": f"up to {limits.max_batch} rows, {limits.max_step_tokens} tokens a step, "
        f"prefix reuse {'on' if pool.is_prefix_reuse else 'off'}",
        "rope": config.rope.describe(),
        "stops": ", ".join(stop_names) or "none",
        "sampling": f"{describe_sampling(defaults)} (from {defaults_source}; seed {seed})",
        "all-reduce": f"{comm.name} ({comm.reason})",
    }
    lines = [f"  {name:<16}{value}" for name, value in facts.items()]
    return ["doorbell:", *lines, *(f"  note: {note}" for note in blueprint.notes)]


def describe_sampling(params: SamplingParams) -> str:
    """The options that differ from "off", in the names of a row; a row's own options come over them."""
    neutral = asdict(SamplingParams())
    changed = {name: value for name, value in asdict(params).items() if value != neutral[name]}
    changed.pop("seed", None)
    changed.setdefault("temperature", params.temperature)
    text = ", ".join(f"{name} {value}" for name, value in sorted(changed.items()))
    return text + (" [greedy]" if params.temperature == 0.0 else "")
