"""Scheduling with drafts, without a model: what the cache holds, who gets pages, and that every copy does the same."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.drafts.ngram import NgramDrafter
from engine.drafts.speculation import DraftRow
from engine.pages import PagePool
from engine.sampler import SamplerState
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, ScheduledRow, Scheduler
from engine.sequence import Sequence

PAGE = 4
rows_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 20), st.booleans()), min_size=1, max_size=8
)


def next_token(tokens: list[int]) -> int:
    """The "model": a function of the row's tokens alone, so what a row says is known beforehand."""
    return (sum(tokens) + len(tokens) // 3) % 4


def complete_text(prompt: list[int], num_output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_output):
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class FakeCache:
    """What each KV slot holds: the row's tokens up to and including the slot's own. Checks every read and every write."""

    slots: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def run(self, rows: list[ScheduledRow]) -> None:
        written: set[int] = set()
        for row in rows:
            known = [*row.sequence.token_ids, *row.draft_ids]
            for position in range(row.first, row.first + row.num_tokens):
                slot = self._slot(row, position)
                assert slot not in written, "two rows write to one place"
                written.add(slot)
                self.slots[slot] = tuple(known[: position + 1])
        for row in rows:
            known = [*row.sequence.token_ids, *row.draft_ids]
            for position in range(row.first + row.num_tokens):
                assert self.slots[self._slot(row, position)] == tuple(known[: position + 1]), "a row reads what is not its own"

    @staticmethod
    def _slot(row: ScheduledRow, position: int) -> int:
        return row.sequence.pages[position // PAGE] * PAGE + position % PAGE


def guess(rng: random.Random, future: list[int], most: int) -> list[int]:
    """Some right tokens, then as many wrong ones as fit."""
    right = future[: rng.randint(0, most)]
    return [*right, *(3 - token for token in future[len(right) : most])]


def choose(row: ScheduledRow, num_total: int) -> tuple[list[int], bool]:
    """What rank 0 answers to a step: tokens until one differs from its draft, or the row is complete."""
    tokens = list(row.sequence.token_ids)
    chosen: list[int] = []
    for draft_id in (*row.draft_ids, None):
        chosen.append(next_token(tokens))
        tokens.append(chosen[-1])
        if len(tokens) == num_total:
            return chosen, True
        if chosen[-1] != draft_id:
            break
    return chosen, False


def run(rows, num_pages, max_batch, max_step_tokens, most, seed=0, num_copies=2):
    rng = random.Random(seed)
    schedulers = [
        Scheduler(Limits(max_batch, max_step_tokens, num_pages * PAGE), PagePool(num_pages, PAGE)) for _ in range(num_copies)
    ]
    caches = [FakeCache() for _ in schedulers]
    totals = [min(len(prompt) + num_output, num_pages * PAGE) for prompt, num_output, _ in rows]
    for seq_id, (prompt, _, wants_prompt_logits) in enumerate(rows):
        for scheduler in schedulers:
            scheduler.add(Sequence(seq_id, list(prompt), len(prompt), num_pages * PAGE, wants_prompt_logits))
    done: dict[int, list[int]] = {}
    drafts: dict[int, list[int]] = {}
    num_steps = num_drafted = 0
    while any(scheduler.has_work for scheduler in schedulers):
        num_steps += 1
        assert num_steps < 2000, "no progress"
        plans = [scheduler.schedule(drafts) for scheduler in schedulers]
        seen = [[(r.sequence.seq_id, r.first, r.draft_ids, r.num_tokens, *r.sequence.pages) for r in plan] for plan in plans]
        assert all(plan == seen[0] for plan in seen)
        assert 0 < sum(row.num_tokens for row in plans[0]) <= max_step_tokens and len(plans[0]) <= max_batch
        num_drafted += sum(len(row.draft_ids) for row in plans[0])
        drafts = {}
        for scheduler, cache, plan in zip(schedulers, caches, plans):
            cache.run(plan)
            scheduler.complete(plan)
            for row in plan:
                sequence = row.sequence
                assert row.first + row.num_tokens < sequence.max_tokens_total or not row.draft_ids
                if not row.is_sampled:
                    continue
                total = totals[sequence.seq_id]
                chosen, is_done = choose(row, total)
                if is_done:
                    done[sequence.seq_id] = [*sequence.token_ids, *chosen]
                    scheduler.finish(sequence.seq_id)
                    continue
                scheduler.append(sequence, chosen)
                assert sequence.num_pending >= 1 and len(sequence.pages) == scheduler.pool.num_needed(sequence.num_computed)
                if scheduler is schedulers[0] and most:
                    future = complete_text(sequence.token_ids, total - len(sequence.token_ids))[len(sequence.token_ids) :]
                    drafts[sequence.seq_id] = guess(rng, future, most)
            held = {page for sequence in scheduler.running.values() for page in sequence.pages}
            assert len(held) + scheduler.pool.num_available == num_pages, "pages were lost"
    for scheduler in schedulers:
        assert scheduler.pool.num_available == num_pages
    assert done == {i: complete_text(prompt, totals[i] - len(prompt)) for i, (prompt, _, _) in enumerate(rows)}
    return num_steps, num_drafted, schedulers[0].num_preemptions


@settings(max_examples=300, deadline=None)
@given(rows_strategy, st.integers(7, 20), st.integers(1, 5), st.integers(1, 24), st.integers(1, 6), st.integers(0, 99))
def test_drafts_keep_every_promise_of_the_schedule(rows, num_pages, max_batch, max_step_tokens, most, seed):
    run(rows, num_pages, max_batch, max_step_tokens, most, seed)


ROWS = [([i % 4, 1, 2], 20, False) for i in range(5)]


def test_the_property_covers_what_it_should():
    """Drafts, preemptions and both together do happen in it; right drafts save steps."""
    plain_steps, none, _ = run(ROWS, num_pages=40, max_batch=5, max_step_tokens=64, most=0)
    steps, num_drafted, _ = run(ROWS, num_pages=40, max_batch=5, max_step_tokens=64, most=4)
    assert none == 0 < num_drafted and steps < plain_steps
    _, num_drafted, num_preemptions = run(ROWS, num_pages=12, max_batch=5, max_step_tokens=64, most=4)
    assert num_drafted > 0 and num_preemptions > 0


def decoding(scheduler: Scheduler, *prompts: list[int], total: int = 99) -> list[Sequence]:
    """Rows that have been prefilled and have said one token."""
    sequences = [Sequence(seq_id, list(prompt), len(prompt), total) for seq_id, prompt in enumerate(prompts)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.complete(scheduler.schedule())
    for sequence in sequences:
        scheduler.append(sequence, [9])
    return sequences


def drafted(rows: list[ScheduledRow]) -> list[tuple[int, int]]:
    return [(row.sequence.seq_id, len(row.draft_ids)) for row in rows]


def test_prompts_come_before_drafts():
    scheduler = Scheduler(Limits(4, 12, 400), PagePool(100, PAGE))
    decoding(scheduler, [1], [2])
    scheduler.add(Sequence(7, [3] * 8, 8, 99))
    rows = scheduler.schedule({0: [1] * 4, 1: [1] * 4})
    assert [(row.sequence.seq_id, row.num_tokens) for row in rows] == [(0, 3), (1, 1), (7, 8)]


def test_drafts_take_only_pages_that_are_left():
    scheduler = Scheduler(Limits(4, 64, 400), PagePool(3, PAGE))
    decoding(scheduler, [1, 1], [2])
    assert drafted(scheduler.schedule({0: [5] * 16, 1: [6] * 16})) == [(0, 5), (1, 2)]
    assert scheduler.num_preemptions == 0


def test_drafts_stop_short_of_the_rows_limit():
    scheduler = Scheduler(Limits(4, 64, 400), PagePool(9, PAGE))
    decoding(scheduler, [1, 1], total=6)
    (row,) = scheduler.schedule({0: [5] * 16})
    assert len(row.draft_ids) == 2, "3 tokens known, 2 drafts, and the sixth is chosen behind them"


def test_a_row_that_has_not_caught_up_gets_no_drafts():
    scheduler = Scheduler(Limits(4, 64, 400), PagePool(9, PAGE, is_prefix_reuse=False))
    (sequence,) = decoding(scheduler, [1, 1])
    scheduler._preempt(sequence)
    (row,) = scheduler.schedule({0: [5] * 4})
    assert row.num_tokens == 3 and row.draft_ids == () and row.num_logits == 1


def test_a_page_with_a_rejected_draft_is_not_found_by_another_row():
    scheduler = Scheduler(Limits(4, 64, 400), PagePool(9, PAGE))
    (sequence,) = decoding(scheduler, [1, 2])  # 1 2 9
    rows = scheduler.schedule({0: [5, 6, 7, 8, 4]})
    scheduler.complete(rows)
    scheduler.append(sequence, [5, 0])  # 1 2 9 5 | 0: the slot of the 0 holds the rejected 6
    assert (sequence.num_computed, sequence.num_pending, len(sequence.pages)) == (4, 1, 1)
    pool = scheduler.pool
    for other in ([1, 2, 9, 5, 6, 7, 8, 4, 3], [1, 2, 9, 5, 0, 7, 8, 4, 3]):
        assert pool.match_prefix(other) == sequence.pages[:1]
        pool.release([sequence.pages[0]])


def test_an_ngram_index_is_not_built_anew_every_step():
    drafter = NgramDrafter()
    row = DraftRow(0, [1, 2, 3], SamplerState(SamplingParams(), b"", []), 99, 4)
    drafter.propose([row])
    index = drafter._indices[0]
    index.ends[(1,)] = 77  # would be put right by a rescan
    row.token_ids += [4]
    drafter.propose([row])
    assert drafter._indices[0] is index and index.ends[(1,)] == 77 and index.ends[(3,)] == 3
    drafter.drop(0)
    assert not drafter._indices


def test_computed_tokens_count_as_far_as_they_are_the_drafts():
    """A draft model's own rows take in tokens of several steps at once, also such as are none of its drafts."""
    for chosen, num_kept in [([5], 0), ([5, 6], 1), ([5, 6, 7], 2), ([5, 0, 7], 1), ([0, 6, 7, 8], 0), ([5, 6, 7, 8, 9], 3)]:
        sequence = Sequence(0, [1, 2], 2, 99, num_computed=2, drafted=(5, 6, 7))
        sequence.append(chosen)
        assert (sequence.num_computed, sequence.token_ids, sequence.drafted) == (2 + num_kept, [1, 2, *chosen], ())
