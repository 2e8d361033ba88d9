"""The Lamport all-reduce as a program of steps: no flags, the arrival of the data is the signal. Used on GPUs.

Every rank pushes its data into a slot at every rank; a word that still holds -0.0 has not arrived. Slots are used in
turn and must be set back to -0.0 by their owner before they are pushed to again.

*Source*: the three-slot scheme of TensorRT-LLM's and FlashInfer's one-shot all-reduce.
"""

from __future__ import annotations

from comm.twins.explore import EMPTY, Kind, Step, Twin


def lamport(
    size: int,
    num_calls: int,
    num_slots: int = 3,
    num_words: int = 1,
    is_sanitised: bool = True,
    clears: str = "next",
    is_clear_late: bool = False,
    modulus: int | None = None,
) -> Twin:
    """`size` ranks reduce `num_calls` messages; rank 0's second one is all -0.0.

    The defaults are the protocol: in call `g` a rank clears the slot of call `g - 1`, which is next pushed to in call
    `g + 2`. `clears`: `next` is that slot, seen from three slots; `own` is the slot just read, in the same call.
    `is_clear_late`: after the reads instead of before the waits; on a GPU other threads do it, at any time.
    `is_sanitised`: whether -0.0 in the data is sent as +0.0. `modulus`: call numbers wrap; the slots stay in turn only if
    it is a multiple of their number.
    """
    memory: dict = {
        ("data", owner, slot, source, word): EMPTY
        for owner in range(size)
        for slot in range(num_slots)
        for source in range(size)
        for word in range(num_words)
    }

    def value(source: int, call: int) -> str:
        if (source, call) == (0, 2):
            return "+0.0" if is_sanitised else EMPTY
        return f"{source}@{call}"

    programs = []
    for rank in range(size):
        program: list[Step] = []
        for call in range(1, num_calls + 1):
            number = call if modulus is None else call % modulus
            slot = number % num_slots
            cleared = slot if clears == "own" else (number + num_slots - 1) % num_slots
            words = [(source, word) for source in range(size) for word in range(num_words)]
            program += [
                Step(Kind.STORE, ("data", owner, slot, rank, word), value(rank, call))
                for owner in range(size)
                for word in range(num_words)
            ]
            clear = [Step(Kind.STORE, ("data", rank, cleared, source, word), EMPTY) for source, word in words]
            read = [
                Step(Kind.AWAIT_DATA, ("data", rank, slot, source, word), value(source, call)) for source, word in words
            ]
            program += read + clear if is_clear_late or clears == "own" else clear + read
        programs.append(tuple(program))
    return Twin(memory, tuple(programs))
