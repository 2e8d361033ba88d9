"""The engine from Python, alone or on every rank of a torchrun world.

    from engine.api import Engine

    with Engine("models/smollm2-135m") as engine:
        for result in engine.generate(["The sky is", "Water is"], {"max_tokens": 16}):
            print(result.text)

Under torchrun every rank runs the same script and makes the same calls; every rank gets the same results.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import torch

from engine.completion import Completion
from engine.drafts.depth import Depth
from engine.drafts.loading import build_speculation
from engine.drafts.speculation import DraftStats, Speculation
from engine.frontend import Frontend, checked_seed
from engine.graph.loading import speculates_on_device
from engine.graph.prefill import PrefillStep
from engine.leader import Leader
from engine.loading import build_replica, draw_blueprint, open_communicator
from engine.loop import ListSource, follow, lead
from engine.options import check_params, parse_options
from engine.phases import Phases
from engine.prepare import fresh_seed
from engine.profile.profiler import Profiler
from engine.refused import Refused
from engine.request import Request
from engine.rows import Row
from engine.run_stats import RunStats
from engine.sampling_params import SamplingParams
from engine.settings import EngineSettings
from launch.devices import resolve_device
from launch.environment import Environment
from launch.errors import EXIT_OK, DoorbellError, UsageError
from launch.threads import choose_threads
from launch.world import World

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Params = SamplingParams | Mapping[str, object]


@dataclass(frozen=True)
class Result:
    """The answer to one prompt: `completions` has `params.n` entries; `text` is the first one's."""

    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        return self.completions[0].text


class Engine:
    """A loaded model. *Collective*: construct, call and close it on every rank alike.

    `model` and the keywords are the fields of `EngineSettings`. `sampling`: options for all prompts, over the model's own
    generation_config.json (which `use_generation_config=False` ignores). `blueprint`: what was made of them; `replica`: this
    rank's schedule and step, for benches. `run_s`: on rank 0, seconds of the last `generate` from its first step to its last
    answer. `start_s`: seconds of the phases of the start, `blueprint` (with the tokenizer), `comm`, `weights` and `graphs`.
    *Raises* `DoorbellError` subclasses that name the cause.
    """

    def __init__(
        self,
        model: str,
        *,
        sampling: Mapping[str, object] | None = None,
        use_generation_config: bool = True,
        **settings: object,
    ):
        phases = Phases()
        environment = Environment.read()
        self.settings = EngineSettings(model=str(model), **settings)
        device = resolve_device(self.settings.device, environment, self.settings.is_gpu_sharing)
        world = World.from_environment(environment, device)
        torch.set_num_threads(choose_threads(environment, self.settings.threads).number)
        self.blueprint = blueprint = draw_blueprint(self.settings, world)
        self._frontend = Frontend.load(blueprint, sampling or {}, use_generation_config) if world.rank == 0 else None
        phases.end("blueprint")
        self.comm = open_communicator(self.settings, world)
        phases.end("comm")
        if self.comm.watch is not None:
            self.comm.watch.start()
        self._speculation = None
        if self._frontend is not None:
            is_on_device = speculates_on_device(self.settings, blueprint.device, self.comm)
            self._speculation = build_speculation(blueprint, self._frontend.num_ids, is_on_device)
        num_ids = None if self._frontend is None else self._frontend.num_ids
        self.replica = build_replica(blueprint, world, self.comm, num_ids=num_ids, phases=phases)
        self.start_s: dict[str, float] = phases.seconds
        self._leader: Leader | None = None
        if self._frontend is not None:
            limits = self.replica.scheduler.limits
            self._leader = Leader(self._frontend.text, limits.max_model_len, self._frontend.num_ids, self._speculation)
        self.stats = RunStats()
        self.run_s = 0.0

    @property
    def draft_stats(self) -> DraftStats | None:
        """How speculation has gone so far; on rank 0, None without it."""
        return None if self._speculation is None else self._speculation.stats

    def restart_drafts(self, depth: Depth | None) -> None:
        """For benches, of an engine that guesses on the device: count anew, remember nothing of what has held, and guess at as
        many tokens as `depth` says; None for none."""
        if self._leader is not None:
            self._speculation = self._leader.speculation = None if depth is None else Speculation(None, depth)

    def limit_batch(self, max_batch: int) -> None:
        """For benches: at most `max_batch` rows at once from now on, no more than the engine was made for. *Collective*. Only
        between two calls of `generate`. *Raises* ValueError for more."""
        if not 1 <= max_batch <= self.settings.max_batch:
            raise ValueError(f"an engine for {self.settings.max_batch} rows at once cannot take {max_batch}")
        self.replica.scheduler.limits = replace(self.replica.scheduler.limits, max_batch=max_batch)

    @property
    def draft_depth(self) -> Depth | None:
        return None if self._speculation is None else self._speculation.depth

    @property
    def profiler(self) -> Profiler | None:
        """This rank's, with `is_profiled`; its `profile()` says where the time of the steps so far went."""
        profiler = self.replica.profiler
        return profiler if isinstance(profiler, Profiler) else None

    @property
    def backend(self) -> str:
        """What decode steps run on: `graph` or `eager`."""
        return "eager" if self.replica.burst_backend is None else "graph"

    def prefill_step(self, num_rows: int, num_tokens: int) -> str:
        """What computes `num_rows` new prompts of `num_tokens` tokens in a step: `graph`, `kernels` (one by one), or `eager`."""
        backend = self.replica.backend
        if not isinstance(backend, PrefillStep):
            return "eager"
        return "kernels" if backend.shape_for(0, [num_tokens] * num_rows) is None else "graph"

    def prefill_attention(self, num_rows: int, num_tokens: int) -> str | None:
        """`cudnn` if it attends `num_rows` new prompts of `num_tokens` tokens in a step, once one like it has come before; None
        for what attends everything else."""
        backend = self.replica.backend
        return "cudnn" if isinstance(backend, PrefillStep) and backend.is_long([num_tokens] * num_rows) else None

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        seed: int | None = None,
        on_done: Callable[[int], None] | None = None,
    ) -> list[Result]:
        """Answers in the order of `prompts`.

        A prompt is raw text, token ids, or chat messages. `params`: one for all, or one a prompt; a mapping holds options by
        the names a JSONL row uses, over the engine's defaults. `seed` is for prompts without one of their own. `on_done(index)`
        is called on rank 0 as soon as the answer to prompt number `index` is whole.
        *Collective*. *Raises* `UsageError` before anything is generated if any prompt or option cannot be used.
        """
        requests: list[Request] = []
        refusal: str | None = None
        if self._leader is not None:
            try:
                requests = self._requests(prompts, params, fresh_seed() if seed is None else checked_seed(seed))
            except UsageError as error:
                refusal = str(error)
        refusal = self.comm.broadcast_object(refusal)
        if refusal is not None:
            raise UsageError(refusal)
        results: dict[int, list[Completion]] = {}

        def note(index: int, completions: list[Completion]) -> None:
            results[index] = completions
            if on_done is not None:
                on_done(index)

        for index, request in enumerate(requests):
            request.on_done = partial(note, index)
        if self._leader is None:
            code = follow(self.replica)
            if code != EXIT_OK:
                raise DoorbellError(f"rank 0 ended the run with exit code {code}")
            return pickle.loads(bytes.fromhex(self.comm.broadcast_object()))
        started = time.perf_counter()
        lead(self.replica, self._leader, ListSource(requests), self.stats, look_ahead=max(1, len(requests)))
        self.run_s = time.perf_counter() - started
        answers = [Result(tuple(request.prompt_ids), tuple(results[i])) for i, request in enumerate(requests)]
        if self.comm.size > 1:
            self.comm.broadcast_object(pickle.dumps(answers).hex())
        return answers

    def close(self) -> None:
        """Leave the world in order. Idempotent."""
        self.comm.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self.comm.watch is not None:
            self.comm.watch.leave(getattr(error, "exit_code", 1), str(error))
        self.close()

    def _requests(self, prompts: Sequence[Prompt], params: Params | Sequence[Params] | None, seed: int) -> list[Request]:
        if isinstance(prompts, str):
            raise UsageError("prompts must be a list of prompts; wrap a single prompt in a list")
        limits = self.replica.scheduler.limits
        preparer = self._frontend.preparer(limits.max_model_len, seed, is_chat=False)
        requests = []
        for index, (prompt, own) in enumerate(zip(prompts, self._each(params, len(prompts)))):
            try:
                requests.append(preparer.request(_row(index, prompt, self._merge(own))))
            except Refused as error:
                raise UsageError(f"prompt {index}: {error.message}") from None
        return requests

    def _each(self, params: Params | Sequence[Params] | None, num_prompts: int) -> list[Params]:
        if params is None or isinstance(params, (SamplingParams, Mapping)):
            return [params or {}] * num_prompts
        if len(params) != num_prompts:
            raise UsageError(f"{num_prompts} prompts but {len(params)} sampling params; give one for all or one each")
        return list(params)

    def _merge(self, params: Params) -> SamplingParams:
        if isinstance(params, SamplingParams):
            return check_params(params)
        return parse_options(params, self._frontend.defaults.params)


def _row(index: int, prompt: Prompt, params: SamplingParams) -> Row:
    row = Row(index, index + 1, None, None, params)
    if isinstance(prompt, str):
        return replace(row, prompt=prompt)
    items = list(prompt)
    if items and all(isinstance(item, Mapping) for item in items):
        return replace(row, messages=[dict(item) for item in items])
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return replace(row, prompt_token_ids=items)
    raise UsageError(f"prompt {index} must be text, a list of token ids, or a list of messages")
