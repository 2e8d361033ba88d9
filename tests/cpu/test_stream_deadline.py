"""The host's deadline of stream waits, with recordings in place of the driver: for who waits, and for launches it looks after."""

import time
from types import SimpleNamespace

import pytest

from comm import stream_deadline, stream_ops
from comm.device_watch import WatchParams
from launch.errors import PeerTimeout


def test_the_host_ends_every_wait_after_its_deadline(monkeypatch):
    """Three queued waits, each of which takes up one write of its word."""
    left, records, writes = [3], [], []

    class Watch:
        params = WatchParams(1, 2048, 3)

        def give_up(self, *record):
            records.append(record)

        def check(self):
            if records:
                raise PeerTimeout(records[0][2], "late")

    def write(stream, address, value):
        writes.append((stream, address, value))
        left[0] -= address == 4096

    event = SimpleNamespace(record=lambda: None, query=lambda: left[0] <= 0)
    monkeypatch.setattr(stream_deadline.torch.cuda, "Stream", lambda priority: SimpleNamespace(cuda_stream=5))
    monkeypatch.setattr(stream_deadline.torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(stream_ops, "write_value32", write)
    deadline = stream_deadline.StreamDeadline(Watch(), 0.05)
    deadline.guard(4096, 1, 7, 3)
    started = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        deadline.synchronize()
    assert 0.05 <= time.monotonic() - started < 5
    assert caught.value.rank == 3 and records == [(7, 0, 3, 0, 1)]
    assert writes == [(5, 2048, 1)] + 3 * [(5, 4096, 1)]


def test_what_ends_in_time_raises_nothing(monkeypatch):
    monkeypatch.setattr(stream_deadline.torch.cuda, "Stream", lambda priority: None)
    event = SimpleNamespace(record=lambda: None, query=lambda: True)
    monkeypatch.setattr(stream_deadline.torch.cuda, "Event", lambda: event)
    stream_deadline.StreamDeadline(SimpleNamespace(check=lambda: None), 0.05).synchronize()


class Launches:
    """A stream of launches, each of which holds one wait for a word of 4096, and its deadline. `come`: whether words come."""

    params = WatchParams(1, 2048, 3)

    def __init__(self, monkeypatch, limit_s):
        self.done, self.noted, self.come, self.records, self.aborts = 0, 0, True, [], 0
        monkeypatch.setattr(stream_deadline.torch.cuda, "Stream", lambda priority: SimpleNamespace(cuda_stream=5, device="there"))
        monkeypatch.setattr(stream_deadline.torch.cuda, "Event", self.event)
        monkeypatch.setattr(stream_deadline.torch.cuda, "set_device", lambda device: self.devices.append(device))
        monkeypatch.setattr(stream_ops, "write_value32", self.write)
        self.devices = []
        self.deadline = stream_deadline.StreamDeadline(self, limit_s)
        self.deadline.guard(4096, 1, 7, 3)

    def event(self):
        self.noted += 1
        number = self.noted

        def query():
            if self.come:
                self.done = self.noted
            return self.done >= number

        return SimpleNamespace(record=lambda: None, query=query)

    def write(self, stream, address, value):
        assert stream == 5
        self.aborts += address == 2048
        self.done += address == 4096

    def give_up(self, *record):
        self.records.append(record)


def wait_until(holds):
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_thread_ends_the_waits_of_launches_that_nobody_waits_for(monkeypatch):
    launches = Launches(monkeypatch, 0.3)
    for _ in range(5):
        launches.deadline.note_launch()
    time.sleep(0.8)
    assert not launches.records and launches.devices == ["there"], "what comes in time is left alone"
    launches.come, started = False, time.monotonic()
    for _ in range(3):
        launches.deadline.note_launch()
    wait_until(lambda: launches.done == 8)
    assert time.monotonic() - started > 0.3
    wait_until(lambda: launches.aborts == 3)
    assert launches.records[0] == (7, 0, 3, 0, 1), "names the peer"
    launches.deadline.close()
    assert launches.done == 8, "each wait got one word"


def test_the_thread_ends_at_once_with_the_deadline(monkeypatch):
    launches = Launches(monkeypatch, 60.0)
    launches.come = False
    launches.deadline.note_launch()
    started = time.monotonic()
    launches.deadline.close()
    launches.deadline.close()
    assert time.monotonic() - started < 10 and not launches.records
    Launches(monkeypatch, 60.0).deadline.close()  # of which no launch was noted
