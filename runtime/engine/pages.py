"""The pool of KV pages: who may hand one out, and the sum that must always hold: free + cached + used == total.

A page is *free* (on the stack), *used* (one request owns it) or *cached* (the prefix tree owns it, requests share it).
"""

import numpy as np

from runtime.engine.batch import I32


class PagePool:
    """A stack of free page numbers. Most recently freed goes out first: it is the warmest in any cache."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free = total
        self.used = 0
        self.cached = 0
        self._stack: I32 = np.arange(total - 1, -1, -1, dtype=np.int32)

    def take(self, count: int) -> I32:
        """Free -> used. The caller has looked at ``free``."""
        assert count <= self.free, f"asked for {count} pages with {self.free} free"
        self.free -= count
        self.used += count
        return self._stack[self.free : self.free + count].copy()

    def give(self, pages: I32) -> None:
        """Used -> free."""
        self.used -= len(pages)
        self._push(pages)

    def keep(self, count: int) -> None:
        """Used -> cached: the tree has taken that many pages over."""
        self.used -= count
        self.cached += count

    def reclaim(self, pages: I32) -> None:
        """Cached -> free: the tree has let go of them."""
        self.cached -= len(pages)
        self._push(pages)

    def _push(self, pages: I32) -> None:
        count = len(pages)
        self._stack[self.free : self.free + count] = pages
        self.free += count

    def check(self, used: I32, cached: I32) -> None:
        """Assert that the owners' own lists and the stack name every page exactly once."""
        assert (self.used, self.cached) == (len(used), len(cached)), (self.used, len(used), self.cached, len(cached))
        assert self.free + self.used + self.cached == self.total
        everything = np.concatenate([self._stack[: self.free], used, cached])
        assert np.array_equal(np.sort(everything), np.arange(self.total)), "a page is owned twice or by nobody"
