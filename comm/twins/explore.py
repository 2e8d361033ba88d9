"""Runs a protocol in every possible order of its ranks' steps, and says where it goes wrong.

A protocol twin is a straight-line program of atomic steps for each rank, over one shared memory. There are no other
variables: what a rank reads is checked as it is read. So a state is the memory and one program counter a rank, and the
search can remember every state it has seen. Memory is sequentially consistent here; what weaker machines may reorder is
modelled by writing the steps in the other order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

EMPTY = "-0.0"
"""What a word holds when nothing has arrived, in protocols where the arrival is the data."""


class Kind(Enum):
    """What a step does with its word."""

    STORE = "store"  # write `value`
    CHECK = "check"  # read; anything but `value` is a fault
    AWAIT_EQUAL = "await ="  # block until the word is `value`
    AWAIT_AT_LEAST = "await >="  # block until the word is `value` or more
    AWAIT_DATA = "await data"  # block until the word is not EMPTY, then as CHECK


@dataclass(frozen=True)
class Step:
    """One atomic access of one word."""

    kind: Kind
    address: Hashable
    value: Hashable

    def __str__(self) -> str:
        return f"{self.kind.value} {self.address} {self.value}"


@dataclass(frozen=True)
class Twin:
    """A protocol run: `programs[rank]` is what each rank does, `memory` the words and what they hold at first."""

    memory: dict[Hashable, Hashable]
    programs: tuple[tuple[Step, ...], ...]


class ProtocolBroken(Exception):
    """Some interleaving fails. `trace` is one such, as (rank, step) in order; `fault` is `wrong data` or `deadlock`."""

    def __init__(self, fault: str, trace: Sequence[tuple[int, Step]], detail: str):
        lines = "\n".join(f"  rank {rank}: {step}" for rank, step in trace)
        super().__init__(f"{fault}: {detail}, after\n{lines}")
        self.fault, self.trace = fault, tuple(trace)


State = tuple[tuple[Hashable, ...], tuple[int, ...]]


def explore(twin: Twin, max_states: int = 1_000_000) -> int:
    """Visit every reachable state and return their number.

    *Raises* `ProtocolBroken` for a wrong read or a deadlock, `MemoryError` beyond `max_states`: an unfinished search
    proves nothing and must not look like success.
    """
    addresses = {address: i for i, address in enumerate(twin.memory)}
    programs = [[(step, addresses[step.address]) for step in program] for program in twin.programs]
    start: State = (tuple(twin.memory.values()), (0,) * len(programs))
    parents: dict[State, tuple[State, int] | None] = {start: None}
    stack = [start]
    while stack:
        state = stack.pop()
        memory, counters = state
        is_stuck = is_unfinished = False
        num_moves = 0
        for rank, program in enumerate(programs):
            if counters[rank] == len(program):
                continue
            is_unfinished = True
            step, at = program[counters[rank]]
            if not _is_ready(step, memory[at]):
                is_stuck = True
                continue
            num_moves += 1
            if step.kind in (Kind.CHECK, Kind.AWAIT_DATA) and memory[at] != step.value:
                trace = [*_trace(parents, state, programs), (rank, step)]
                raise ProtocolBroken("wrong data", trace, f"rank {rank} read {memory[at]} instead of {step.value}")
            if step.kind is Kind.STORE:
                after = (*memory[:at], step.value, *memory[at + 1 :])
            else:
                after = memory
            new = (after, (*counters[:rank], counters[rank] + 1, *counters[rank + 1 :]))
            if new not in parents:
                parents[new] = (state, rank)
                stack.append(new)
        if is_unfinished and is_stuck and num_moves == 0:
            raise ProtocolBroken("deadlock", _trace(parents, state, programs), "every unfinished rank waits")
        if len(parents) > max_states:
            raise MemoryError(f"more than {max_states} states; explore fewer rounds or ranks")
    return len(parents)


def _is_ready(step: Step, seen: Hashable) -> bool:
    if step.kind is Kind.AWAIT_EQUAL:
        return seen == step.value
    if step.kind is Kind.AWAIT_AT_LEAST:
        return seen >= step.value  # type: ignore[operator]
    if step.kind is Kind.AWAIT_DATA:
        return seen != EMPTY
    return True


def _trace(parents: dict, state: State, programs: Sequence[Sequence[tuple[Step, int]]]) -> list[tuple[int, Step]]:
    steps = []
    while parents[state] is not None:
        before, rank = parents[state]
        steps.append((rank, programs[rank][before[1][rank]][0]))
        state = before
    return steps[::-1]
