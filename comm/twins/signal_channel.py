"""Put-with-signal (`comm/signal_channel.py`) as a program of steps: a chain of ranks, each passing on what it took."""

from __future__ import annotations

from comm.twins.explore import Kind, Step, Twin


def signal_channel(
    size: int,
    num_messages: int,
    num_slots: int = 3,
    num_words: int = 2,
    has_acks: bool = True,
    is_signal_first: bool = False,
    is_ack_first: bool = False,
) -> Twin:
    """Rank 0 produces, each next rank takes and (but for the last) puts to the one after it.

    The defaults are the protocol. Safeguards that can be taken away: the acknowledgement; the order of payload and
    signal; the order of reading and acknowledging.
    """
    memory: dict = {}
    for link in range(size - 1):
        for slot in range(num_slots):
            memory |= {("data", link, slot, word): None for word in range(num_words)}
            memory |= {("signal", link, slot): 0, ("ack", link, slot): 0}

    def put(link: int, number: int) -> list[Step]:
        slot = number % num_slots
        wait = [Step(Kind.AWAIT_EQUAL, ("ack", link, slot), max(0, number - num_slots))] if has_acks else []
        write = [Step(Kind.STORE, ("data", link, slot, word), number) for word in range(num_words)]
        ring = [Step(Kind.STORE, ("signal", link, slot), number)]
        return wait + (ring + write if is_signal_first else write + ring)

    def take(link: int, number: int) -> list[Step]:
        slot = number % num_slots
        wait = [Step(Kind.AWAIT_EQUAL, ("signal", link, slot), number)]
        read = [Step(Kind.CHECK, ("data", link, slot, word), number) for word in range(num_words)]
        ack = [Step(Kind.STORE, ("ack", link, slot), number)] if has_acks else []
        return wait + (ack + read if is_ack_first else read + ack)

    programs = []
    for rank in range(size):
        program: list[Step] = []
        for number in range(1, num_messages + 1):
            program += take(rank - 1, number) if rank > 0 else []
            program += put(rank, number) if rank < size - 1 else []
        programs.append(tuple(program))
    return Twin(memory, tuple(programs))
