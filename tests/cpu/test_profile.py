"""The stage profiler on a CPU: the same tokens, stages that sum to the wall, kinds apart, and what is told of it."""

from __future__ import annotations

import json
import random
import time

import pytest

import engine.eager
import engine.graph.operators
from engine.profile.clock import HostClock
from engine.profile.marks import NO_MARKS, STAGES, Launches, Span, StageMarks
from engine.profile.profile import Profile
from engine.profile.profiler import BURST_PERIOD, Profiler
from engine.profile.step_profiler import NO_PROFILER
from engine.profile.table import table_lines
from engine.profile.timed_step import BURST, DECODE, MIXED, PREFILL, TimedStep, Work
from engine.profile.trace import trace_events, write_trace
from tests.cpu.engine_harness import answer, request, twin_bursts
from tests.cpu.tiny import make_model, save_model

VOCAB = 131
NUM_LAYERS = 2
# Stages of a layer, in order; an eager step has its norms in `rest`.
LAYER = {
    BURST: ["qkv", "attention", "o_proj", "all_reduce", "mlp", "all_reduce"],
    DECODE: ["rest", "qkv", "attention", "o_proj", "all_reduce", "rest", "mlp", "all_reduce"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(make_model("qwen2", max_position_embeddings=256), tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def slow_attention(monkeypatch):
    """20 ms more a layer, in eager steps and in bursts, so that what else the machine does weighs little."""
    for module, name in ((engine.eager, "paged_attention"), (engine.graph.operators, "kv_write")):
        operator = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, operator=operator: (time.sleep(0.02), operator(*args)))


def rows(count: int = 3, max_tokens: int = 40, **options) -> list:
    rng = random.Random(count)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))] for _ in range(count)]
    return [
        request(prompt, idx, max_tokens=max_tokens, temperature=float(idx % 2), **options) for idx, prompt in enumerate(prompts)
    ]


def answer_profiled(model, items, size=1, with_bursts=False, **settings):
    """The run, and the profilers of its ranks by rank."""
    profilers = {}

    def bursts(replica):
        profilers[replica.comm.rank] = replica.profiler
        return twin_bursts(replica) if with_bursts else None

    return answer(model, items, size, bursts=bursts, is_profiled=True, **settings), profilers


@pytest.mark.parametrize("size", (1, 2))
@pytest.mark.parametrize("with_bursts", (False, True))
def test_tokens_are_the_same_with_and_without(model, size, with_bursts):
    plain = answer(model, rows(), size, bursts=twin_bursts if with_bursts else None)
    run, profilers = answer_profiled(model, rows(), size, with_bursts)
    assert run.answers == plain.answers and len(set(run.digests)) == 1
    kinds = [[(step.work, bool(step.spans)) for step in profiler.profile().steps] for profiler in profilers.values()]
    assert len(kinds) == size and all(ranks == kinds[0] for ranks in kinds), "all ranks profile the same steps"
    assert {work.kind for work, _ in kinds[0]} == {PREFILL, BURST if with_bursts else DECODE}


def test_tokens_are_the_same_with_rules_and_with_drafts(model):
    ruled = {"top_k": 20, "repetition_penalty": 1.1}
    plain, (run, profilers) = answer(model, rows(**ruled)), answer_profiled(model, rows(**ruled), with_bursts=True)
    assert run.answers == plain.answers
    assert {step.work.is_filtered for step in profilers[0].profile().steps if step.work.kind == BURST} == {True}
    repeating = lambda: [request([5, 6, 7, 8] * 5, idx, max_tokens=40) for idx in range(2)]  # noqa: E731
    plain, (run, profilers) = answer(model, repeating()), answer_profiled(model, repeating(), is_ngram=True)
    assert run.token_ids == plain.token_ids and run.drafts.num_proposed > 0
    assert any(step.work.num_tokens > step.work.num_rows for step in profilers[0].profile().steps if step.work.kind == DECODE)


@pytest.mark.parametrize("with_bursts", (False, True))
def test_a_step_has_every_stage_of_every_layer_in_order(model, with_bursts):
    _, profilers = answer_profiled(model, rows(), 2, with_bursts)
    profile, kind = profilers[0].profile(), BURST if with_bursts else DECODE
    for step in profile.steps:
        assert not step.spans or sum(span.us for span in step.spans) == pytest.approx(step.wall_us)
        assert all(span.us >= 0 for span in step.spans)
    (step, *_) = [step for step in profile.steps if step.work.kind == kind and step.spans]
    for layer_idx in range(NUM_LAYERS):
        assert [span.stage for span in step.spans if span.layer_idx == layer_idx] == LAYER[kind]
    assert [span.stage for span in step.spans[-4:]] == (
        ["head", "sampling", "rest", "rest"] if with_bursts else ["rest", "head", "sampling", "rest"]
    )
    found = profile.kinds[kind]
    assert set(found.stages) == set(STAGES) and all(us > 0 for us in found.stages.values())
    assert {stage: len(layers) for stage, layers in found.layers.items()} == dict.fromkeys(LAYER[kind], NUM_LAYERS)


def test_one_in_a_period_of_a_burst_is_profiled_and_others_without(model):
    run, profilers = answer_profiled(model, rows(), with_bursts=True)
    steps = [step for step in profilers[0].profile().steps if step.work.kind == BURST]
    assert len(steps) == 38  # of 39: the first of a burst has no step before it
    assert [idx for idx, step in enumerate(steps) if step.spans] == list(range(0, 38, BURST_PERIOD))
    assert [step.is_first for step in steps if step.spans] == [True, False, False, False]
    assert run.stats.num_waits == 0
    kind = profilers[0].profile().kinds[BURST]
    assert (kind.num_steps, kind.num_profiled, kind.is_cold) == (38, 3, False) and kind.overhead > 0


def test_stages_sum_to_the_wall_by_another_clock(model, slow_attention):
    """The loop's own seconds of a step leave out the message before it; those of bursts are between two reads."""
    run, profilers = answer_profiled(model, rows(max_tokens=15))
    steps = profilers[0].profile().steps
    total = sum(sum(span.us for span in step.spans) or step.wall_us for step in steps)
    assert 1e6 * (run.stats.prefill_s + run.stats.decode_s) == pytest.approx(total, rel=0.05)
    kind = profilers[0].profile().kinds[DECODE]
    assert sum(kind.stages.values()) == pytest.approx(kind.wall_us) and kind.is_whole
    run, profilers = answer_profiled(model, rows(max_tokens=21), with_bursts=True)
    steps = [step for step in profilers[0].profile().steps if step.work.kind == BURST]
    assert 1e6 * run.stats.decode_s == pytest.approx(sum(step.wall_us for step in steps) * 20 / 19, rel=0.05)


def test_time_is_charged_to_the_stage_that_takes_it(model, slow_attention):
    for with_bursts, kind in ((False, DECODE), (True, BURST)):
        _, profilers = answer_profiled(model, rows(max_tokens=14), with_bursts=with_bursts)
        found = profilers[0].profile().kinds[kind]
        assert found.stages["attention"] > 20e3 * NUM_LAYERS and found.stages["attention"] / found.wall_us > 0.6
        assert all(us > 20e3 for us in found.layers["attention"])


def test_prefill_and_decode_never_share_a_bucket(model):
    """Chunks of long prompts run beside rows that decode: those steps are a kind of their own."""
    items = [request([7] * 3, 0, max_tokens=30), request(list(range(60)), 1, max_tokens=5)]
    _, profilers = answer_profiled(model, items, max_step_tokens=16)
    steps = profilers[0].profile().steps
    mixed = [step.work for step in steps if step.work.kind == MIXED]
    assert mixed and all(work.num_rows == 2 and work.num_tokens > 2 for work in mixed)
    assert {step.work.num_tokens for step in steps if step.work.kind == DECODE} <= {1, 2}
    assert all(step.work.num_tokens > 2 for step in steps if step.work.kind == PREFILL)


def test_a_long_run_is_profiled_at_its_beginning(model):
    profiler = Profiler(HostClock(), max_profiled=2)

    def bursts(replica):
        replica.profiler = profiler
        return twin_bursts(replica)

    answer(model, rows(max_tokens=90), bursts=bursts)
    steps = [step for step in profiler.profile().steps if step.work.kind == BURST]
    assert len(steps) == BURST_PERIOD + 1 and [bool(step.spans) for step in steps].count(True) == 2
    profiler.restart()
    assert profiler.profile() == Profile({}, ()) and "too short" in table_lines(profiler.profile())[0]


class ReplayedClock(HostClock):
    """Of a captured step: its stamps get new times at each replay, as events that are nodes of a graph do."""

    def __init__(self):
        self.now, self.waited = 0.0, []

    def stamp(self):
        self.now += 1.0
        return [self.now]

    def us_between(self, first, second):
        return second[0] - first[0]

    def is_over(self, stamp):
        return stamp[0] <= self.now

    def wait(self, stamp):
        self.waited.append(stamp[0])


def test_the_events_of_a_graph_are_read_before_they_are_recorded_again():
    clock = ReplayedClock()
    profiler = Profiler(clock)
    captured = profiler.new_marks()
    captured.end("mlp", 0)
    captured.end("head")
    captured.launches = Launches(2, 5)

    def step():
        is_due = profiler.is_due()
        if is_due:
            profiler.settle(captured)
            for stamp, us in zip(captured.stamps, (10.0, 30.0, 60.0)):
                stamp[0] = clock.now + us * num_replays[0]
            clock.now = captured.stamps[-1][0]
            num_replays[0] += 1
        profiler.end_burst_step(captured if is_due else NO_MARKS)

    num_replays = [1]
    profiler.begin_burst(1, False)
    for _ in range(3 * BURST_PERIOD):
        step()
    profiled = [step for step in profiler.profile().steps if step.spans]
    assert [[(span.stage, span.us) for span in step.spans] for step in profiled] == [
        [("rest", 10.0 * n), ("mlp", 20.0 * n), ("head", 30.0 * n), ("rest", 1.0)] for n in (1, 2, 3)
    ]
    kind = profiler.profile().kinds[BURST]
    assert kind.launches == Launches(2, 5) and kind.wall_us == 151.0 and kind.overhead == 151.0


def timed(kind: str, wall_us: float, stage_us: float | None = None, **fields) -> TimedStep:
    spans = () if stage_us is None else (Span("mlp", 0, 0.0, stage_us), Span("rest", None, stage_us, wall_us - stage_us))
    return TimedStep(Work(kind, 1, 1), wall_us=wall_us, spans=spans, **fields)


def test_means_are_of_warm_steps_and_overhead_of_equal_work():
    steps = [timed(DECODE, 500, 400, is_first=True, num_syncs=3.0, launches=Launches(7, None)), timed(DECODE, 100),
             timed(DECODE, 130, 60, host_us=140), timed(DECODE, 102, host_us=100), timed(DECODE, 110, 70, host_us=110),
             timed(PREFILL, 900, 800, is_first=True), timed(MIXED, 100)]  # fmt: skip
    profile = Profile.of(steps)
    assert set(profile.kinds) == {DECODE, PREFILL}  # nothing is known of the stages of a mixed step
    kind = profile.kinds[DECODE]
    assert (kind.num_steps, kind.num_profiled, kind.wall_us, kind.stages["mlp"], kind.layers) == (5, 2, 120, 65, {"mlp": [65]})
    assert kind.overhead == pytest.approx(120 / 101) and kind.sum_ratio == pytest.approx(342 / 350) and kind.is_whole
    assert (kind.host_syncs, kind.launches) == (3.0, Launches(7, None))
    cold = profile.kinds[PREFILL]
    assert cold.is_cold and cold.wall_us == 900 and cold.overhead is None and cold.is_whole is None
    late = Profile.of([timed(DECODE, 100, 50, host_us=110)]).kinds[DECODE]
    assert late.is_whole is False
    text = "\n".join(table_lines(profile))
    for words in ("prefill: mean of 1 profiled steps of 1 timed, the first, with start-up costs", "54.2 %",
                  "decode, one step at a time: mean of 2 profiled steps of 5 timed", "1.188 x the time", "97.7 % of the time",
                  "not counted", "3 a step", "7 own a step, those of libraries not counted", "65.00 (layer 0)"):  # fmt: skip
        assert words in text, words


def test_the_trace_nests_stages_in_steps(tmp_path, model):
    _, profilers = answer_profiled(model, rows(), with_bursts=True)
    profile = profilers[0].profile()
    write_trace(profile, 0, tmp_path / "trace.json")
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["traceEvents"] == trace_events(profile, 0)
    assert document["otherData"]["burst"]["stages"] == profile.kinds[BURST].stages
    names = {event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"}
    assert names == {"rank 0", "prefill", "decode in bursts"}
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["name"].startswith("step")]
    assert len(steps) == len(profile.steps) and {event["name"] for event in events} == {"step", "step without events", *STAGES}
    at = 0.0
    for event in events:
        start, end = round(1e3 * event["ts"]), round(1e3 * (event["ts"] + event["dur"]))
        if event in steps:
            step_start, step_end = start, end
            assert event["dur"] > 0 and start >= at
            at = end
        else:
            assert step_start <= start <= end <= step_end
    assert all(second["ts"] >= first["ts"] for first, second in zip(steps, steps[1:]))


def test_marks_cost_nothing_where_nothing_is_profiled(model):
    assert NO_PROFILER.marks([]) is NO_MARKS and not NO_PROFILER.is_due() and NO_PROFILER.new_marks() is NO_MARKS
    seen = []

    def bursts(replica):
        seen.append(replica.profiler)
        return twin_bursts(replica)

    answer(model, rows(1, 4), bursts=bursts)
    assert seen == [NO_PROFILER] and isinstance(StageMarks(HostClock()).stamps[0], int)
