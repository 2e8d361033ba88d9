"""Who owns which KV page: allocation, sharing of equal prefixes, eviction. Pure bookkeeping, the same on every rank.

Every decision depends only on the calls made so far, never on time, hashing seeds or addresses, so ranks that make the same
calls hold the same page tables without talking to each other.

Prefix reuse is exact. A full page is known by (number of the page before it, its token ids), compared by value; no digest that
could collide stands between two prompts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

ROOT = 0  # the "page before" of a row's first page


class PagePool:
    """Pages `0 .. num_pages - 1` of `page_size` tokens.

    A page is *free*, *held* by one or more rows, or *cached*: held by no row, still readable by a later row with the same
    prefix, and the first to go (least recently used first) when free pages run out.
    """

    def __init__(self, num_pages: int, page_size: int, is_prefix_reuse: bool = True, is_contiguous: bool = True):
        """`is_contiguous` spends a scan of the pool per new row to keep each row's pages in one run: worth it on a CPU only."""
        self.num_pages, self.page_size = num_pages, page_size
        self.is_prefix_reuse, self.is_contiguous = is_prefix_reuse, is_contiguous
        self._holders = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._page_of_key: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of_page: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._number_of_page: dict[int, int] = {}
        self._next_number = ROOT + 1

    @property
    def num_available(self) -> int:
        """Pages that can be taken now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def num_needed(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Take hold of the cached pages of the longest known prefix of `token_ids`, always leaving one token to compute."""
        pages: list[int] = []
        if not self.is_prefix_reuse:
            return pages
        parent = ROOT
        for start in range(0, (len(token_ids) - 1) // self.page_size * self.page_size, self.page_size):
            page = self._page_of_key.get((parent, tuple(token_ids[start : start + self.page_size])))
            if page is None:
                break
            parent = self._number_of_page[page]
            self._hold(page)
            pages.append(page)
        return pages

    def extend(self, pages: list[int], num_tokens: int) -> bool:
        """Grow `pages` in place until it covers `num_tokens` tokens. False, and nothing taken, if too few are available."""
        missing = self.num_needed(num_tokens) - len(pages)
        if missing > self.num_available:
            return False
        for _ in range(missing):
            page = self._choose(pages[-1] if pages else None)
            self._hold(page)
            pages.append(page)
        return True

    def remember(self, pages: Sequence[int], token_ids: Sequence[int], first_page: int, num_computed: int) -> int:
        """Make the full pages of `pages[first_page:]` findable, of which `num_computed` tokens are in the cache.

        Returns the index of the first page that is not full yet: the `first_page` of the next call.
        """
        num_full = num_computed // self.page_size
        if not self.is_prefix_reuse:
            return num_full
        for idx in range(first_page, num_full):
            page = pages[idx]
            # A twin computed the same prefix at the same time: chain to the page that is already known, keep ours private.
            parent = ROOT if idx == 0 else self._number_of_page.get(pages[idx - 1])
            if parent is None or page in self._key_of_page:
                continue
            key = (parent, tuple(token_ids[idx * self.page_size : (idx + 1) * self.page_size]))
            if key in self._page_of_key:
                self._number_of_page[page] = self._number_of_page[self._page_of_key[key]]
                continue
            self._page_of_key[key] = page
            self._key_of_page[page] = key
            self._number_of_page[page] = self._next_number
            self._next_number += 1
        return num_full

    def trim(self, pages: list[int], num_tokens: int) -> None:
        """Give back, in place, what `pages` holds beyond `num_tokens` tokens. Pages of these must not have been remembered."""
        kept = self.num_needed(num_tokens)
        surplus = pages[kept:]
        del pages[kept:]
        self.release(surplus)

    def release(self, pages: list[int]) -> None:
        """Let go of `pages` and empty the list. Known pages stay cached; a row's last pages are the first to be evicted."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._key_of_page:
                    self._cached[page] = None
                else:
                    self._number_of_page.pop(page, None)
                    self._free[page] = None
        pages.clear()

    def _hold(self, page: int) -> None:
        self._holders[page] += 1
        self._free.pop(page, None)
        self._cached.pop(page, None)

    def _choose(self, previous: int | None) -> int:
        # One contiguous run a row lets attention read the cache as a view, so a row grows into its neighbour if it can, and
        # a new row starts in the middle of the largest gap, which leaves the row before the gap room to grow.
        if previous is not None and previous + 1 in self._free:
            return previous + 1
        if self._free and not self.is_contiguous:
            return next(iter(self._free))
        if self._free:
            start, length = self._largest_gap()
            return start if start == 0 else start + length // 2
        page, _ = self._cached.popitem(last=False)
        self._forget(page)
        return page

    def _forget(self, page: int) -> None:
        del self._page_of_key[self._key_of_page.pop(page)]
        del self._number_of_page[page]

    def _largest_gap(self) -> tuple[int, int]:
        best_start = best_length = length = 0
        for page in range(self.num_pages + 1):
            if page in self._free:
                length += 1
                continue
            if length > best_length:
                best_start, best_length = page - length, length
            length = 0
        return best_start, best_length
