"""Runs the whole engine inside one process: every rank a thread, the real loop, scheduler, sampler and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comm.single import SingleCommunicator
from comm.threads import run_ranks
from engine.byte_text import ByteText
from engine.completion import Completion
from engine.drafts.loading import build_speculation
from engine.drafts.speculation import DraftStats, Speculation
from engine.graph.drafters import ModelDrafts
from engine.graph.operators import TorchOperators
from engine.graph.prefill import TwinPrefill
from engine.graph.row_state import RowState, Speculable
from engine.graph.speculative_step import DeviceDrafter
from engine.graph.step import BurstBackend, TwinBurst
from engine.kv_cache import KvCache
from engine.leader import Leader
from engine.loading import build_replica, draw_blueprint, load_blueprint_weights
from engine.loop import Interrupted, ListSource, RequestSource, follow, lead, no_interrupt
from engine.pages import PagePool
from engine.profile.marks import NO_MARKS, Marks
from engine.replica import Replica
from engine.request import Request
from engine.run_stats import RunStats
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.settings import EngineSettings
from engine.step_batch import StepBatch
from launch.world import World

CPU = torch.device("cpu")


def request(prompt_ids: Sequence[int], row_key: object = 0, seed: int = 1, stop_ids=(), stop=(), **options) -> Request:
    """A request as `RowPreparer` would make it; `options` are those of `SamplingParams`."""
    options.setdefault("max_tokens", 16)
    return Request(list(prompt_ids), SamplingParams(**options), seed, frozenset(stop_ids), tuple(stop), row_key)


@dataclass
class Run:
    """What came out: completions a request, each rank's digest, rank 0's counters."""

    answers: list[list[Completion]] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    stats: RunStats = field(default_factory=RunStats)
    num_preemptions: int = 0
    exit_code: int = 0
    exit_codes: list[int] = field(default_factory=list)  # of the other ranks
    drafts: DraftStats | None = None

    @property
    def token_ids(self) -> list[list[int]]:
        return [list(completions[0].token_ids) for completions in self.answers]

    @property
    def texts(self) -> list[str]:
        return [completions[0].text for completions in self.answers]


def answer(
    folder: Path,
    requests: Sequence[Request],
    size: int = 1,
    text=None,
    look_ahead: int = 100,
    speculation=None,
    bursts: Callable[[Replica], BurstBackend] | None = None,
    source: RequestSource | None = None,
    interrupt: Callable[[], int | None] = no_interrupt,
    **settings,
) -> Run:
    """Answer `requests` with the model in `folder` at TP `size`; the settings are those of `EngineSettings`.

    `speculation` takes the place of the one that the settings ask for. `bursts` makes the burst backend of each rank. `source`
    hands the requests out in another way than all at once.
    """
    settings = {"threads": 1, "kv_memory_bytes": 1 << 24, **settings}

    def rank_main(comm) -> Replica:
        world = World(rank=comm.rank, size=size, local_rank=comm.rank, local_size=size)
        blueprint = draw_blueprint(EngineSettings(str(folder), **settings), world)
        own = None if comm.rank else speculation or build_speculation(blueprint, blueprint.config.full_vocab)
        replica = build_replica(blueprint, world, comm)
        replica.burst_backend = None if bursts is None else bursts(replica)
        if comm.rank:
            run.exit_codes.append(follow(replica))
        else:
            lead_all(replica, requests, run, text, look_ahead, own, source, interrupt)
        return replica

    run = Run(answers=[[] for _ in requests])
    replicas = run_ranks(size, rank_main)
    assert set(run.exit_codes) <= {run.exit_code}
    run.digests = [replica.digest for replica in replicas]
    run.num_preemptions = replicas[0].scheduler.num_preemptions
    for replica in replicas:
        assert not replica.sequences and replica.scheduler.pool.num_available == replica.scheduler.pool.num_pages
    return run


def lead_all(
    replica: Replica,
    requests: Sequence[Request],
    run: Run,
    text=None,
    look_ahead: int = 100,
    speculation: Speculation | None = None,
    source: RequestSource | None = None,
    interrupt: Callable[[], int | None] = no_interrupt,
) -> None:
    text = ByteText(replica.full_vocab) if text is None else text
    num_ids = min(replica.full_vocab, text.vocab_size)
    leader = Leader(text, replica.scheduler.limits.max_model_len, num_ids, speculation)
    run.drafts = None if speculation is None else speculation.stats
    for index, item in enumerate(requests):
        item.on_done = lambda completions, index=index: run.answers[index].extend(completions)
    try:
        lead(replica, leader, source or ListSource(list(requests)), run.stats, look_ahead, interrupt)
    except Interrupted as error:
        run.exit_code = error.exit_code


def twin_bursts(
    replica: Replica, make_drafter: Callable[[Replica], DeviceDrafter] | None = None, max_drafts: int = 16
) -> TwinBurst:
    """Bursts of the replica's own model, on the CPU; with drafts if there is a drafter."""
    step, limits = replica.backend, replica.scheduler.limits
    operators = TorchOperators(step.config, step.plan, step.weights, replica.comm, step.kv, num_ids=replica.full_vocab)
    max_pages = -(-limits.max_model_len // step.kv.page_size)
    speculable = None if make_drafter is None else Speculable(limits.max_batch, max_drafts, limits.max_model_len)
    state = RowState(limits.max_batch, max_pages, replica.full_vocab, CPU, replica.comm.check, speculable)
    return TwinBurst(operators, state, replica.profiler, None if make_drafter is None else make_drafter(replica))


def twin_draft_model(folder: Path, placement: str = "all") -> Callable[[Replica], ModelDrafts]:
    """Makes drafters of the model in `folder`, in the pages of the target: whole on every rank, or with `split` its shard."""

    def make(replica: Replica) -> ModelDrafts:
        rank, size = replica.comm.rank, replica.comm.size
        settings = EngineSettings(str(folder), draft_model=str(folder), draft_placement=placement)
        blueprint = draw_blueprint(settings, World(rank=rank, size=size, local_rank=rank, local_size=size)).graph_draft
        config, plan, target = blueprint.config, blueprint.plan, replica.backend.kv
        num_pages = target.num_slots // target.page_size
        kv = KvCache.allocate(
            config.num_layers, num_pages, target.page_size, plan.local_kv_heads, config.head_dim, torch.float32, CPU
        )
        num_ids = min(config.full_vocab, replica.full_vocab)
        comm = replica.comm if plan.size > 1 else SingleCommunicator()
        operators = TorchOperators(config, plan, load_blueprint_weights(blueprint), comm, kv, num_ids)
        limits = replica.scheduler.limits
        operators.most_single = limits.max_batch
        prefill = TwinPrefill(operators, limits, graph_tokens=32, has_logits=False)
        return ModelDrafts(operators, prefill, limits.max_step_tokens, str(folder))

    return make


class ScriptedBackend:
    """A "model" whose logits are whatever `script(token id, position)` returns: fp32 `[vocab]`, or the id to force."""

    def __init__(self, script: Callable[[int, int], torch.Tensor | int], vocab: int):
        self._script, self._vocab = script, vocab

    def run(self, batch: StepBatch, marks: Marks = NO_MARKS) -> torch.Tensor:
        rows = [torch.full((self._vocab,), -10.0) for _ in range(batch.logit_idx.numel())]
        for row, idx in zip(rows, batch.logit_idx.tolist()):
            wanted = self._script(int(batch.token_ids[idx]), int(batch.positions[idx]))
            if isinstance(wanted, torch.Tensor):
                row.copy_(wanted)
            else:
                row[wanted] = 10.0
        return torch.stack(rows) if rows else torch.empty(0, self._vocab)


def answer_scripted(
    script, requests: Sequence[Request], text, vocab: int | None = None, max_model_len: int = 4096, speculation=None
) -> Run:
    """Answer `requests` with a scripted model of `vocab` rows (default: as many as `text` has)."""
    vocab = vocab or text.vocab_size
    scheduler = Scheduler(Limits(8, 64, max_model_len), PagePool(max_model_len // 4, 16))
    replica = Replica(scheduler, ScriptedBackend(script, vocab), SingleCommunicator(), vocab, CPU)
    run = Run(answers=[[] for _ in requests])
    lead_all(replica, requests, run, text, speculation=speculation)
    return run
