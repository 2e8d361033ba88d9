"""The long run without its GPU: equal work in every tenth, hashes of what each rank's device chose, a rank that goes astray."""

from __future__ import annotations

import random

import pytest
import torch
from click.testing import CliRunner

from comm.threads import run_ranks
from engine.bench import drift
from engine.bench.drift import MOST_WARM_UPS, PARTS, Drift, Finishes, Tenth, describe, draw_parts, main, make_record, run_long
from engine.bench.load import Case, open_engine
from engine.bench.throughput import TokenLog
from engine.bench.token_hashes import TokenHashes
from engine.loading import build_replica, draw_blueprint
from engine.loop import follow
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from launch.world import World
from tests.cpu.engine_harness import Run, lead_all, request, twin_bursts
from tests.cpu.tiny import make_model, save_model
from tests.flipped_token import flip_token

CASE = Case("tiny", 1, 1, "fp32", 8, 12, 48)


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", (1, 32, 40, 4, 2, 130, False))


def test_all_parts_have_the_same_lengths_and_other_tokens():
    found = draw_parts(random.Random(0), 100, 128, 128, 151_936)
    assert len(found.prompts) == len(found.outputs) == 100 * PARTS
    lengths = [len(prompt) for prompt in found.prompts]
    for part in range(PARTS):
        of_part = slice(100 * part, 100 * (part + 1))
        assert lengths[of_part] == lengths[:100] and found.outputs[of_part] == found.outputs[:100]
    assert len({tuple(prompt) for prompt in found.prompts}) == 100 * PARTS
    assert set(lengths) <= set(range(64, 192)) and set(found.outputs) == set(range(64, 193, 16))
    assert 120 < sum(found.outputs[:100]) / 100 < 136


def test_tenths_end_with_answers():
    finishes = Finishes(TokenLog(), [(float(2 * n), 10 * n, n) for n in range(PARTS * 3)])
    assert finishes.tenths() == (Tenth(6.0, 30, 3),) * 10 and finishes.tenths()[0].tok_s == 5.0
    assert Finishes(TokenLog()).tenths() == (), "rank 0 alone sees answers end"


def test_a_run_on_a_cpu_has_equal_work_in_its_tenths():
    with open_engine(CASE, "tiny", "cpu", max_model_len=90, max_step_tokens=200) as engine:
        requests = draw_parts(random.Random(0), 16, 12, 48, 130)
        assert run_long(engine, requests).num_hashed == 0, "there are no bursts on a CPU"
        engine.replica.burst_backend = twin_bursts(engine.replica)
        drift = run_long(engine, requests)
        tokens = sum(requests.outputs)
        assert engine.stats.marks[-1][1] == tokens and drift.stray is None
    assert tokens / 8 <= drift.num_hashed < 1.1 * tokens / 8, "every step, those that let rows in too"
    assert len(drift.tenths) == 10 and all(tenth.seconds > 0 for tenth in drift.tenths)
    per_step = [tenth.tokens / tenth.steps for tenth in drift.tenths]
    assert min(per_step) > 7.9, "the batch is to be full"
    assert max(tenth.steps for tenth in drift.tenths) - min(tenth.steps for tenth in drift.tenths) <= 16


def chosen_by_ranks(folder, flipped_rank: int | None, step: int = 0) -> list:
    """(first stray step, number of hashes, digest) of two ranks."""

    def rank_main(comm) -> tuple:
        world = World(rank=comm.rank, size=2, local_rank=comm.rank, local_size=2)
        settings = EngineSettings(str(folder), threads=1, kv_memory_bytes=1 << 22, max_batch=4)
        replica = build_replica(draw_blueprint(settings, world), world, comm)
        backend = replica.burst_backend = twin_bursts(replica)
        if comm.rank == flipped_rank:
            flip_token(backend._operators, step)
        hashes = TokenHashes(replica)
        if comm.rank:
            assert follow(replica) == 0
        else:
            requests = [request([5 + row] * (3 + row), row, max_tokens=16 * (1 + row % 3)) for row in range(9)]
            lead_all(replica, requests, Run(answers=[[] for _ in requests]))
        return hashes.first_stray(), list(hashes.hashes), replica.digest

    return run_ranks(2, rank_main)


def test_a_flipped_token_of_one_rank_is_found_at_its_step(tmp_path):
    folder = save_model(make_model("qwen2"), tmp_path)
    (stray, ours, digest), (_, theirs, other) = chosen_by_ranks(folder, None)
    assert stray is None and ours == theirs and len(ours) > 40 and len(set(ours)) == len(ours) and digest == other
    for step in (0, 7, 8, 33, len(ours) - 1):
        for rank in (0, 1):
            found = chosen_by_ranks(folder, rank, step)
            assert found[0][0] == (step, [1]) and found[1][0] is None
            if rank == 1:
                assert found[0][2] == found[1][2], "messages alone do not tell"


def test_ranks_that_took_other_steps_are_found(tmp_path):
    folder = save_model(make_model("qwen2"), tmp_path)

    def rank_main(comm) -> None:
        world = World(rank=comm.rank, size=2, local_rank=comm.rank, local_size=2)
        replica = build_replica(draw_blueprint(EngineSettings(str(folder), kv_memory_bytes=1 << 22), world), world, comm)
        replica.burst_backend = twin_bursts(replica)
        hashes = TokenHashes(replica)
        hashes.hashes.extend([5] * comm.rank)
        if comm.rank == 0:
            with pytest.raises(RuntimeError, match=r"took \[0.0, 1.0\] steps"):
                hashes.first_stray()
            comm.gather(torch.empty(0))
        else:
            hashes.first_stray()

    run_ranks(2, rank_main)


def test_record_and_description():
    tenths = tuple(Tenth(1.0, 100 + k, 9) for k in range(10))
    requests = draw_parts(random.Random(0), 100, 128, 128, 1000)
    found = make_record(CASE, requests, Drift(tenths, 90), 2.0, "graph", "ipc")
    assert found.case == {**vars(CASE), "requests": 1000, "backend": "graph", "comm": "ipc"} and found.checked
    assert found.metrics["output_tok_s"] == 104.5 and found.metrics["drift_percent"] == pytest.approx(9.0)
    assert (found.metrics["tenth_10_tok_s"], found.metrics["steps_compared"], found.metrics["mismatches"]) == (109.0, 90, 0)
    assert found.ceiling == {"output_tok_s": sum(requests.outputs) / 2, "drift_percent": 2.0}
    lines = "\n".join(describe(Drift(tenths, 90), 100, 8))
    assert "over 1000 prompts; drift 9.00 %" in lines and "equal on 8 ranks at each of 90 steps" in lines
    strayed = Drift(tenths, 90, (33, [1, 5]))
    assert not make_record(CASE, requests, strayed, 2.0, "graph", "ipc").checked
    assert "DIFFERENT from step 33 on, on ranks 1, 5" in "\n".join(describe(strayed, 100, 8))


@pytest.mark.parametrize("captured, num_runs", (([0], 1), ([3, 5, 5], 3), ([1, 2, 3, 4, 5, 6, 7, 8], MOST_WARM_UPS)))
def test_the_warm_up_ends_when_nothing_is_captured_any_more(captured, num_runs, monkeypatch):
    engine, runs = object(), []
    monkeypatch.setattr(drift, "num_captured", lambda _: 0 if not runs else captured[len(runs) - 1])
    monkeypatch.setattr(drift, "run_once", lambda _, prompts, outputs: runs.append((len(prompts), len(outputs))))
    drift.warm_up(engine, draw_parts(random.Random(0), 10, 8, 32, 99))
    assert runs == [(40, 40)] * num_runs


def test_the_command():
    options = {"model": "tiny", "device": "cpu", "dtype": "fp32", "prompt": 4, "output": 16, "requests": 80, "batch": 4}
    done = CliRunner().invoke(main, [f"--{name}={value}" for name, value in options.items()])
    assert done.exit_code == 0 and "over 80 prompts" in done.output and "none: no bursts" in done.output, done.output
    for wrong in ("1001", "310"):
        refused = CliRunner().invoke(main, ["--requests", wrong])
        assert refused.exit_code == 2 and "a tenth no less than --batch" in refused.output
