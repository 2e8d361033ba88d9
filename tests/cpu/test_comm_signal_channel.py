"""Put-with-signal between two real processes."""

import random
import time

import pytest
import torch

from comm.heap import Layout
from comm.heap_posix import PosixHeap
from comm.process_group import ProcessGroup
from comm.signal_channel import NUM_SLOTS, SignalChannel, SignalConsumer, SignalProducer
from comm.words import Patience
from launch.environment import Environment
from launch.errors import PeerTimeout
from launch.world import World
from tests.ranks_harness import run_ranks

SLOT_BYTES = 4096


def open_end(rank, size, deadline_s=30.0, payload_at=1):
    world = World.from_environment(Environment.read())
    group = ProcessGroup(world, 60)
    heap = PosixHeap(rank, size, world.run_id, Layout.of(SignalChannel.regions("test", SLOT_BYTES)), group.exchange)
    end = SignalProducer if rank == 0 else SignalConsumer
    return end(heap, "test", 0, 1, Patience.for_ranks(size, deadline_s), payload_at=payload_at), group


def payload(number):
    generator = random.Random(number)
    return torch.tensor(list(generator.randbytes(generator.choice((0, 1, 7, 100, SLOT_BYTES)))), dtype=torch.uint8)


def stream(rank, size, payload_at, num_messages):
    """The producer runs ahead whenever it can; the consumer dawdles, so that only acknowledgements hold it back."""
    channel, group = open_end(rank, size, payload_at=payload_at)
    for number in range(num_messages):
        if rank == 0:
            channel.put(payload(number))
        else:
            if number % 97 == 0:
                time.sleep(0.005)
            taken = []
            channel.take(lambda x, taken=taken: taken.append(x.clone()))
            assert torch.equal(taken[0], payload(number)), number
    group.exchange(None)


@pytest.mark.parametrize("payload_at", [0, 1])
def test_every_message_arrives_whole_and_in_order(payload_at):
    run_ranks(2, stream, payload_at, 600)


def zeros_of_both_signs(rank, size):
    channel, group = open_end(rank, size)
    for value in (0.0, -0.0, 0.0, -0.0, -0.0):
        x = torch.full((64,), value)
        if rank == 0:
            channel.send(x.view(torch.uint8))
        else:
            out = torch.full((64,), 9.0)
            channel.receive(out.view(torch.uint8))
            assert torch.equal(out.view(torch.int32), x.view(torch.int32))
    group.exchange(None)


def test_zeros_of_both_signs_are_data():
    run_ranks(2, zeros_of_both_signs)


def run_out_of_slots(rank, size):
    channel, group = open_end(rank, size, deadline_s=0.3)
    if rank == 0:
        for _ in range(NUM_SLOTS):
            channel.put(torch.ones(8, dtype=torch.uint8))
        with pytest.raises(PeerTimeout, match="rank 1 did not arrive at test put number 4") as caught:
            channel.put(torch.full((8,), 2, dtype=torch.uint8))
        assert (caught.value.record.seen, caught.value.record.expected) == (0, 1)
    group.exchange(None)
    if rank == 1:
        for _ in range(NUM_SLOTS):  # what the producer could not overwrite is still there
            out = torch.zeros(8, dtype=torch.uint8)
            channel.receive(out)
            assert out.tolist() == [1] * 8
        with pytest.raises(PeerTimeout, match="rank 0 did not arrive at test take number 4"):
            channel.receive(torch.zeros(8, dtype=torch.uint8))
    group.exchange(None)
    if rank == 0:
        channel.put(torch.ones(8, dtype=torch.uint8))  # an expired wait does no harm to what comes after
    else:
        channel.receive(torch.zeros(8, dtype=torch.uint8))
    group.exchange(None)


def test_a_producer_cannot_lap_its_consumer_and_both_have_deadlines():
    run_ranks(2, run_out_of_slots)


def disagree_on_size(rank, size):
    channel, group = open_end(rank, size)
    if rank == 0:
        with pytest.raises(ValueError, match="does not fit a slot"):
            channel.put(torch.zeros(SLOT_BYTES + 1, dtype=torch.uint8))
        channel.send(torch.zeros(10, dtype=torch.uint8))
    else:
        with pytest.raises(ValueError, match="rank 0 sent 10 bytes where 12 were expected"):
            channel.receive(torch.zeros(12, dtype=torch.uint8))
    group.exchange(None)


def test_unequal_sizes_are_noticed():
    run_ranks(2, disagree_on_size)
