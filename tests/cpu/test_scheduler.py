"""Scheduling without a model: every row ends, whatever the pool and the budget; decode is never starved by a long prompt."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pages import PagePool
from engine.scheduler import Limits, Scheduler
from engine.sequence import Sequence
from engine.step_message import StepMessage
from engine.token_rules import TokenRules

PAGE = 4
rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 12), st.booleans()), min_size=1, max_size=10
)


def run(rows, num_pages, max_batch, max_step_tokens, num_copies=1):
    """Drive schedulers in lockstep with a "model" whose next token is a function of the row's tokens alone."""
    schedulers = [
        Scheduler(Limits(max_batch, max_step_tokens, num_pages * PAGE), PagePool(num_pages, PAGE)) for _ in range(num_copies)
    ]
    done: dict[int, list[int]] = {}
    for seq_id, (prompt, _, wants_prompt_logits) in enumerate(rows):
        after = seq_id - 1 if seq_id and rows[seq_id - 1][0] == prompt and seq_id % 2 else None
        for scheduler in schedulers:
            scheduler.add(Sequence(seq_id, list(prompt), len(prompt), 99, wants_prompt_logits, after))
    steps = 0
    while any(s.has_work for s in schedulers):
        steps += 1
        assert steps < 2000, "no progress"
        plans = [s.schedule() for s in schedulers]
        seen = [[(r.sequence.seq_id, r.first, r.num_tokens, tuple(r.sequence.pages)) for r in plan] for plan in plans]
        assert all(plan == seen[0] for plan in seen)
        assert 0 < sum(row[2] for row in seen[0]) <= max_step_tokens and len(seen[0]) <= max_batch
        for scheduler, plan in zip(schedulers, plans):
            for row in plan:
                assert len(row.sequence.pages) * PAGE >= row.first + row.num_tokens
            scheduler.complete(plan)
            for row in plan:
                if row.is_sampled:
                    row.sequence.token_ids.append(sum(row.sequence.token_ids) % 4)
                    if row.sequence.num_output == rows[row.sequence.seq_id][1]:
                        done[row.sequence.seq_id] = row.sequence.token_ids
                        scheduler.finish(row.sequence.seq_id)
    for scheduler in schedulers:
        assert scheduler.pool.num_available == num_pages
    return done, schedulers[0]


@settings(max_examples=200, deadline=None)
@given(rows_strategy, st.integers(7, 20), st.integers(1, 5), st.integers(1, 20))
def test_every_row_ends_and_gives_its_pages_back(rows, num_pages, max_batch, max_step_tokens):
    done, _ = run(rows, num_pages, max_batch, max_step_tokens, num_copies=2)
    for seq_id, (prompt, num_output, _) in enumerate(rows):
        expected = list(prompt)
        for _ in range(num_output):
            expected.append(sum(expected) % 4)
        assert done[seq_id] == expected


def test_a_full_pool_preempts_the_youngest_and_finishes_everyone():
    rows = [([1, 2, 3], 20, False), ([3, 2, 1], 20, False), ([2, 2, 2], 20, False)]
    done, scheduler = run(rows, num_pages=8, max_batch=3, max_step_tokens=16)
    assert scheduler.num_preemptions > 0 and len(done) == 3


def test_decode_goes_on_while_a_long_prompt_is_prefilled_in_chunks():
    scheduler = Scheduler(Limits(4, 8, 400), PagePool(100, PAGE))
    short, long = Sequence(0, [1], 1, 99), Sequence(1, [2] * 100, 100, 200)
    scheduler.add(short)
    scheduler.complete(scheduler.schedule())
    short.token_ids.append(5)
    scheduler.add(long)
    for _ in range(10):
        rows = scheduler.schedule()
        assert [(row.sequence.seq_id, row.num_tokens) for row in rows] == [(0, 1), (1, 7)]
        scheduler.complete(rows)
        short.token_ids.append(5)


def test_rows_join_and_leave_at_every_step():
    scheduler = Scheduler(Limits(2, 64, 64), PagePool(16, PAGE))
    for seq_id in range(3):
        scheduler.add(Sequence(seq_id, [seq_id], 1, 9))
    first = scheduler.schedule()
    assert [row.sequence.seq_id for row in first] == [0, 1]
    scheduler.complete(first)
    scheduler.finish(0)
    first[1].sequence.token_ids.append(0)
    assert sorted(row.sequence.seq_id for row in scheduler.schedule()) == [1, 2]


def test_samples_of_one_row_share_the_prompt():
    prompt = list(range(9))
    scheduler = Scheduler(Limits(4, 64, 64), PagePool(32, PAGE))
    leader, second = Sequence(0, list(prompt), 9, 20), Sequence(1, list(prompt), 9, 20, after=0)
    scheduler.add(leader)
    scheduler.add(second)
    rows = scheduler.schedule()
    assert [row.sequence.seq_id for row in rows] == [0], "the second sample waits for the first one's prompt"
    scheduler.complete(rows)
    leader.token_ids.append(3)
    rows = scheduler.schedule()
    assert [(row.sequence.seq_id, row.first, row.num_tokens) for row in rows] == [(0, 9, 1), (1, 8, 1)]
    assert second.pages[:2] == leader.pages[:2]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 2**40), max_size=4)), max_size=5),
    st.lists(st.integers(0, 99), max_size=4),
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans(), st.none() | st.integers(0, 9)), max_size=4
    ),
    st.sampled_from([-1, 0, 3, 130]),
    st.lists(st.tuples(st.integers(0, 99), st.lists(st.integers(0, 2**40), max_size=4)), max_size=5),
    st.integers(0, 16),
    st.booleans(),
    st.floats(0, allow_nan=False),
    st.binary(min_size=16, max_size=16),
    st.builds(
        TokenRules,
        *(st.integers(0, 2**31), st.floats(0, 1), st.floats(0, 1), st.floats(0.1, 100), st.floats(-2, 2), st.floats(-2, 2)),
        st.lists(st.tuples(st.integers(0, 2**31), st.floats(-100, 100)), max_size=3).map(tuple),
        st.integers(0, 9),
        st.lists(st.integers(0, 2**31), max_size=3).map(tuple),
    ),
)
def test_messages_survive_the_wire(
    tokens, finished, added, exit_code, drafts, burst_steps, is_continued, temperature, key, rules
):
    draw = {"temperature": temperature, "stream_key": key, "rules": rules}
    sequences = [Sequence(i, ids, len(ids), 50, wants, after, **draw) for i, (ids, wants, after) in enumerate(added)]
    message = StepMessage(tokens, finished, sequences, exit_code, drafts, burst_steps, is_continued, is_chosen_alone=is_continued)
    decoded = StepMessage.decode(message.encode())
    assert (decoded.tokens, decoded.finished, decoded.exit_code) == (tokens, finished, exit_code)
    assert (decoded.drafts, decoded.burst_steps, decoded.is_continued) == (drafts, burst_steps, is_continued)
    assert [vars(s) for s in decoded.added] == [vars(s) for s in sequences]
