"""The parts of a burst alone: the ring of tokens, what is uploaded, pages ahead, and who gets graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

from comm.single import SingleCommunicator
from comm.threads import ThreadCommunicator, ThreadGroup
from engine.graph.drafters import NgramDrafts
from engine.graph.loading import obstacle_to_graphs, speculates_on_device
from engine.graph.row_state import MAX_STEPS_AHEAD, PADDING, RowState
from engine.graph.staging import _NUM_SLOTS, Staging
from engine.graph.step import BUCKETS, StepKind, buckets_for
from engine.graph.token_ring import NO_TOKEN, TokenRing
from engine.loading import build_replica, draw_blueprint
from engine.pages import PagePool
from engine.sampler import stream_start
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.settings import EngineSettings
from kernels.advance_rows import advance_rows
from launch.errors import DoorbellError, PeerLost
from launch.world import World
from tests.cpu.engine_harness import twin_bursts
from tests.cpu.tiny import make_model, save_model

CPU = torch.device("cpu")
KEY = bytes(range(16))


def no_check() -> None:
    pass


def write(ring: TokenRing, step: int, ids: list[int], values: list[float] | None = None) -> None:
    tensor = torch.tensor(ids)
    values = torch.zeros(len(ids)) if values is None else torch.tensor(values)
    advance_rows(tensor, values, tensor.clone(), tensor.clone(), torch.tensor([step]), ring.device_words)


def test_a_token_is_there_once_its_step_is():
    ring = TokenRing(4, 3, CPU)
    for step in (0, 1, 2, 3, 4, 5, 4000, 1 << 38):
        write(ring, step, [step % 7, 151_935, 0], [0.0, 1.0, float("nan")])
        assert ring.read(step, 3, no_check) == [step % 7, 151_935, NO_TOKEN]
        ring.wait(step, no_check)
    ring.restart()
    write(ring, 0, [5, 6])
    assert ring.read(0, 2, no_check) == [5, 6]


def test_waiting_for_a_step_ends_with_what_is_known_of_the_peers(monkeypatch):
    ring = TokenRing(4, 2, CPU)
    write(ring, 3, [1, 2])
    write(ring, 7, [1])  # the second row's token is still on its way, and an older one lies in its place

    def lost() -> None:
        raise PeerLost(1, "rank 1 is gone")

    with pytest.raises(PeerLost, match="rank 1 is gone"):
        ring.read(7, 2, lost)
    monkeypatch.setattr("engine.graph.token_ring.STEP_DEADLINE_S", 0.05)
    with pytest.raises(DoorbellError, match="did not finish a decode step"):
        ring.read(7, 2, no_check)


def test_advancing_leaves_rows_that_are_not_there():
    ring = torch.full((2, 4), -7)
    token_ids, positions, step = torch.tensor([9, 9, 9]), torch.tensor([0, PADDING, 41]), torch.tensor([3])
    ids, values = torch.tensor([4, 5, 6]), torch.tensor([1.0, 0.0, float("inf")])
    advance_rows(ids, values, token_ids, positions, step, ring)
    assert (token_ids.tolist(), positions.tolist(), step.tolist()) == ([4, 5, 6], [1, PADDING, 42], [4])
    assert ring.tolist() == [[-7] * 4, [(4 << 24) + 5, (4 << 24) + 6, 4 << 24, -7]]


class RecordingRing:
    def __init__(self):
        self.waits = []

    def wait(self, step, check):
        self.waits.append(step)


def test_pinned_memory_is_written_again_only_after_a_step_behind_its_copy():
    ring = RecordingRing()
    staging = Staging(8, ring, CPU)
    for turn in range(_NUM_SLOTS + 3):
        a, b = staging.upload([numpy.array([[turn, 2], [3, 4]]), numpy.array([-turn])], 10 * turn, no_check)
        assert (a.tolist(), b.tolist()) == ([[turn, 2], [3, 4]], [-turn])
    assert ring.waits == [0, 10, 20]


def test_row_state_holds_what_a_step_needs():
    state = RowState(4, 8, 100, CPU, no_check)
    first = Sequence(0, [7, 8, 9], 2, 99, num_computed=2, pages=[3], temperature=0.5, stream_key=KEY)
    second = Sequence(1, [5] * 20, 1, 99, num_computed=19, pages=[6, 1])
    state.begin([first, second])
    first.pages.append(2)
    state.extend([first, second], [2, 19], 3)
    rows = state.rows(4)
    assert rows.token_ids[:2].tolist() == [9, 5] and rows.positions.tolist() == [2, 19, PADDING, PADDING]
    assert rows.page_table[:2, :2].tolist() == [[3, 2], [6, 1]]
    assert rows.draw.temperatures.tolist() == [0.5, 0.0, 0.0, 0.0]
    for position in (2, 3, 4):  # the token at position 2 chooses the row's output number 1
        assert rows.draw.starts[0, position % MAX_STEPS_AHEAD] == stream_start(KEY, position - 1)
    write(state.ring, 0, [1, 1])  # the step that was launched behind these uploads
    state.begin([second])
    assert rows.positions.tolist() == [19, PADDING, PADDING, PADDING] and not rows.draw.temperatures.any()


def test_room_ahead_counts_pages_of_all_rows():
    pool = PagePool(6, 4)
    scheduler = Scheduler(Limits(8, 64, 24), pool)
    rows = [Sequence(idx, [idx] * 4, 4, 99) for idx in range(2)]
    for row in rows:
        pool.extend(row.pages, 4)
    lengths = dict.fromkeys(rows, 4)
    assert scheduler.room_ahead(lengths, 16) == 8  # four pages are left, two for each
    assert scheduler.room_ahead(lengths, 3) == 3
    scheduler.reserve_ahead(lengths, 8)
    assert pool.num_available == 0 and [len(row.pages) for row in rows] == [3, 3]
    assert scheduler.room_ahead(dict.fromkeys(rows, 12), 16) == 0
    assert scheduler.room_ahead(dict.fromkeys(rows, 10), 16) == 2


def test_buckets_cover_every_batch():
    for max_batch in (1, 2, 3, 8, 9, 33, 256, 4096):
        buckets = buckets_for(max_batch)
        assert buckets == BUCKETS[: len(buckets)] and buckets[-1] >= min(max_batch, BUCKETS[-1])
        assert len(buckets) == 1 or buckets[-2] < max_batch


def test_who_gets_graphs():
    cuda, settings, hopper = torch.device("cuda", 0), EngineSettings("model"), (9, 0)
    assert obstacle_to_graphs(settings, cuda, SingleCommunicator(), hopper) == ""
    assert obstacle_to_graphs(settings, CPU, SingleCommunicator()) == "on a CPU"
    assert obstacle_to_graphs(EngineSettings("model", is_eager=True), cuda, SingleCommunicator()) == "as --eager asks"
    assert obstacle_to_graphs(EngineSettings("model", is_ngram=True), cuda, SingleCommunicator(), hopper) == ""
    assert "threads cannot be captured" in obstacle_to_graphs(settings, cuda, ThreadCommunicator(ThreadGroup(2), 0), hopper)
    assert "compute capability 8.0" in obstacle_to_graphs(settings, cuda, SingleCommunicator(), (8, 0))


def test_who_guesses_on_the_device(monkeypatch):
    cuda, comm = torch.device("cuda", 0), SingleCommunicator()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for settings in (EngineSettings("model", is_ngram=True), EngineSettings("model", draft_model="small")):
        assert speculates_on_device(settings, cuda, comm) and not speculates_on_device(settings, CPU, comm)
        assert not speculates_on_device(replace(settings, is_eager=True), cuda, comm)
    assert not speculates_on_device(EngineSettings("model"), cuda, comm)


def test_a_step_of_nothing_but_padding_writes_nothing(tmp_path):
    """As when a kind of step is tried out while rows run."""
    folder = save_model(make_model("qwen2"), tmp_path)
    blueprint = draw_blueprint(EngineSettings(str(folder), kv_memory_bytes=1 << 20, max_batch=4), World())
    replica = build_replica(blueprint, World(), SingleCommunicator())
    backend = twin_bursts(replica, lambda _: NgramDrafts())
    caches = replica.backend.kv.keys, replica.backend.kv.values
    for cache in caches:
        cache.normal_()
    before = [cache.clone() for cache in caches]
    with torch.inference_mode():
        for kind in (StepKind(3), StepKind(3, num_drafts=2)):
            backend._step(backend.state.scratch(3), kind)
    assert all(torch.equal(*pair) for pair in zip(before, caches))
