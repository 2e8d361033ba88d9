"""Copies of the product's device code with one safeguard taken out of each, and what must then go wrong.

A mutant is made by replacing exact pieces of the source. A piece that is not found exactly once is an error, so a mutant cannot
go stale unnoticed. `legal` edits are delays where the protocol allows any delay: the control has them too, and must pass.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from kernels.build import HEADERS

SOURCES = Path(__file__).resolve().parents[2] / "comm" / "cuda"
MISMATCH, DEADLINE = "mismatch", "deadline"


@dataclass(frozen=True)
class Edit:
    """Replace `old`, which occurs once in `file`, by `new`."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Schedule:
    """What both ranks do: a call for each of `sizes` (elements), then the results are compared.

    `late_calls`: before these (from 0) rank 1 lets its GPU sleep. `data`: `integers`, or every element one value: `all ones`
    (bits), `-0.0`. `is_chained`: a call reduces what the call before put out. `count`: what the call counters hold at the start.
    `num_replays`: the calls are captured in a graph and replayed so often, each time with other data, rank 1 late each time.
    `is_calm`: one call at a time instead, nobody late.
    """

    sizes: tuple[int, ...] = (4096,) * 8
    late_calls: tuple[int, ...] = ()
    data: str = "integers"
    is_chained: bool = False
    count: int = 0
    num_replays: int = 0
    is_calm: bool = False

    def calm(self) -> Schedule:
        """Calls of the same sizes among which nothing overlaps, from number 1, on harmless data."""
        return Schedule(self.sizes, is_chained=self.is_chained, is_calm=True)


@dataclass(frozen=True)
class Mutant:
    """`edits` take the safeguard out of `stem`; under `schedule` some rank must then meet one of `faults`.

    `is_certain`: whether the schedule forces the fault. If not, the hardware may keep an order that it does not promise.
    `is_host_counted`: the host gives each launch its number. `empty`: 4 bytes that fill the sentinel's inboxes, where not as the
    product fills them. `has_calm`: whether the fault needs more than one call, so that calls one at a time come out right.
    """

    stem: str
    edits: tuple[Edit, ...]
    schedule: Schedule
    faults: tuple[str, ...]
    legal: tuple[Edit, ...] = ()
    is_certain: bool = True
    is_host_counted: bool = False
    empty: int | None = None
    has_calm: bool = True


@dataclass(frozen=True)
class SignalMutant:
    """As `Mutant`, of the signal channel. `late`: the rank whose GPU sleeps before its first message. `words` are of 8 bytes.

    `wait`, `is_writes_only`: of the channel.
    """

    edits: tuple[Edit, ...]
    faults: tuple[str, ...]
    legal: tuple[Edit, ...] = ()
    late: int | None = None
    num_messages: int = 12
    words: int = 64
    is_certain: bool = True
    wait: str = "kernel"
    is_writes_only: bool = True
    stem: str = field(default="signal_channel", init=False)


def edited_sources(edits: tuple[Edit, ...], folder: Path) -> Path:
    """A copy of the device code in `folder` (made here), edited in order. *Raises* `ValueError` for a piece not found once."""
    for sources in (SOURCES, HEADERS):
        shutil.copytree(sources, folder, dirs_exist_ok=True)
    for edit in edits:
        path = folder / edit.file
        text = path.read_text()
        if text.count(edit.old) != 1:
            raise ValueError(f"{edit.file} holds {text.count(edit.old)} times, not once:\n{edit.old}")
        path.write_text(text.replace(edit.old, edit.new))
    return folder


def _delay(when: str) -> str:
    """Code that spends 300 us: a peer finishes a call and starts the next in less than 10."""
    return f" if ({when}) for (u64 from = now_ns(); now_ns() - from < 300000;) {{}}"


LAMPORT, PACKETS, SENTINEL, ONE_SHOT, TWO_SHOT, SIGNAL, WAIT, DEPENDENTS = (
    "all_reduce_lamport.cu", "lamport.cuh", "all_reduce_sentinel.cu", "all_reduce_one_shot.cu", "all_reduce_two_shot.cu",
    "signal_channel.cu", "wait.cuh", "dependents.cuh",
)  # fmt: skip
ALWAYS_LATE = tuple(range(8))
NEAR_WRAP = Schedule(late_calls=ALWAYS_LATE, count=0xFFFFFFFB)  # numbers ...fc to ...ff, then the first four after the wrap
LAMPORT_SENT = Edit(
    LAMPORT, "let_dependents_start(p.watch);\n    packet = threadIdx.x;",
    "let_dependents_start(p.watch);" + _delay("p.rank == 0") + "\n    packet = threadIdx.x;",
)  # fmt: skip
SENTINEL_SENT = Edit(SENTINEL, "let_dependents_start(p.watch);", "let_dependents_start(p.watch);" + _delay("p.rank == 0"))
ONE_SHOT_BEFORE_DATA = Edit(
    ONE_SHOT, "    u32 local = threadIdx.x;\n", _delay("p.rank == 0") + "\n    u32 local = threadIdx.x;\n"
)  # fmt: skip
TWO_SHOT_BEFORE_GATHER = Edit(
    TWO_SHOT, "    meet(p, 1, epoch, SITE_TWO_SHOT_SHARES);\n",
    "    meet(p, 1, epoch, SITE_TWO_SHOT_SHARES);\n" + _delay("p.rank == 0") + "\n",
)  # fmt: skip
AT_LEAST = Edit(WAIT, "if (seen == expected) return;", "if (seen >= expected) return;")
THROUGH_ZERO = Edit(WAIT, "return count == 0xffffffffu ? 4 : count + 1;", "return count + 1;")
NO_PREREQUISITES = Edit(DEPENDENTS, 'asm volatile("griddepcontrol.wait;" ::: "memory");', "")
NOT_SANITISED = (
    Edit(SENTINEL, "if (pair.word[0] == SENTINEL) pair.word[0] = OTHER_NAN;", ""),
    Edit(SENTINEL, "if (pair.word[1] == SENTINEL) pair.word[1] = OTHER_NAN;", ""),
)
NEGATIVE_ZERO = Edit(SENTINEL, "constexpr u64 SENTINEL = ~0ull;", "constexpr u64 SENTINEL = 0x8000800080008000ull;")
NO_RELEASE = Edit(WAIT, "st.release.sys.global.u32", "st.relaxed.sys.global.u32")

MUTANTS = {
    # Rank 0 clears after rank 1 has sent the next call's data there: the data are gone.
    "sentinel: two slots, cleared lazily": Mutant(
        "all_reduce_sentinel",
        (Edit(SENTINEL, "slot = epoch % 3, stale = (slot + 2) % 3", "slot = epoch % 2, stale = (slot + 1) % 2"),),
        Schedule(), (DEADLINE,), legal=(SENTINEL_SENT,),
    ),
    "sentinel: data that look like it are not changed": Mutant(
        "all_reduce_sentinel", NOT_SANITISED, Schedule(data="all ones"), (DEADLINE,)
    ),
    "sentinel: -0.0, not sanitised": Mutant(
        "all_reduce_sentinel", (NEGATIVE_ZERO, *NOT_SANITISED), Schedule(data="-0.0"), (DEADLINE,), empty=0x80008000
    ),
    "sentinel: -0.0, sent as +0.0": Mutant(
        "all_reduce_sentinel", (NEGATIVE_ZERO, Edit(SENTINEL, "0x7fff7fff7fff7fffull", "0")), Schedule(data="-0.0"), (MISMATCH,),
        empty=0x80008000,
    ),
    # 2^32 - 1 and 0 use one slot: what the call before left there passes for the late rank's data.
    "sentinel: numbers wrap through 0": Mutant(
        "all_reduce_sentinel", (THROUGH_ZERO,), NEAR_WRAP, (MISMATCH, DEADLINE)
    ),
    "sentinel: no wait for the kernel before": Mutant(
        "all_reduce_sentinel", (NO_PREREQUISITES,), Schedule(late_calls=(0,), is_chained=True), (MISMATCH, DEADLINE)
    ),
    # Rank 1's second packet lands on its first, which rank 0 has yet to read.
    "lamport: one slot": Mutant(
        "all_reduce_lamport",
        (
            Edit(PACKETS, "packet_index(p, epoch & 1, p.rank, packet)", "packet_index(p, 0, p.rank, packet)"),
            Edit(PACKETS, "packet_index(p, epoch & 1, source, packet)", "packet_index(p, 0, source, packet)"),
        ),
        Schedule(), (DEADLINE,), legal=(LAMPORT_SENT,),
    ),
    # The second replay waits for the numbers of the first, which are there already.
    "lamport: numbers baked into a graph": Mutant(
        "all_reduce_lamport",
        (
            Edit(
                LAMPORT, "u32 epoch = next_call(ld_relaxed_sys(p.epochs + blockIdx.x));\n    long stride",
                "u32 epoch = static_cast<u32>(reinterpret_cast<u64>(p.epochs));\n    long stride",
            ),
            Edit(PACKETS, "if (threadIdx.x == 0) p.epochs[blockIdx.x] = epoch;", ""),
        ),
        Schedule(sizes=(4096,) * 2, num_replays=4), (MISMATCH,), is_host_counted=True,
    ),
    # Number 0 is what a place that was never written holds.
    "lamport: numbers wrap through 0": Mutant(
        "all_reduce_lamport", (THROUGH_ZERO,), Schedule(late_calls=ALWAYS_LATE, count=0xFFFFFFFF), (MISMATCH,)
    ),
    "lamport: no wait for the kernel before": Mutant(
        "all_reduce_lamport", (NO_PREREQUISITES,), Schedule(late_calls=(0,), is_chained=True), (MISMATCH, DEADLINE)
    ),
    # An ordinary load may be answered by the SM's own cache for ever; that it is, is how the hardware is built, not a promise.
    "lamport: packets read without system scope": Mutant(
        "all_reduce_lamport", (Edit(WAIT, "ld.relaxed.sys.global.v2.u64", "ld.global.v2.u64"),),
        Schedule(late_calls=ALWAYS_LATE), (DEADLINE,), is_certain=False, has_calm=False,
    ),
    # Before the late rank's first flag after the wrap, its last flag before it is the greater.
    "one-shot: flags compared by >=": Mutant("all_reduce_one_shot", (AT_LEAST,), NEAR_WRAP, (MISMATCH,)),
    "one-shot: the flag before the data": Mutant(
        "all_reduce_one_shot",
        (
            Edit(
                ONE_SHOT, "* p.cta_units;\n",
                "* p.cta_units;\n    if (threadIdx.x < p.size && threadIdx.x != p.rank)"
                " st_release_sys(p.flags[threadIdx.x] + blockIdx.x * p.size + p.rank, epoch);\n",
            ),
        ),
        Schedule(), (MISMATCH, DEADLINE), legal=(ONE_SHOT_BEFORE_DATA,), has_calm=False,
    ),
    "one-shot: flags not released": Mutant(
        "all_reduce_one_shot", (NO_RELEASE,), Schedule(sizes=(400_000,) * 40), (MISMATCH,), is_certain=False, has_calm=False
    ),
    "two-shot: flags compared by >=": Mutant("all_reduce_two_shot", (AT_LEAST,), NEAR_WRAP, (MISMATCH,)),
    # Rank 1's second CTA, new in the larger second call, writes what rank 0 still gathers from the first call. The first call
    # fills one CTA of 512 threads a share, the second two.
    "two-shot: one buffer for all CTAs": Mutant(
        "all_reduce_two_shot",
        (
            Edit(
                TWO_SHOT, "(static_cast<long>(epoch & 1) * p.max_ctas + blockIdx.x) * p.size * p.cta_vectors + threadIdx.x",
                "static_cast<long>(epoch & 1) * p.max_ctas * p.size * p.cta_vectors",
            ),
            Edit(
                TWO_SHOT, "*target = load_vector(p, p.x, first + i)",
                "p.parts[p.rank][area + first + i] = load_vector(p, p.x, first + i)",
            ),
            Edit(TWO_SHOT, "p.parts[source] + local + k * blockDim.x", "p.parts[source] + area + first + i + k * stride"),
            Edit(TWO_SHOT, "p.parts[p.rank][local + k * blockDim.x] = rounded", "p.parts[p.rank][area + vector] = rounded"),
            Edit(TWO_SHOT, "p.parts[owner] + local + k * blockDim.x", "p.parts[owner] + area + first + i + k * stride"),
        ),
        Schedule(sizes=(2 * 512 * 8, 4 * 512 * 8)), (MISMATCH,), legal=(TWO_SHOT_BEFORE_GATHER,),
    ),
}  # fmt: skip

RING = "st_release_sys(p.end.signals + turn.slot, signal_value(p.end, turn));"
ACKNOWLEDGE = "st_release_sys(p.end.acks + turn.slot, turn.number);"
FIRST_THREAD = "    if (threadIdx.x == 0) "
DELAY = _delay("true") + "\n"
PAYLOAD = "    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) slot[i] = p.data[i];"
TAKEN = "    for (u32 i = threadIdx.x; i < p.num_words; i += blockDim.x) p.data[i] = slot[i];"
PACKETS_AWAITED = "    const Pair* packets = packets_of(p.end, turn);\n"
BEFORE_PAYLOAD = Edit(SIGNAL, PAYLOAD, DELAY + PAYLOAD)

SIGNAL_MUTANTS = {
    "signal: rung before the payload": SignalMutant(
        (Edit(SIGNAL, f"        {RING}\n", ""), Edit(SIGNAL, DELAY, f"{FIRST_THREAD}{RING}\n{DELAY}")),
        (MISMATCH,), legal=(BEFORE_PAYLOAD,),
    ),
    "signal: acknowledged before it is read": SignalMutant(
        (Edit(SIGNAL, DELAY, f"{FIRST_THREAD}{ACKNOWLEDGE}\n{DELAY}"),), (MISMATCH,), legal=(Edit(SIGNAL, TAKEN, DELAY + TAKEN),)
    ),
    # The producer laps the sleeping consumer, whose first signal is gone when it looks.
    "signal: no wait for the acknowledgement": SignalMutant(
        (Edit(SIGNAL, "    wait_until_free(p.end, turn, p.watch);  // every", "    //"),), (DEADLINE,), late=1
    ),
    "signal: not released": SignalMutant((NO_RELEASE,), (MISMATCH,), num_messages=200, words=8192, is_certain=False),
    # The fourth message has the slot of the first, whose signal is still there.
    "stream waits: the signal is not reset": SignalMutant(
        (Edit(SIGNAL, "if (end.fixed_slot < NUM_SLOTS) st_relaxed_sys(end.signals + end.fixed_slot, 0);", ""),),
        (MISMATCH,), legal=(BEFORE_PAYLOAD,), wait="stream",
    ),
    # As with the signal: what the consumer waits for has been written over.
    "packets: no wait for the acknowledgement": SignalMutant(
        (Edit(SIGNAL, "if (choose(acks, turn.slot) != turn.before) wait_until_free(p.end, turn, p.watch);", ""),),
        (DEADLINE,), late=1, is_writes_only=False,
    ),
    "packets: acknowledged before they arrive": SignalMutant(
        (Edit(SIGNAL, DELAY, f"{FIRST_THREAD}st_relaxed_sys(p.end.acks + turn.slot, turn.number);\n{DELAY}"),),
        (DEADLINE,), legal=(Edit(SIGNAL, PACKETS_AWAITED, PACKETS_AWAITED + DELAY),), is_writes_only=False,
    ),
}  # fmt: skip
