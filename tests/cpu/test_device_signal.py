"""The host's half of put-with-signal on GPUs, with recordings in place of the driver: who may call, what is enqueued where."""

import enum
from types import SimpleNamespace

import pytest

from comm import device_signal, stream_ops
from comm.device_signal import NUM_SLOTS, DeviceSignalChannel, SlotOrder
from comm.device_watch import WatchParams
from comm.heap import Layout
from launch.errors import DoorbellError

SLOT_BYTES = 64
KERNELS = [f"{shape}_{verb}" for shape in ("packet", "signal") for verb in ("put", "take", "relay")]


class FakeHeap:
    """Region `name` of rank `peer` lies at a million times `peer + 1`, plus its offset."""

    def __init__(self, rank):
        stems = ("there", "back")
        self.rank, self.layout = rank, Layout.of(*(DeviceSignalChannel.regions(stem, SLOT_BYTES) for stem in stems))

    def address(self, peer, name):
        return 1_000_000 * (peer + 1) + self.layout.offsets[name]


class FakeTensor(SimpleNamespace):
    def __init__(self, num_bytes, address=4096, is_cuda=True, is_contiguous=True):
        super().__init__(numel=lambda: num_bytes, element_size=lambda: 1, data_ptr=lambda: address, is_cuda=is_cuda)
        self.is_contiguous = lambda: is_contiguous


@pytest.fixture
def site(monkeypatch):
    """`site.log` is what was enqueued; `site.capture` is the capture that is under way."""
    site = SimpleNamespace(log=[], capture=None, guarded=[])

    class Kernel:
        def __init__(self, name):
            self.name = name

        def launch(self, grid, threads, args, stream, is_pdl):
            assert (grid, stream) == (1, 77)
            site.log.append((self.name, threads, args[0], is_pdl))

    def channel(rank, stem="there", producer=0, wait="kernel", **more):
        deadline = SimpleNamespace(guard=lambda *word: site.guarded.append(word)) if wait == "stream" else None
        watch = SimpleNamespace(params=WatchParams(1, 2, 3))
        kernels = {name: Kernel(name) for name in KERNELS}
        more = {"deadline": deadline, **more}
        return DeviceSignalChannel(FakeHeap(rank), watch, kernels, stem, producer, 1 - producer, wait, **more)

    site.channel = channel
    monkeypatch.setattr(device_signal, "_stream", lambda: 77)
    monkeypatch.setattr(stream_ops, "capture_id", lambda stream: site.capture)
    monkeypatch.setattr(stream_ops, "wait_value32", lambda *args: site.log.append(("wait", *args)))
    return site


def test_the_shape_follows_from_the_wait_and_the_link(site):
    assert site.channel(0).shape == "packet"
    assert site.channel(0, is_writes_only=True).shape == "signal"
    assert site.channel(0, wait="stream").shape == "signal"
    with pytest.raises(ValueError, match="waits by kernel or stream, not 'host'"):
        site.channel(0, wait="host")


def test_both_ends_agree_on_addresses(site):
    site.channel(0).put(FakeTensor(64))
    site.channel(1).take(FakeTensor(64))
    (put, put_threads, put_params, _), (take, take_threads, take_params, _) = site.log
    assert (put, take) == ("packet_put", "packet_take")
    assert put_threads == take_threads == 32
    for name in ("slots", "signals", "acks", "slot_words", "fixed_slot"):
        assert getattr(put_params.end, name) == getattr(take_params.end, name), name
    assert put_params.end.slots // 1_000_000 == 2 and put_params.end.acks // 1_000_000 == 1
    assert put_params.end.state // 1_000_000 == 1 and take_params.end.state // 1_000_000 == 2
    assert (put_params.end.peer, take_params.end.peer) == (1, 0)
    assert (put_params.end.fixed_slot, put_params.num_words, put_params.end.slot_words) == (NUM_SLOTS, 8, 8)
    assert put_params.watch.limit_ns == 3


def test_a_stream_wait_goes_before_the_kernel_on_the_slots_word(site):
    consumer = site.channel(1, wait="stream")
    signals = FakeHeap(1).address(1, "there.signals")
    for slot in (0, 1, 2, 0):
        site.log.clear()
        consumer.take(FakeTensor(64))
        wait, (name, _, params, is_pdl) = site.log
        assert wait == ("wait", 77, signals + 4 * slot, 1)
        assert (name, params.end.fixed_slot, is_pdl) == ("signal_take", slot, False)
    assert [word[0] for word in site.guarded] == [signals, signals + 4, signals + 8]
    with pytest.raises(ValueError, match="no deadline of its own"):
        site.channel(1, wait="stream", deadline=None)


def test_the_producer_of_a_stream_wait_takes_the_same_slots(site):
    producer = site.channel(0, wait="stream")
    for capture in (None, None, 5, 5, 5, 5, None, 6):
        site.capture = capture
        producer.put(FakeTensor(64))
    assert [params.end.fixed_slot for _, _, params, _ in site.log] == [0, 1, 0, 1, 2, 0, 2, 0]


def test_slots_begin_anew_with_every_capture():
    order = SlotOrder()
    assert [order.next(capture) for capture in (1, 1, 2, 2, 2, 2, 3)] == [0, 1, 0, 1, 2, 0, 0]


def test_a_relay_consumes_one_channel_and_produces_on_another(site):
    there, back = site.channel(1, wait="stream"), site.channel(1, "back", producer=1, wait="stream")
    there.relay(FakeTensor(16), back)
    wait, (name, _, params, _) = site.log
    assert wait[0] == "wait" and name == "signal_relay" and params.num_words == 2
    assert (params.source.peer, params.onward.peer) == (0, 0)
    assert params.source.slots // 1_000_000 == 2 and params.onward.slots // 1_000_000 == 1
    with pytest.raises(ValueError, match="wait alike"):
        there.relay(FakeTensor(16), site.channel(1, "back", producer=1))


def test_a_launch_is_noted_where_a_stream_waits(site):
    noted = []
    deadline = SimpleNamespace(guard=lambda *word: None, note_launch=lambda: noted.append(1))
    for rank, wait, count in ((0, "kernel", 0), (1, "kernel", 0), (0, "stream", 0), (1, "stream", 1)):
        site.channel(rank, wait=wait, deadline=deadline).note_launch()
        assert len(noted) == count, (rank, wait)


@pytest.mark.parametrize(
    "tensor, error, text",
    [
        (FakeTensor(0), ValueError, "0 bytes"),
        (FakeTensor(SLOT_BYTES + 8), ValueError, "72 bytes does not fit a slot of 64"),
        (FakeTensor(12), TypeError, "multiple of 8"),
        (FakeTensor(8, address=4100), TypeError, "8-byte aligned"),
        (FakeTensor(8, is_cuda=False), TypeError, "on a GPU"),
        (FakeTensor(8, is_contiguous=False), TypeError, "contiguous"),
    ],
)
def test_a_refused_payload_leaves_nothing_behind(site, tensor, error, text):
    ends = {"put": site.channel(0, wait="stream"), "take": site.channel(1, wait="stream")}
    for verb, end in ends.items():
        with pytest.raises(error, match=text):
            getattr(end, verb)(tensor)
        assert site.log == []
        getattr(end, verb)(FakeTensor(8))
        assert site.log[-1][2].end.fixed_slot == 0
        site.log.clear()


def test_only_the_ends_may_call(site):
    with pytest.raises(ValueError, match="rank 0 puts, and this is rank 1"):
        site.channel(1).put(FakeTensor(8))
    with pytest.raises(ValueError, match="rank 1 takes, and this is rank 0"):
        site.channel(0).take(FakeTensor(8))


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_NOT_SUPPORTED = 801


class RecordingDriver:
    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_EQ=1)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=0)
    CUstreamCaptureStatus = SimpleNamespace(CU_STREAM_CAPTURE_STATUS_NONE=0)

    def __init__(self):
        self.calls, self.result, self.capturing = [], Code.CUDA_SUCCESS, (0, 0)

    def cuStreamWaitValue32(self, *args):
        self.calls.append(("wait", *args))
        return (self.result,)

    def cuStreamWriteValue32(self, *args):
        self.calls.append(("write", *args))
        return (self.result,)

    def cuStreamGetCaptureInfo(self, stream):
        return (self.result, *self.capturing, "graph", [], [], 0)


def test_stream_operations_ask_the_driver_for_equality_and_tell_refusals(monkeypatch):
    driver = RecordingDriver()
    monkeypatch.setattr(stream_ops, "_driver", lambda: driver)
    stream_ops.wait_value32(7, 4096, 1)
    stream_ops.write_value32(8, 4100, 0)
    assert driver.calls == [("wait", 7, 4096, 1, 1), ("write", 8, 4100, 0, 0)]
    assert stream_ops.capture_id(7) is None
    driver.capturing = (1, 42)
    assert stream_ops.capture_id(7) == 42
    driver.result = Code.CUDA_ERROR_NOT_SUPPORTED
    with pytest.raises(DoorbellError, match="cuStreamWaitValue32 failed with CUDA_ERROR_NOT_SUPPORTED"):
        stream_ops.wait_value32(7, 4096, 1)
