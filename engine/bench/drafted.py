"""An engine whose drafts hold at a rate that is set, and its times: of a batch that is not filled up again, and of one that is
kept full. Records and words: `engine.bench.speculate`, `engine.bench.speculate_load`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from engine.api import Engine
from engine.bench.acceptance import FreeDrafts, SetAcceptance
from engine.bench.load import run_once
from engine.bench.throughput import STEADY, Requests, TokenLog, tenths_tok_s
from engine.drafts.depth import Depth, FixedDepth
from engine.drafts.speculation import DraftStats
from engine.graph.speculative_step import DeviceDrafter
from engine.settings import MAX_ADAPTIVE_DRAFTS


@dataclass(frozen=True)
class Trial:
    """`rate`: the chance of a guess to be right. `num_drafts`: None for as many as pay."""

    rate: float
    num_drafts: int | None

    @classmethod
    def parse(cls, text: str) -> Trial:
        """*Raises* `click.BadParameter`."""
        rate, _, count = text.partition(":")
        try:
            trial = cls(float(rate), None if count == "adaptive" else int(count))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not RATE:DRAFTS, such as 0.8:5 or 0.8:adaptive") from None
        is_possible = trial.num_drafts is None or 1 <= trial.num_drafts <= MAX_ADAPTIVE_DRAFTS
        if not 0.0 <= trial.rate <= 1.0 or not is_possible:
            raise click.BadParameter(f"{text!r}: a rate is 0 to 1, and drafts are 1 to {MAX_ADAPTIVE_DRAFTS}")
        return trial


@dataclass(frozen=True)
class DraftSource:
    """`model`: of the drafts, a shape; `placement` and `wait` of `EngineSettings`."""

    model: str
    placement: str
    wait: str

    def case_of(self, trial: Trial) -> dict[str, object]:
        """What a record's case says of drafts. The wait is part of it where drafts are handed on."""
        return {
            "draft": self.model, "placement": self.placement, "rate": trial.rate, "num_drafts": trial.num_drafts or "adaptive",
            "acceptance": "set", **({"wait": self.wait} if self.placement == "first" else {}),
        }  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """`stats`: of the last run; None without drafts."""

    tpot_ms: float
    stats: DraftStats | None


@dataclass(frozen=True)
class LoadTiming:
    """`output_tok_s`: of the steady part of a run; 0 on other ranks than the first, which have no times."""

    output_tok_s: float
    stats: DraftStats | None


class Bench:
    """*Collective*: all methods. `repeats`: how often a batch that is not filled up again is timed, after once for nothing."""

    def __init__(self, engine: Engine, repeats: int):
        self._engine, self._repeats = engine, repeats
        self._backend, self._adaptive = engine.replica.burst_backend, engine.draft_depth
        self._model = self._backend.drafter
        self._acceptance = SetAcceptance(engine.blueprint.config.full_vocab, engine.replica.device)
        self._backend.replace_drafter(self._model, self._acceptance)

    def time_plain(self, prompts: Sequence[list[int]], output: int) -> float:
        """TPOT in ms without drafts, of rows with `prompts` and `output` tokens each."""
        return self._time(None, prompts, output).tpot_ms

    def time_trial(self, trial: Trial, prompts: Sequence[list[int]], output: int) -> Timing:
        return self._time(self._depth(trial), prompts, output)

    def time_verification(self, num_drafts: int, prompts: Sequence[list[int]], output: int) -> float:
        """Of a step, in ms: nobody guesses, and nothing holds."""
        self._use(FreeDrafts())
        self._acceptance.set_rate(0.0)
        tpot_ms = self._time(FixedDepth(num_drafts), prompts, output).tpot_ms
        self._use(self._model)
        return tpot_ms

    def time_load(self, trial: Trial | None, requests: Requests) -> LoadTiming:
        """One run of `requests`, all there at once; `trial`: None without drafts."""
        self._engine.restart_drafts(None if trial is None else self._depth(trial))
        log, started = TokenLog(), time.perf_counter()
        run_once(self._engine, requests.prompts, requests.outputs, log)
        rate = steady_tok_s(tenths_tok_s(started, log.marks)) if log.marks else 0.0
        return LoadTiming(rate, self._engine.draft_stats)

    def _depth(self, trial: Trial) -> Depth | None:
        """What the trial asks for; only rank 0 knows as many as pay. From now on drafts hold at its rate."""
        self._acceptance.set_rate(trial.rate)
        return self._adaptive if trial.num_drafts is None else FixedDepth(trial.num_drafts)

    def _use(self, drafter: DeviceDrafter) -> None:
        self._backend.replace_drafter(drafter, self._acceptance)

    def _time(self, depth: Depth | None, prompts: Sequence[list[int]], output: int) -> Timing:
        seconds: dict[int, list[float]] = {1: [], output: []}
        stats = None
        for repeat in range(1 + self._repeats):
            for num_tokens, times in seconds.items():
                self._engine.restart_drafts(depth)
                run_once(self._engine, prompts, [num_tokens] * len(prompts))
                stats = self._engine.draft_stats
                if repeat > 0:
                    times.append(self._engine.run_s)
        first, whole = (statistics.median(times) for times in seconds.values())
        return Timing(1e3 * (whole - first) / (output - 1), stats)


def steady_tok_s(tenths: Sequence[float]) -> float:
    """Tokens a second of the tenths that are neither filling nor draining: they have equal numbers of tokens."""
    steady = tenths[STEADY]
    return len(steady) / sum(1.0 / rate for rate in steady)
