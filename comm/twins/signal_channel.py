"""Put-with-signal as a program of steps: a chain of ranks, each passing on what it took.

The forms are that of `comm/signal_channel.py` (*numbers*: the signal is the message's number; on GPUs the shape `signal` with
waits in the kernel), and those of GPUs: *packets* (each word bears the number, and is what the consumer waits for) and *stream*
(the signal is 1, and is put back to 0 by the consumer; slots follow from a message's place in the graph that is replayed).
"""

from __future__ import annotations

from comm.twins.explore import Kind, Step, Twin

FORMS = ("numbers", "packets", "stream")


def signal_channel(
    size: int,
    num_messages: int,
    num_slots: int = 3,
    num_words: int = 2,
    has_acks: bool = True,
    is_signal_first: bool = False,
    is_ack_first: bool = False,
    form: str = "numbers",
    has_reset: bool = True,
    is_reset_late: bool = False,
    graph_messages: int | None = None,
) -> Twin:
    """Rank 0 produces, each next rank takes and (but for the last) puts to the one after it.

    The defaults are the protocol. `graph_messages`: messages a graph; its first one takes the first slot at every replay.
    Safeguards that can be taken away: the acknowledgement; the order of payload and signal; the order of reading and
    acknowledging; in the stream form the reset of the signal, and its place before the acknowledgement.
    """
    assert form in FORMS
    memory: dict = {}
    for link in range(size - 1):
        for slot in range(num_slots):
            memory |= {("data", link, slot, word): None for word in range(num_words)}
            memory |= {("signal", link, slot): 0, ("ack", link, slot): 0}

    def slot_of(number: int) -> int:
        return (number - 1) % (graph_messages or num_messages) % num_slots

    def previous(number: int) -> int:
        """The last message before `number` in its slot, or 0."""
        return max((other for other in range(1, number) if slot_of(other) == slot_of(number)), default=0)

    def signal(number: int) -> int:
        return 1 if form == "stream" else number

    def put(link: int, number: int) -> list[Step]:
        slot = slot_of(number)
        wait = [Step(Kind.AWAIT_EQUAL, ("ack", link, slot), previous(number))] if has_acks else []
        write = [Step(Kind.STORE, ("data", link, slot, word), number) for word in range(num_words)]
        ring = [] if form == "packets" else [Step(Kind.STORE, ("signal", link, slot), signal(number))]
        return wait + (ring + write if is_signal_first else write + ring)

    def take(link: int, number: int) -> list[Step]:
        slot = slot_of(number)
        ack = [Step(Kind.STORE, ("ack", link, slot), number)] if has_acks else []
        arrived = Kind.AWAIT_EQUAL if form == "packets" else Kind.CHECK
        read = [Step(arrived, ("data", link, slot, word), number) for word in range(num_words)]
        wait = [] if form == "packets" else [Step(Kind.AWAIT_EQUAL, ("signal", link, slot), signal(number))]
        reset = [Step(Kind.STORE, ("signal", link, slot), 0)] if form == "stream" and has_reset else []
        end = ack + reset if is_reset_late else reset + ack
        return wait + (end + read if is_ack_first else read + end)

    programs = []
    for rank in range(size):
        program: list[Step] = []
        for number in range(1, num_messages + 1):
            program += take(rank - 1, number) if rank > 0 else []
            program += put(rank, number) if rank < size - 1 else []
        programs.append(tuple(program))
    return Twin(memory, tuple(programs))
