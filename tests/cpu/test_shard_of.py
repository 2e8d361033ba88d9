"""One rank of a world that is not there: its shard, its shapes, and nothing from the others."""

from __future__ import annotations

import pytest
import torch

from comm.loopback import LoopbackCommunicator
from engine.api import Engine
from engine.loading import draw_blueprint, open_communicator
from engine.settings import EngineSettings
from engine.shapes import SHAPES
from engine.shard_plan import ShardPlan
from launch.errors import ModelError, UsageError
from launch.world import World

TINY = (2, 64, 100, 8, 2, 300, False)  # as in SHAPES


@pytest.fixture(autouse=True)
def shapes(monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)


def settings(**changes) -> EngineSettings:
    return EngineSettings("tiny", load_format="dummy", **changes)


def test_collectives_are_local_copies():
    comm = LoopbackCommunicator(3)
    x = torch.tensor([[1.0, -2.0]])
    assert comm.all_reduce(x) is x and x.tolist() == [[1.0, -2.0]]
    assert comm.gather(x).tolist() == [[1.0, -2.0] * 3] and comm.broadcast_ints([4]) == [4]
    assert (comm.rank, comm.size) == (0, 3)
    comm.barrier()
    comm.close()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_the_shard_is_rank_0s_and_it_answers(size):
    blueprint = draw_blueprint(settings(shard_of=size), World())
    assert blueprint.plan == ShardPlan.make(blueprint.config, size, 0)
    assert any("meaningless" in note and f"--shard-of {size}" in note for note in blueprint.notes)
    with Engine("tiny", load_format="dummy", shard_of=size, kv_memory_bytes=1 << 22, threads=1) as engine:
        assert engine.comm.name == "loopback"
        (result,) = engine.generate([[5, 299, 7]], {"max_tokens": 5, "ignore_eos": True, "temperature": 0})
    assert len(result.completions[0].token_ids) == 5


def test_without_it_nothing_changes():
    assert not draw_blueprint(settings(), World()).notes
    assert open_communicator(settings(), World()).name == "none"


def test_refusals():
    with pytest.raises(UsageError, match="a single process, but torchrun started 2"):
        draw_blueprint(settings(shard_of=2), World(size=2))
    with pytest.raises(UsageError, match="from 1 on, not 0"):
        draw_blueprint(settings(shard_of=0), World())
    with pytest.raises(UsageError, match="no GPU to share"):
        draw_blueprint(settings(shard_of=2, is_gpu_sharing=True), World())
    with pytest.raises(UsageError, match="--all-reduce lamport is how ranks add, and --shard-of adds nothing"):
        open_communicator(settings(shard_of=2, all_reduce="lamport"), World())
    with pytest.raises(ModelError, match="9 ranks are too many"):
        draw_blueprint(settings(shard_of=9), World())
