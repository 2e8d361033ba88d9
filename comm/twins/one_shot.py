"""The one-shot all-reduce (`comm/all_reduce_one_shot.py` and `comm/barrier.py`) as a program of steps."""

from __future__ import annotations

from comm.twins.explore import Kind, Step, Twin


def one_shot(
    size: int,
    num_calls: int,
    num_slots: int = 2,
    num_halves: int = 2,
    num_words: int = 2,
    is_equality: bool = True,
    modulus: int | None = None,
    calls_per_graph: int | None = None,
    is_flag_first: bool = False,
) -> Twin:
    """`size` ranks reduce `num_calls` messages of `num_words` words, written one at a time, so that they can be torn.

    The defaults are the protocol. Each other argument takes a safeguard away: fewer data slots or flag halves; "at
    least" instead of equality; `modulus`, a counter that wraps; `calls_per_graph`, epochs baked into a graph of so many
    calls that is replayed; the flag raised before the data is written.
    """
    memory: dict = {}
    for owner in range(size):
        memory |= {("data", owner, slot, word): None for slot in range(num_slots) for word in range(num_words)}
        memory |= {("arrived", owner, half, peer): 0 for half in range(num_halves) for peer in range(size)}
    programs = []
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        program = []
        for call in range(1, num_calls + 1):
            epoch = call
            if calls_per_graph is not None:
                epoch = (call - 1) % calls_per_graph + 1
            if modulus is not None:
                epoch %= modulus
            slot, half = call % num_slots, epoch % num_halves
            write = [Step(Kind.STORE, ("data", rank, slot, word), (rank, call)) for word in range(num_words)]
            raise_flag = [Step(Kind.STORE, ("arrived", peer, half, rank), epoch) for peer in peers]
            wait_kind = Kind.AWAIT_EQUAL if is_equality else Kind.AWAIT_AT_LEAST
            program += raise_flag + write if is_flag_first else write + raise_flag
            program += [Step(wait_kind, ("arrived", rank, half, peer), epoch) for peer in peers]
            program += [
                Step(Kind.CHECK, ("data", peer, slot, word), (peer, call))
                for peer in peers
                for word in range(num_words)
            ]
        programs.append(tuple(program))
    return Twin(memory, tuple(programs))
