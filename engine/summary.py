"""What is about to run, in a few lines on stderr, and the same facts as a record for the side file."""

from __future__ import annotations

from dataclasses import asdict

from comm.communicator import Communicator
from engine.frontend import Frontend
from engine.graph.step import BurstBackend
from engine.loading import Blueprint
from engine.prepare import fill_defaults
from engine.replica import Replica
from engine.rope import RopeConfig
from engine.sampling_params import SamplingParams
from engine.settings import MAX_ADAPTIVE_DRAFTS, EngineSettings
from launch.threads import ThreadChoice


def summary_lines(
    blueprint: Blueprint, frontend: Frontend, replica: Replica, comm: Communicator, threads: ThreadChoice, seed: int
) -> list[str]:
    """Lines of `name: value`. Every choice that was made for the user carries its reason."""
    config, plan, limits = blueprint.config, blueprint.plan, replica.scheduler.limits
    pool = replica.scheduler.pool
    defaults = fill_defaults(frontend.defaults.params)
    kv_tokens = pool.num_pages * pool.page_size
    facts = {
        "model": f"{blueprint.settings.model} ({config.family}, {config.num_layers} layers, hidden {config.hidden_size})",
        "dtype": describe_dtype(blueprint),
        "threads": f"{threads.number} a rank ({threads.reason})",
        "tensor parallel": f"{plan.size} ({plan.padding_summary or 'no padding'})",
        "vocabulary": f"{config.full_vocab} ({frontend.num_ids} used), {plan.local_vocab * plan.size} with padding",
        "KV cache": f"{kv_tokens} tokens in {pool.num_pages} pages; a row has up to {limits.max_model_len} tokens",
        "batch": f"up to {limits.max_batch} rows, {limits.max_step_tokens} tokens a step, "
        f"prefix reuse {'on' if pool.is_prefix_reuse else 'off'}",
        "prefill": replica.backend.description,
        "decode": describe_decode(replica),
        "rope": describe_rope(config.rope),
        "stops": ", ".join(frontend.stop_names()) or "none",
        "sampling": f"{describe_sampling(defaults)} (from {frontend.defaults.source}; seed {seed})",
        **describe_comm(comm),
        "speculation": describe_speculation(blueprint.settings, replica.burst_backend),
    }
    lines = [f"  {name:<16}{value}" for name, value in facts.items()]
    warnings = blueprint.checkpoint.warnings if blueprint.checkpoint is not None else []
    notes = [*warnings, *blueprint.notes, *frontend.defaults.notes]
    return ["doorbell:", *lines, *(f"  note: {note}" for note in notes)]


def describe_decode(replica: Replica) -> str:
    """How the tokens behind a prompt are computed."""
    backend = replica.burst_backend
    return f"one step at a time ({replica.why_single})" if backend is None else f"in bursts of {backend.description}"


def describe_dtype(blueprint: Blueprint) -> str:
    dtype = str(blueprint.dtype).removeprefix("torch.")
    return f"{f'fp8 matrices, {dtype}' if blueprint.is_fp8 else dtype} on {blueprint.device}"


def describe_comm(comm: Communicator) -> dict[str, str]:
    """The communicator with its reason, and on a line of its own which algorithm takes which messages, where that varies."""
    return {"all-reduce": f"{comm.name} ({comm.reason})"} | ({"": f"all-reduce: {comm.detail}"} if comm.detail else {})


def describe_speculation(settings: EngineSettings, backend: BurstBackend | None = None) -> str:
    """`backend`: what runs bursts, if anything does."""
    source = "n-grams of the row" if settings.is_ngram else settings.draft_model
    if not source:
        return "off"
    most, how_many = settings.num_drafts, ""
    if most is None:
        most, how_many = MAX_ADAPTIVE_DRAFTS, ", as many as pay,"
    if backend is None or backend.speculable is None:
        return f"up to {most} drafts a row and step{how_many} from {source}"
    rows = backend.speculable.max_rows
    return f"up to {most} drafts a row and step{how_many} from {backend.drafter.description}, in bursts of up to {rows} rows"


def describe_rope(rope: RopeConfig) -> str:
    scaling = "" if rope.kind == "default" else f", factor {rope.factor:g} over {rope.original_max_positions} positions"
    return f"{rope.kind}, base {rope.theta:g}{scaling}"


def describe_sampling(params: SamplingParams) -> str:
    """The options that differ from "off", in the names of a row; a row's own options come over them."""
    neutral = asdict(SamplingParams())
    changed = {name: value for name, value in asdict(params).items() if value != neutral[name]}
    changed.pop("seed", None)
    changed.setdefault("temperature", params.temperature)
    text = ", ".join(f"{name} {value}" for name, value in sorted(changed.items()))
    return text + (" [greedy]" if params.temperature == 0.0 else "")
