"""Who holds which slot and which pages: rows of running requests, the prefix tree, and what steps in flight still use.

A running request's row of pages is shared at the front and its own behind:

    pages[slot]   | 7 | 3 | 9 | 4 | 12 | 15 |  .  |  .  |
                  '-- shared ---'--- own ---'
                  node, locked              capacity

What it has computed moves from own to shared page by page: when a piece of prompt is through, and when it ends. What it
leaves stays held until the last launched step that uses it has been collected.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from runtime.engine.batch import I32, SlotTable
from runtime.engine.pages import PagePool
from runtime.engine.radix import Eviction, Node, RadixTree
from runtime.engine.request import Request, Rows

_NONE: I32 = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Held:
    """What a request leaves behind, until ``step``, the last that uses it, is through."""

    step: int
    pages: I32
    slot: int = -1
    node: Node | None = None
    poisoned: bool = False


class Changes:
    """What has changed in the slot table since the last launch, for runners that keep a copy of it."""

    def __init__(self) -> None:
        self.new_slots: list[int] = []
        self.slots: list[I32] = []
        self.indices: list[I32] = []
        self.swapped: list[tuple[Request, int, int]] = []  # whose pages, from which index on, and how many

    def added(self, slots: I32, indices: I32) -> None:
        self.slots.append(slots)
        self.indices.append(indices)

    def arrays(self) -> tuple[I32, I32, I32]:
        """New slots; and slots and indices of changed pages, each pair once."""
        for request, first, count in self.swapped:
            if request.slot >= 0:
                self.added(np.full(count, request.slot, np.int32), np.arange(first, first + count, dtype=np.int32))
        new = np.array(self.new_slots, np.int32)
        if not self.slots:
            return new, _NONE, _NONE
        return new, np.concatenate(self.slots), np.concatenate(self.indices)


class Memory:
    def __init__(self, table: SlotTable, num_pages: int, sharing: bool, eviction: Eviction) -> None:
        self.table = table
        self.rows = Rows(table.slots)
        self.pool = PagePool(num_pages)
        self.tree = RadixTree(table.page_tokens, eviction)
        self.sharing = sharing
        self.launched = 0  # steps
        self.collected = 0
        self.evicted_pages = 0
        self.free_slots = list(range(table.slots - 1, -1, -1))
        self._held: deque[Held] = deque()
        self._changes = Changes()

    @property
    def available_pages(self) -> int:
        return self.pool.free + self.tree.evictable_pages

    # A request's stay

    def match(self, request: Request) -> tuple[Node, int]:
        """Where the cached part of a waiting request's text ends in the tree, and how many tokens that is."""
        if not self.sharing or request.scores is not None:
            return self.tree.root, 0
        # The last token is computed in any case: it yields the next.
        return self.tree.match(request.tokens[:-1], request.salt)

    def peek(self, request: Request) -> int:
        return self.tree.peek(request.tokens[:-1], request.salt) if self.sharing else 0

    def open(self, request: Request, node: Node, matched: int) -> None:
        """Give a request a slot, with the pages of the ``matched`` tokens up to ``node``."""
        rows, table, slot = self.rows, self.table, self.free_slots.pop()
        request.slot, request.node, request.shared_pages = slot, node, matched // table.page_tokens
        self.tree.lock(node)
        table.pages[slot, : request.shared_pages] = self.tree.path(node)
        request.write(table)
        rows.open(request, matched)
        self._changes.new_slots.append(slot)

    def add_page_each(self, slots: I32) -> None:
        """One more page for each of these (different) slots."""
        if len(slots):
            indices = self.rows.capacity[slots] // self.table.page_tokens
            self.table.pages[slots, indices] = self._take(len(slots))
            self.rows.capacity[slots] += self.table.page_tokens
            self._changes.added(slots, indices)

    def add_pages(self, slot: int, count: int) -> None:
        first = int(self.rows.capacity[slot]) // self.table.page_tokens
        self.table.pages[slot, first : first + count] = self._take(count)
        self.rows.capacity[slot] += count * self.table.page_tokens
        self._changes.added(np.full(count, slot, np.int32), np.arange(first, first + count, dtype=np.int32))

    def _take(self, count: int) -> I32:
        if count > self.pool.free:
            evicted = self.tree.evict(count - self.pool.free)
            self.pool.reclaim(evicted)
            self.evicted_pages += len(evicted)
        return self.pool.take(count)

    def share(self, request: Request) -> None:
        """Put the whole pages that are computed into the tree. Where it has them already, the row takes the tree's."""
        slot, first, node = request.slot, request.shared_pages, request.node
        last = int(self.rows.computed[slot]) // self.table.page_tokens
        if not self.sharing or last <= first or node is None:
            return
        row = self.table.pages[slot]
        tokens = self.table.tokens[slot, first * self.table.page_tokens : last * self.table.page_tokens]
        request.node, known = self.tree.extend(node, tokens, row[first:last], request.salt)
        request.shared_pages = last
        self.pool.keep(last - first - len(known))
        if len(known):
            copies = row[first : first + len(known)].copy()
            row[first : first + len(known)] = known
            self._changes.swapped.append((request, first, len(known)))
            self._let_go(Held(int(self.rows.last_step[slot]), copies))

    def close(self, request: Request, poisoned: bool) -> None:
        """Take everything back from a request. Its text stays cached, unless its KV is ``poisoned``."""
        if not poisoned:
            self.share(request)
        slot, rows, node = request.slot, self.rows, request.node
        own = self.table.pages[slot, request.shared_pages : rows.capacity[slot] // self.table.page_tokens].copy()
        rows.close(slot)
        request.slot, request.node, request.shared_pages = -1, None, 0
        self._let_go(Held(int(rows.last_step[slot]), own, slot, node, poisoned))

    def given_back(self, leaving: Iterable[Request], kept: Node) -> Iterator[int]:
        """How many pages become available if these requests leave one after the other: after each, in all.

        Without those on the path to ``kept``, which somebody else is about to lock.
        """
        ours, locks, pages = set[int](), dict[int, int](), 0
        while kept.parent is not None:
            ours.add(id(kept))
            kept = kept.parent
        for request in leaving:
            node = request.node
            assert node is not None
            pages += int(self.rows.capacity[request.slot]) // self.table.page_tokens - request.shared_pages
            while node.parent is not None:
                left = locks[id(node)] = locks.get(id(node), node.locks) - 1
                if not left and id(node) not in ours:
                    pages += len(node.pages)
                node = node.parent
            yield pages

    # Steps

    def launch(self, slots: I32) -> tuple[int, I32, I32, I32]:
        """A step with these slots starts: its number, and the table's changes that it must know (see ``Batch``)."""
        self.launched += 1
        self.rows.last_step[slots] = self.launched
        changes, self._changes = self._changes.arrays(), Changes()
        return self.launched, *changes

    def collect(self, step: int) -> None:
        """A step is through: what only it and earlier ones used is free."""
        self.collected = step
        while self._held and self._held[0].step <= step:
            self._let_go(self._held.popleft())

    def _let_go(self, held: Held) -> None:
        if held.step > self.collected:
            self._held.append(held)
            return
        self.pool.give(held.pages)
        if held.slot >= 0:
            self.free_slots.append(held.slot)
        if held.node is not None:
            self.tree.unlock(held.node)
            if held.poisoned:
                self.pool.reclaim(self.tree.discard(held.node))

    def flush(self) -> int:
        """Drop cached prefixes that nobody uses. Returns how many pages that were."""
        pages = self.tree.flush()
        self.pool.reclaim(pages)
        return len(pages)

    def check(self, running: Iterable[Request]) -> None:
        """Assert that every page has one owner, every slot one user, and the lengths make sense."""
        rows, page_tokens = self.rows, self.table.page_tokens
        used = [_NONE, *(held.pages for held in self._held)]
        slots = self.free_slots + [held.slot for held in self._held if held.slot >= 0]
        for request in running:
            slot = request.slot
            slots.append(slot)
            pages = int(rows.capacity[slot]) // page_tokens
            assert request.shared_pages <= pages and request.node is not None
            assert rows.computed[slot] <= rows.cached[slot] <= min(rows.length[slot], rows.capacity[slot])
            assert rows.length[slot] <= rows.limit[slot]
            assert np.array_equal(self.tree.path(request.node), self.table.pages[slot, : request.shared_pages])
            used.append(self.table.pages[slot, request.shared_pages : pages])
        assert sorted(slots) == list(range(self.table.slots)), "a slot is lost or used twice"
        self.pool.check(np.concatenate(used), self.tree.check())
        assert len(used) > 1 or self.tree.evictable_pages == self.pool.cached, "a lock is left"
