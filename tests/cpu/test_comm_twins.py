"""Every interleaving of the protocols' twins; and, with each safeguard taken away, the failure that it prevents."""

import pytest

from comm.twins.explore import Kind, ProtocolBroken, Step, Twin, explore
from comm.twins.gather import gather
from comm.twins.lamport import lamport
from comm.twins.one_shot import one_shot
from comm.twins.signal_channel import signal_channel

SOUND = {
    "one-shot, 2 ranks": one_shot(2, 12),
    "one-shot, 3 ranks": one_shot(3, 8, num_words=1),
    "one-shot, 3 ranks, torn words": one_shot(3, 6),
    "one-shot, counter wraps": one_shot(2, 9, modulus=4),
    "channel, 2 ranks": signal_channel(2, 12),
    "channel, 3 ranks": signal_channel(3, 12),
    "channel, acknowledged, needs no third slot to be safe": signal_channel(2, 6, num_slots=2),
    "packets, 2 ranks": signal_channel(2, 12, form="packets"),
    "packets, 3 ranks": signal_channel(3, 9, form="packets"),
    "stream waits, 2 ranks": signal_channel(2, 12, form="stream"),
    "stream waits, 3 ranks": signal_channel(3, 9, form="stream"),
    "stream waits, graphs of one message": signal_channel(2, 6, form="stream", graph_messages=1),
    "stream waits, graphs of four": signal_channel(3, 9, form="stream", graph_messages=4),
    "stream waits, graphs of five, 3 ranks": signal_channel(3, 8, form="stream", graph_messages=5),
    "lamport, 2 ranks": lamport(2, 8, num_words=2),
    "lamport, 2 ranks, late clearing": lamport(2, 6, num_words=2, is_clear_late=True),
    "lamport, 3 ranks": lamport(3, 6),
    "lamport, 3 ranks, late clearing": lamport(3, 6, is_clear_late=True),
    "lamport, counter wraps in step with its slots": lamport(2, 8, modulus=6),
    "gather to a root, 2 ranks": gather(2, [0] * 6),
    "gather to a root, 3 ranks": gather(3, [0] * 4),
    "gather to changing roots and to all": gather(3, [0, None, 2, 0]),
    "lamport, two slots each re-armed by its reader": lamport(2, 6, num_slots=2, clears="own"),
}

BROKEN = {
    "one-shot with one data slot": (one_shot(2, 2, num_slots=1), "wrong data"),
    "one-shot with one data slot, 3 ranks": (one_shot(3, 2, num_slots=1), "wrong data"),
    "one-shot with one flag half": (one_shot(2, 2, num_halves=1), "deadlock"),
    "one-shot with the flag before the data": (one_shot(2, 1, is_flag_first=True), "wrong data"),
    "one-shot, >= and a counter that wraps": (one_shot(2, 5, modulus=4, is_equality=False), "wrong data"),
    "one-shot, >= and epochs baked into a graph": (one_shot(2, 4, calls_per_graph=2, is_equality=False), "wrong data"),
    "one-shot, = and epochs baked into a graph": (one_shot(2, 4, calls_per_graph=2), "wrong data"),
    "channel without acknowledgement": (signal_channel(2, 5, has_acks=False), "wrong data"),
    "channel with the signal before the payload": (signal_channel(2, 1, is_signal_first=True), "wrong data"),
    "channel that acknowledges before it reads": (signal_channel(2, 4, is_ack_first=True), "wrong data"),
    "packets without acknowledgement": (signal_channel(2, 5, form="packets", has_acks=False), "deadlock"),
    "packets acknowledged before they are read": (signal_channel(2, 4, form="packets", is_ack_first=True), "deadlock"),
    "stream waits without acknowledgement": (signal_channel(2, 5, form="stream", has_acks=False), "deadlock"),
    "stream waits without reset": (signal_channel(2, 4, form="stream", has_reset=False), "wrong data"),
    "stream waits, reset after the acknowledgement": (signal_channel(2, 5, form="stream", is_reset_late=True), "deadlock"),
    "stream waits, the signal before the payload": (signal_channel(2, 1, form="stream", is_signal_first=True), "wrong data"),
    "gather to a root that says nothing": (gather(2, [0] * 3, is_first_for_all=False), "deadlock"),
    "gather with one slot": (gather(3, [0] * 2, num_slots=1), "deadlock"),
    "lamport with two slots and lazy clearing": (lamport(2, 3, num_slots=2), "deadlock"),
    "lamport with two slots and lazy clearing, 3 ranks": (lamport(3, 3, num_slots=2), "deadlock"),
    "lamport, a counter whose wrap puts its slots out of turn": (lamport(2, 5, modulus=4), "wrong data"),
    "lamport with -0.0 not sanitised": (lamport(2, 2, is_sanitised=False), "deadlock"),
}


@pytest.mark.parametrize("name", SOUND)
def test_no_interleaving_fails(name):
    assert explore(SOUND[name]) > 50


@pytest.mark.parametrize("name", BROKEN)
def test_without_its_safeguard_some_interleaving_fails(name):
    twin, fault = BROKEN[name]
    with pytest.raises(ProtocolBroken) as caught:
        explore(twin)
    assert caught.value.fault == fault
    assert caught.value.trace


def test_explorer_sees_every_order_and_a_deadlock():
    store = Step(Kind.STORE, "x", 1)
    assert explore(Twin({"x": 0}, ((store,), (store,)))) == 4  # both, either first, done
    with pytest.raises(ProtocolBroken, match="deadlock"):
        explore(Twin({"x": 0}, ((Step(Kind.AWAIT_EQUAL, "x", 2),), (store,))))
    with pytest.raises(ProtocolBroken, match="wrong data"):
        explore(Twin({"x": 0}, ((Step(Kind.CHECK, "x", 0),), (store,))))
    with pytest.raises(MemoryError):
        explore(one_shot(2, 3), max_states=10)
