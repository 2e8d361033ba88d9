"""The stage profiler on one GPU, eager and in graphs: `python -m pytest -q tests/gpu/test_stages_on_gpu.py`, about 60 s."""

from __future__ import annotations

import json

import pytest
import torch

from tests.gpu.graph_engine import STEPS, answer_on_gpu, open_replica
from tests.gpu.test_graph_step import filtered_rows, rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

NUM_LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from tests.cpu.tiny import make_model, save_model

    shape = {"vocab_size": 1009, "hidden_size": 256, "head_dim": 64, "intermediate_size": 200}
    return save_model(make_model("qwen2", **shape), tmp_path_factory.mktemp("qwen2"))


def decode_kind(steps: str) -> str:
    return "decode" if steps == "eager" else "burst"


@pytest.mark.parametrize("make_rows", (rows, filtered_rows))
@pytest.mark.parametrize("steps", STEPS)
def test_tokens_are_the_same_with_and_without(folder, steps, make_rows):
    """Filtered rows: their graphs and the variants of these are captured by the burst that needs them first."""
    plain, profiled = (open_replica(folder, steps, max_batch=9, is_profiled=on) for on in (False, True))
    for count in (1, 3, 9):
        wanted, run = answer_on_gpu(plain, make_rows(count)), answer_on_gpu(profiled, make_rows(count))
        assert run.token_ids == wanted.token_ids, count
        assert run.stats.num_waits == wanted.stats.num_waits
    assert any(step.spans for step in profiled.profiler.profile().steps if step.work.kind == decode_kind(steps))


@pytest.mark.parametrize("steps", STEPS)
def test_stages_sum_to_the_wall(folder, steps):
    """Within 5 % of the host's clock, which sees a burst from its first read to its last; no stage of a layer is without time."""
    from engine.profile.marks import STAGES

    replica = open_replica(folder, steps, max_batch=4, is_profiled=True)
    for max_tokens in (200, 200, 1, 1, 1, 1):
        answer_on_gpu(replica, rows(4, max_tokens))
    kinds = replica.profiler.profile().kinds
    assert set(kinds) == {"prefill", decode_kind(steps)}
    for kind in kinds.values():
        assert sum(kind.stages.values()) == pytest.approx(kind.wall_us, rel=1e-3)
        assert kind.is_whole, (kind.kind, kind.sum_ratio)
        assert all(kind.stages[stage] > 0 for stage in STAGES)
        assert all(len(layers) == NUM_LAYERS and min(layers) > 0 for layers in kind.layers.values())
    decode = kinds[decode_kind(steps)]
    assert decode.overhead is not None and 0.8 < decode.overhead < 5.0
    assert decode.num_profiled >= 30


@pytest.mark.parametrize("steps", STEPS)
def test_counts_are_counted_or_said_not_to_be(folder, steps):
    replica = open_replica(folder, steps, max_batch=4, is_profiled=True)
    answer_on_gpu(replica, rows(4))
    kinds = replica.profiler.profile().kinds
    is_read = kinds["prefill"].host_syncs >= 1
    assert is_read == (steps == "eager"), "the host fetches a prefill's tokens where the device does not leave them with it"
    assert kinds["prefill"].launches.total is None, "what torch launches outside of a graph is not known"
    decode = kinds[decode_kind(steps)]
    if steps == "eager":
        assert decode.host_syncs >= 1 and decode.launches.total is None
        return
    assert decode.host_syncs == 0 and decode.launches.total >= max(decode.launches.own, 4 * NUM_LAYERS)
    assert (decode.launches.own > 0) == (steps == "cuda")


def test_a_profiled_burst_does_not_wait_for_its_events(folder, monkeypatch):
    """Once a graph is replayed again, its events of the time before are long over."""
    from engine.profile.clock import DeviceClock

    replica = open_replica(folder, "cuda", max_batch=4, is_profiled=True)
    answer_on_gpu(replica, rows(4))
    late = []
    wait = DeviceClock.wait
    monkeypatch.setattr(DeviceClock, "wait", lambda clock, stamp: (late.append(not clock.is_over(stamp)), wait(clock, stamp)))
    answer_on_gpu(replica, rows(4, 200))
    assert len(late) > 100 and not any(late)


def test_the_trace_of_a_run(folder, tmp_path):
    from engine.profile.trace import write_trace

    replica = open_replica(folder, "cuda", max_batch=4, is_profiled=True)
    answer_on_gpu(replica, rows(4, 60))
    profile = replica.profiler.profile()
    write_trace(profile, 0, tmp_path / "trace.json")
    events = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    steps = [event for event in events if event["name"].startswith("step")]
    assert len(steps) == len(profile.steps) and all(event["dur"] >= 0 for event in events)
    assert all(second["ts"] >= first["ts"] + first["dur"] - 1.0 for first, second in zip(steps, steps[1:]))
