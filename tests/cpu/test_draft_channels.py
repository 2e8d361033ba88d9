"""Drafts handed from a rank to all others: who opens which channel, payloads that show every fault, the protocol on the CPU."""

from __future__ import annotations

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from comm.device_signal import NUM_SLOTS, WAITS
from comm.device_watch import WatchParams
from comm.draft_channels import MAX_DRAFT_BYTES, draft_regions, open_draft_channels, stem_of
from comm.heap import Layout
from comm.heap_posix import PosixHeap
from comm.process_group import ProcessGroup
from comm.signal_channel import SignalChannel, SignalConsumer, SignalProducer
from comm.words import Patience
from engine.graph.drafters import HandedDrafts
from engine.graph.row_state import RowState, Speculable
from launch.environment import Environment
from launch.errors import PeerTimeout
from launch.world import World
from tests.cpu.engine_harness import CPU
from tests.draft_payload import FAULTS, LEADS, SHAPES, NumberedDrafts, Payload, lead_bucket
from tests.ranks.draft_soak import GRAPH_STEPS, NUM_VARIANTS, ON_TIME, draw_delays, plan_tenth
from tests.ranks_harness import run_ranks

STEPS = 400
MOST_ROWS, MOST_DRAFTS = SHAPES[-1]


# Host-side parts of the channels and of the soak.


def opened(rank: int, size: int, wait: str, deadline: object) -> list:
    layout = Layout.of(draft_regions(size))
    heap = SimpleNamespace(rank=rank, size=size, layout=layout, address=lambda peer, name: layout.offsets[name])
    return open_draft_channels(heap, SimpleNamespace(params=WatchParams(1, 2, 3)), {}, False, wait, deadline)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("size", (2, 4, 8))
def test_rank_0_has_a_channel_to_each_and_the_others_have_the_one_from_it(size, wait):
    for rank in range(size):
        guarded = []
        channels = opened(rank, size, wait, SimpleNamespace(guard=lambda *word, guarded=guarded: guarded.append(word)))
        ends = [(channel.producer, channel.consumer) for channel in channels]
        assert ends == ([(0, peer) for peer in range(1, size)] if rank == 0 else [(0, rank)])
        assert {channel.wait for channel in channels} == {wait}
        assert {channel.slot_bytes for channel in channels} == {MAX_DRAFT_BYTES}
        assert len(guarded) == (NUM_SLOTS if rank and wait == "stream" else 0), "a wait of a stream has a deadline"


def test_a_receiver_that_waits_by_its_stream_needs_a_deadline():
    assert opened(0, 2, "stream", None)
    with pytest.raises(ValueError, match="no deadline of its own"):
        opened(1, 2, "stream", None)


def test_the_largest_drafts_fill_a_slot():
    assert max(rows * num_drafts * 8 for rows, num_drafts in SHAPES) == MAX_DRAFT_BYTES


@pytest.mark.parametrize("shape", SHAPES)
def test_a_payload_shows_what_is_wrong_with_it(shape):
    payload, here, before = Payload(*shape, CPU), torch.tensor([10_001]), torch.tensor([10_001 - NUM_SLOTS])
    right, old = payload.at(here), payload.at(before)
    num_words = right.numel()
    assert payload.faults(right, here).tolist() == [0, 0, 0]
    assert payload.faults(old, here).tolist() == [0, 1, num_words], "a whole message of another step"
    for cut in range(1, num_words):
        torn = torch.cat((right.flatten()[:cut], old.flatten()[cut:])).view(shape)
        assert payload.faults(torn, here).tolist() == [1, 0, num_words - cut]
    swapped = right.flatten().clone()
    swapped[1:3] = swapped[1:3].flip(0)
    assert payload.faults(swapped.view(shape), here).tolist() == [1, 0, 2]


def test_leads_beyond_the_slots_have_a_place_of_their_own():
    leads = torch.tensor([-7, -1, 0, 1, NUM_SLOTS, NUM_SLOTS + 1, 99])
    assert [LEADS[place] for place in lead_bucket(leads)] == ["below 0", "below 0", "0", "1", "3", "above 3", "above 3"]


@pytest.mark.parametrize("size", (2, 4, 8))
def test_every_tenth_has_the_same_replays_in_another_order(size):
    rngs = [random.Random(5) for _ in range(size)]
    tenths = [plan_tenth(rngs[0], size, 50) for _ in range(3)]
    assert [plan_tenth(rngs[1], size, 50) for _ in range(3)] == tenths, "alike on all ranks"
    assert len({tuple(tenth) for tenth in tenths}) == 3 and len({frozenset(Counter(tenth).items()) for tenth in tenths}) == 1
    late = Counter(replay.late for replay in tenths[0])
    assert set(late) == {ON_TIME, *range(size)}
    assert {(replay.shape, replay.variant) for replay in tenths[0]} == {
        (shape, variant) for shape in range(len(SHAPES)) for variant in range(NUM_VARIANTS)
    }


def test_a_graph_without_delays_and_others_with():
    rng = random.Random(1)
    first, second, third = (draw_delays(rng, variant) for variant in range(3))
    assert not first and second != third and all(0 < len(delays) < GRAPH_STEPS for delays in (second, third))


# The same protocol over shared memory, between real processes.


class HostChannel:
    """`DraftChannel` over an end of a `SignalChannel`."""

    def __init__(self, end: SignalChannel):
        self.end = end

    def put(self, payload: torch.Tensor) -> None:
        self.end.send(payload.view(torch.uint8).flatten())

    def take(self, out: torch.Tensor) -> None:
        self.end.receive(out.view(torch.uint8).flatten())

    def note_launch(self) -> None:
        pass  # its waits have a deadline of their own


class Hand:
    """One rank's place: `drafts` are those of `HandedDrafts` on channels of shared memory."""

    def __init__(self, rank: int, size: int, deadline_s: float):
        world = World.from_environment(Environment.read())
        self.rank, self.size, self.group = rank, size, ProcessGroup(world, 60)
        peers = range(1, size)
        layout = Layout.of(*(SignalChannel.regions(stem_of(peer), MAX_DRAFT_BYTES) for peer in peers))
        heap = PosixHeap(rank, size, world.run_id, layout, self.group.exchange)
        kind, mine = (SignalProducer, peers) if rank == 0 else (SignalConsumer, (rank,))
        patience = Patience.for_ranks(size, deadline_s)
        self.channels = [HostChannel(kind(heap, stem_of(peer), 0, peer, patience)) for peer in mine]
        self._acks = [heap.words(0, f"{stem_of(peer)}.acks") for peer in peers]
        self.drafter = NumberedDrafts(CPU)
        self.handed = HandedDrafts(self.drafter if rank == 0 else None, self.channels, "numbered drafts")
        self._state = RowState(MOST_ROWS, 1, 8, CPU, lambda: None, Speculable(MOST_ROWS, MOST_DRAFTS, MOST_DRAFTS))
        self._payloads = {shape: Payload(*shape, CPU) for shape in SHAPES}
        self.faults, self.leads = torch.zeros(len(FAULTS), dtype=torch.int64), Counter()

    def run(self, num_steps: int, pause_s: float) -> None:
        """Rank 0 is late now and then, and so is each of the others."""
        mine, common = random.Random(self.rank), random.Random(9)
        for number in range(1, num_steps + 1):
            shape = common.choice(SHAPES)
            if mine.random() < 0.05:
                time.sleep(mine.random() * pause_s)
            drafts = self.handed.propose(self._state.speculative_rows(shape[0]), shape[1])
            if self.rank == 0:
                newest = [max(acks.load_acquire(slot) for slot in range(NUM_SLOTS)) for acks in self._acks]
                self.leads.update(LEADS[place] for place in lead_bucket(torch.tensor([number - at for at in newest])))
            else:
                self.faults += self._payloads[shape].faults(drafts, torch.tensor([number]))


def hand_drafts(rank: int, size: int) -> tuple[list[int], Counter]:
    hand = Hand(rank, size, 30.0)
    hand.run(STEPS, pause_s=0.01)
    hand.group.exchange(None)
    return hand.faults.tolist(), hand.leads


def hand_drafts_without_waiting(rank: int, size: int) -> Counter:
    hand = Hand(rank, size, 0.5)
    if rank == 0:
        hand.channels[0].end._acks.wait_equal = lambda *args: None
        hand.run(STEPS, pause_s=0.0)
    else:
        with pytest.raises(PeerTimeout, match="rank 0 did not arrive at drafts_to_1 take"):
            time.sleep(0.1)
            hand.run(STEPS, pause_s=0.01)
    hand.group.exchange(None)
    return hand.leads


@pytest.mark.parametrize("size", (2, 3, 4))
def test_drafts_arrive_whole_in_order_and_nobody_is_lapped(size):
    results = run_ranks(size, hand_drafts)
    assert [faults for faults, _ in results] == [[0] * len(FAULTS)] * size
    leads = results[0][1]
    print(leads)
    assert leads.total() == STEPS * (size - 1) and set(leads) <= set(LEADS[1:-1])
    assert leads[str(NUM_SLOTS)] > 0, "rank 0 went as far ahead as it may, so that it had to wait"


def test_a_producer_that_does_not_wait_is_found_out():
    leads, _ = run_ranks(2, hand_drafts_without_waiting)
    assert leads[LEADS[-1]] > 0
