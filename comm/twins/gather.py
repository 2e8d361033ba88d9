"""The gather to one rank of `comm/cuda/gather_lamport.cu`, of one CTA a rank, as a program of steps."""

from __future__ import annotations

from collections.abc import Sequence

from comm.twins.explore import Kind, Step, Twin


def gather(size: int, roots: Sequence[int | None], num_words: int = 2, num_slots: int = 2, is_first_for_all: bool = True) -> Twin:
    """`size` ranks gather `len(roots)` messages of `num_words` words, call c to `roots[c]` (None: to every rank).

    A word carries the call's number and its source's data at once; slots alternate. The defaults are the protocol.
    `is_first_for_all=False` takes away that the first word goes to every rank and that every rank waits for it.
    """
    memory = {
        (owner, slot, source, word): 0
        for owner in range(size)
        for slot in range(num_slots)
        for source in range(size)
        for word in range(num_words)
    }

    def travels(word: int, receiver: int, root: int | None) -> bool:
        return root is None or root == receiver or (is_first_for_all and word == 0)

    programs = []
    for rank in range(size):
        peers = [peer for peer in range(size) if peer != rank]
        program: list[Step] = []
        for call, root in enumerate(roots, start=1):
            slot = call % num_slots
            for word in range(num_words):
                targets = [peer for peer in peers if travels(word, peer, root)]
                program += [Step(Kind.STORE, (peer, slot, rank, word), call) for peer in targets]
            for word in (word for word in range(num_words) if travels(word, rank, root)):
                program += [Step(Kind.AWAIT_EQUAL, (rank, slot, peer, word), call) for peer in peers]
        programs.append(tuple(program))
    return Twin(memory, tuple(programs))
