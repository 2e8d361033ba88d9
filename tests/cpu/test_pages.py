"""The page pool: nothing is lost, nothing is shared that differs, and equal histories give equal tables."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.pages import PagePool

PAGE = 4

# A history is a list of (prompt, number of tokens grown afterwards, index of the row to release).
prompts = st.lists(st.integers(0, 2), min_size=1, max_size=18)
histories = st.lists(st.tuples(prompts, st.integers(0, 9), st.integers(0, 5), st.booleans()), max_size=30)


def replay(history, num_pages=12, check=False, **options):
    pool = PagePool(num_pages, PAGE, **options)
    rows: list[tuple[list[int], list[int]]] = []
    log = []
    content: dict[int, tuple[int, ...]] = {}  # what the KV cache would hold: a full page's whole prefix
    for prompt, num_grown, victim, is_released in history:
        pages = pool.match_prefix(prompt)
        if check:
            for idx, page in enumerate(pages):
                assert content[page] == tuple(prompt[: (idx + 1) * PAGE])
            assert len(pages) * PAGE < len(prompt)
        tokens = list(prompt) + [7] * num_grown
        num_matched = len(pages)
        if pool.extend(pages, len(tokens)):
            rows.append((pages, tokens))
            for idx in range(num_matched, len(tokens) // PAGE):
                content[pages[idx]] = tuple(tokens[: (idx + 1) * PAGE])
            pool.remember(pages, tokens, num_matched, len(tokens))
        else:
            pool.release(pages)
        log.append(tuple(pages))
        if is_released and rows:
            pool.release(rows.pop(victim % len(rows))[0])
        if check:
            held = {page for pages, _ in rows for page in pages}
            assert len(held) + pool.num_available == num_pages
            writable = [page for pages, tokens in rows for page in pages[len(tokens) // PAGE :]]
            assert len(writable) == len(set(writable)), "two rows would write to one page"
    for pages, _ in rows:
        pool.release(pages)
    assert pool.num_available == num_pages
    return log


@settings(max_examples=300, deadline=None)
@given(histories)
def test_pages_are_conserved_and_only_equal_prefixes_are_shared(history):
    replay(history, check=True)


@settings(max_examples=50, deadline=None)
@given(histories)
def test_equal_histories_give_equal_tables(history):
    assert replay(history) == replay(history)
    assert replay(history, is_contiguous=False) == replay(history, is_contiguous=False)


def test_a_prefix_is_found_again_and_one_token_is_left_to_compute():
    pool = PagePool(8, PAGE)
    pages: list[int] = []
    assert pool.extend(pages, 8)
    pool.remember(pages, [1, 2, 3, 4, 5, 6, 7, 8], 0, 8)
    first = list(pages)
    assert pool.match_prefix([1, 2, 3, 4, 5, 6, 7, 8]) == first[:1]
    assert pool.match_prefix([1, 2, 3, 4, 5, 6, 7, 8, 9]) == first
    assert pool.match_prefix([1, 2, 3, 9, 5, 6, 7, 8, 9]) == []


def test_reuse_can_be_switched_off():
    pool = PagePool(8, PAGE, is_prefix_reuse=False)
    pages: list[int] = []
    assert pool.extend(pages, 8)
    pool.remember(pages, list(range(8)), 0, 8)
    assert pool.match_prefix(list(range(9))) == []


def test_rows_that_grow_side_by_side_stay_contiguous():
    pool = PagePool(64, PAGE)
    rows: list[list[int]] = [[] for _ in range(4)]
    for row in rows:
        assert pool.extend(row, PAGE)
    for length in range(2, 9):
        for row in rows:
            assert pool.extend(row, length * PAGE)
    for row in rows:
        assert row == list(range(row[0], row[0] + 8))


def test_extend_takes_nothing_when_it_fails():
    pool = PagePool(3, PAGE)
    pages: list[int] = []
    assert not pool.extend(pages, 4 * PAGE)
    assert pages == [] and pool.num_available == 3
