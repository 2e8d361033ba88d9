"""The POSIX heap: layout, equal views, clear refusal when memory is short, and nothing left behind."""

import os
import subprocess
import sys
import threading

import pytest
import torch

from comm.heap import REGION_ALIGNMENT, Layout, Region
from comm.heap_posix import SHM_FOLDER, PosixHeap, _Segment, sweep
from comm.process_group import ProcessGroup
from comm.words import Patience, Words
from launch.environment import Environment
from launch.errors import DoorbellError, HeapExhausted, PeerLost, PeerTimeout
from launch.world import World
from tests.ranks_harness import run_ranks

LAYOUT = Layout.of([Region("bytes", 1000), Region.of_words("words", 5)], [Region("tail", 1)])


def alone(value):
    return [value]


def our_segments():
    return sorted(SHM_FOLDER.glob(f"doorbell-*{os.getpid()}*"))


def test_layout_is_aligned_disjoint_and_named_once():
    spans = [LAYOUT.span(name) for name in ("bytes", "words", "tail")]
    assert [span.stop - span.start for span in spans] == [1000, 5 * 128, 1]
    assert all(span.start % REGION_ALIGNMENT == 0 for span in spans)
    assert all(a.stop <= b.start for a, b in zip(spans, spans[1:]))
    assert LAYOUT.num_bytes >= spans[-1].stop
    with pytest.raises(ValueError, match="two heap regions are called x"):
        Layout.of([Region("x", 1)], [Region("x", 2)])


def read_each_others_memory(rank, size):
    world = World.from_environment(Environment.read())
    group = ProcessGroup(world, 60)
    heap = PosixHeap(rank, size, world.run_id, LAYOUT, group.exchange)
    assert not any(str(os.getpid()) in path.name for path in SHM_FOLDER.glob("doorbell-*"))
    assert all(heap.tensor(peer, "bytes").sum() == 0 for peer in range(size))
    group.exchange(None)
    heap.tensor(rank, "bytes").fill_(rank + 1)
    for peer in range(size):
        heap.words(peer, "words").store_release(rank, 2**63 + rank)
    group.exchange(None)
    for peer in range(size):
        assert heap.tensor(peer, "bytes").tolist() == [peer + 1] * 1000
        assert [heap.words(rank, "words").load_acquire(i) for i in range(size)] == [2**63 + i for i in range(size)]
        assert heap.tensor(peer, "tail").tolist() == [0]
    view = heap.tensor((rank + 1) % size, "bytes")
    heap.close()
    heap.close()
    assert view.tolist() == [(rank + 1) % size + 1] * 1000  # a view outlives the heap
    group.close()


def test_all_ranks_see_the_same_bytes():
    run_ranks(3, read_each_others_memory)
    assert our_segments() == []


def test_too_little_memory_is_one_clear_error():
    layout = Layout.of([Region("huge", 1 << 50)])
    with pytest.raises(HeapExhausted) as caught:
        PosixHeap(0, 1, "short", layout, alone)
    message = str(caught.value)
    assert str(1 << 50) in message and "free" in message and "--shm-size" in message
    assert our_segments() == []


def test_a_peers_failure_is_everybodys():
    def exchange_with_failed_peer(value):
        return [value, [True, "rank 1 has no memory"]]

    with pytest.raises(HeapExhausted, match="rank 1 has no memory"):
        PosixHeap(0, 2, "peer", LAYOUT, exchange_with_failed_peer)
    assert our_segments() == []


def test_ranks_without_a_common_shm_are_told():
    def exchange_with_stranger(value):
        return [value, "/dev/shm/doorbell-of-another-machine" if isinstance(value, str) else None]

    with pytest.raises(DoorbellError, match="rank 0 cannot see another rank's shared memory"):
        PosixHeap(0, 2, "stranger", LAYOUT, exchange_with_stranger)
    assert our_segments() == []


def test_segments_of_the_dead_are_swept_and_those_of_the_living_kept(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from comm.heap_posix import _Segment;"
        "_Segment.create(Path(sys.argv[1]), 'dead', 0, 4096, 1); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    (stale,) = tmp_path.iterdir()
    living = _Segment.create(tmp_path, "alive", 0, 4096, 1)
    other = tmp_path / "somebody-elses"
    other.touch()
    assert sweep(tmp_path) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([living.path, other])
    living.unlink()
    assert list(tmp_path.iterdir()) == [other]


def test_run_ids_of_any_spelling_make_names(tmp_path):
    for run_id in ("", "none", "../../etc", "a b\nc", "x" * 300, "ü"):
        segment = _Segment.create(tmp_path, run_id, 0, 8, 1)
        assert segment.path.parent == tmp_path and segment.path.exists()
        segment.unlink()


def words_in_memory(num_words=2):
    return Words(memoryview(bytearray(num_words * 128)))


def test_wait_passes_on_equality_only():
    words = words_in_memory()
    patience = Patience(deadline_s=0.05, num_spins=5)
    words.store_release(1, 7)
    words.wait_equal(1, 7, patience, "test", 7, peer=3)
    for expected in (6, 8):  # behind and ahead
        with pytest.raises(PeerTimeout) as caught:
            words.wait_equal(1, expected, patience, "test", 7, peer=3)
        record = caught.value.record
        assert (record.operation, record.epoch, record.peer, record.seen, record.expected) == (
            "test",
            7,
            3,
            7,
            expected,
        )
        assert "rank 3 did not arrive at test number 7 within 0.05 s" in str(caught.value)


@pytest.mark.parametrize("delay_s", [0.0, 0.002, 0.1])
def test_wait_wakes_at_every_stage_of_its_patience(delay_s):
    words = words_in_memory()
    timer = threading.Timer(delay_s, words.store_release, (0, 1))
    timer.start()
    words.wait_equal(0, 1, Patience(deadline_s=10), "test", 1, 0)
    timer.join()


def test_wait_ends_when_the_peer_is_lost_but_not_if_it_had_arrived():
    words = words_in_memory()
    gone = PeerLost(2, "rank 2 left")
    with pytest.raises(PeerLost, match="rank 2 left"):
        words.wait_equal(0, 1, Patience(10, 5, lambda peer: gone if peer == 2 else None), "test", 1, 2)

    def arrive_and_leave(peer):
        words.store_release(0, 1)
        return gone

    words.wait_equal(0, 1, Patience(10, 5, arrive_and_leave), "test", 1, 2)


def test_heap_memory_is_writable_torch_memory():
    heap = PosixHeap(0, 1, "one", LAYOUT, alone)
    floats = heap.tensor(0, "bytes").view(torch.float32)
    floats.fill_(1.5)
    assert heap.tensor(0, "bytes").view(torch.float32).sum() == 375
