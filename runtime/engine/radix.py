"""The prefix cache: a radix tree over token ids whose nodes own the KV pages of the text they spell.

Everything is page-granular: a node's key is a whole number of pages, two children of a node differ within their first
page, and a text that ends inside a page is cached up to that page's start. A request holds its path by a lock on the
node where its shared part ends; locks count on every node up to the root, so what is unlocked has nothing locked
below it. Texts of different ``salt`` part at the root.

Eviction takes unlocked leaves, the least recently used first (or the least often used), and trims a long leaf from
its end instead of dropping it whole. The order is kept in a heap with lazy deletion: a leaf is offered when its last
lock goes or its last child does, and an offer that no longer describes its node is skipped when it surfaces. Nothing
walks the tree. Time is a logical tick, so that ranks which run the same steps evict the same pages.
"""

import heapq
from collections.abc import Iterator
from typing import Literal

import numpy as np

from runtime.engine.batch import I32

Edge = bytes | tuple[str, bytes]
Eviction = Literal["lru", "lfu"]

_NONE: I32 = np.zeros(0, np.int32)


class Node:
    """``key`` [tokens] and ``pages`` [tokens / page_tokens] continue the parent's text; ``edge`` is the name there."""

    __slots__ = ("children", "edge", "hits", "key", "locks", "pages", "parent", "tick")

    def __init__(self, parent: "Node | None", edge: Edge, key: I32, pages: I32) -> None:
        self.parent = parent  # None: the root, or a node that has left the tree
        self.edge = edge
        self.key = key
        self.pages = pages
        self.children: dict[Edge, Node] = {}
        self.locks = 0
        self.tick = 0
        self.hits = 0


class RadixTree:
    def __init__(self, page_tokens: int, eviction: Eviction = "lru") -> None:
        self.page_tokens = page_tokens
        self.root = Node(None, b"", _NONE, _NONE)
        self.num_pages = 0
        self.num_nodes = 0
        self._locked_pages = 0
        self._by_use = eviction == "lfu"
        self._tick = 0
        self._offers: list[tuple[int, int, int, Node]] = []  # (hits or 0, tick, serial, leaf)
        self._serial = 0

    @property
    def evictable_pages(self) -> int:
        return self.num_pages - self._locked_pages

    # Lookup

    def match(self, tokens: I32, salt: str = "") -> tuple[Node, int]:
        """The node that spells the longest cached prefix of ``tokens``, and its length. May split a node there."""
        node, depth = self.root, 0
        for child, same in self._walk(node, tokens, salt):
            node = child if same == len(child.key) else self._split(child, same)
            depth += same
        return node, depth

    def peek(self, tokens: I32, salt: str = "") -> int:
        """How much of ``tokens`` is cached, leaving the tree as it is."""
        return sum(same for _, same in self._walk(self.root, tokens, salt))

    def path(self, node: Node) -> I32:
        """The pages from the root to the end of ``node``."""
        parts: list[I32] = []
        while node.parent is not None:
            parts.append(node.pages)
            node = node.parent
        return np.concatenate(parts[::-1]) if parts else _NONE

    def unlocked_on_path(self, node: Node) -> int:
        """How many evictable pages a lock on ``node`` would hold back."""
        pages = 0
        while node.parent is not None and not node.locks:
            pages += len(node.pages)
            node = node.parent
        return pages

    # Locks

    def lock(self, node: Node) -> None:
        self._tick += 1
        self._lock(node, self.root)

    def unlock(self, node: Node) -> None:
        self._tick += 1
        end = node
        while node.parent is not None:
            node.locks -= 1
            node.tick = self._tick
            if not node.locks:
                self._locked_pages -= len(node.pages)
            node = node.parent
        if not end.locks and not end.children:
            self._offer(end)

    # Growth

    def extend(self, node: Node, tokens: I32, pages: I32, salt: str = "") -> tuple[Node, I32]:
        """Put ``tokens`` (whole pages) below ``node``, which the caller has locked, and move the caller's lock there.

        Returns the node where they end, and the tree's pages for as much of them as it knew before: the caller keeps
        its own copies of those; the tree now owns the other ``pages``.
        """
        start, depth = node, 0
        known: list[I32] = []
        for child, same in self._walk(node, tokens, salt):
            node = child if same == len(child.key) else self._split(child, same)
            known.append(node.pages)
            depth += same
        if depth < len(tokens):
            key, fresh = tokens[depth:].copy(), pages[depth // self.page_tokens :].copy()
            self.num_pages += len(fresh)
            if node is start and node.locks == 1 and not node.children and node.parent is not None:
                # Nobody else's path ends here: the leaf grows, and a prompt in many chunks stays one node.
                node.key = np.concatenate([node.key, key])
                node.pages = np.concatenate([node.pages, fresh])
                self._locked_pages += len(fresh)
            else:
                edge = self._edge(node, key, salt)
                child = Node(node, edge, key, fresh)
                node.children[edge] = child
                self.num_nodes += 1
                node = child
        self._lock(node, start)
        return node, np.concatenate(known) if known else _NONE

    # Eviction

    def evict(self, count: int) -> I32:
        """Let go of up to ``count`` unlocked pages, the least valuable first."""
        taken: list[I32] = []
        while count > 0 and (leaf := self._least()) is not None:
            pages = min(count, len(leaf.pages))
            taken.append(leaf.pages[len(leaf.pages) - pages :])
            count -= pages
            self.num_pages -= pages
            if pages == len(leaf.pages):
                self._remove(leaf)
            else:
                leaf.pages = leaf.pages[:-pages]
                leaf.key = leaf.key[: -pages * self.page_tokens]
                self._offer(leaf)
        return np.concatenate(taken) if taken else _NONE

    def flush(self) -> I32:
        """Let go of everything that nobody uses."""
        return self.evict(self.evictable_pages)

    def discard(self, node: Node) -> I32:
        """Let go of the unlocked end of the path to ``node``, as far as nobody else's path leads through it."""
        taken: list[I32] = []
        while node.parent is not None and not node.locks and not node.children:
            parent = node.parent
            taken.append(node.pages)
            self.num_pages -= len(node.pages)
            self._remove(node)
            node = parent
        return np.concatenate(taken) if taken else _NONE

    # Insides

    def _edge(self, node: Node, tokens: I32, salt: str) -> Edge:
        first = tokens[: self.page_tokens].tobytes()
        return first if node.parent is not None else (salt, first)

    def _walk(self, node: Node, tokens: I32, salt: str) -> Iterator[tuple[Node, int]]:
        """Each child on the way down with the whole pages it has in common with what is left of ``tokens``."""
        while len(tokens) >= self.page_tokens:
            child = node.children.get(self._edge(node, tokens, salt))
            if child is None:
                return
            same = self._common(child.key, tokens)
            whole = same == len(child.key)  # asked before the yield: the caller may split the child
            yield child, same
            if not whole:
                return
            tokens, node = tokens[same:], child

    def _common(self, key: I32, tokens: I32) -> int:
        size = min(len(key), len(tokens))
        differs = key[:size] != tokens[:size]
        first = int(differs.argmax()) if size else 0
        same = first if size and differs[first] else size
        return same - same % self.page_tokens

    def _split(self, node: Node, tokens: int) -> Node:
        """Cut ``node`` after ``tokens``; a new node takes the upper part, so locks on ``node`` keep their meaning."""
        parent = node.parent
        assert parent is not None
        pages = tokens // self.page_tokens
        upper = Node(parent, node.edge, node.key[:tokens], node.pages[:pages])
        upper.locks, upper.tick, upper.hits = node.locks, node.tick, node.hits
        parent.children[node.edge] = upper
        node.parent = upper
        node.key, node.pages = node.key[tokens:], node.pages[pages:]
        node.edge = node.key[: self.page_tokens].tobytes()
        upper.children[node.edge] = node
        self.num_nodes += 1
        return upper

    def _lock(self, node: Node, above: Node) -> None:
        while node is not above:
            if not node.locks:
                self._locked_pages += len(node.pages)
            node.locks += 1
            node.hits += 1
            node.tick = self._tick
            assert node.parent is not None
            node = node.parent

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge]
        leaf.parent = None
        self.num_nodes -= 1
        if parent.parent is not None and not parent.children and not parent.locks:
            self._offer(parent)

    def _offer(self, leaf: Node) -> None:
        if leaf.parent is None:
            return
        if len(self._offers) > 2 * self.num_nodes + 64:
            self._offers = [offer for offer in self._offers if self._valid(offer)]
            heapq.heapify(self._offers)
        self._serial += 1
        heapq.heappush(self._offers, (leaf.hits if self._by_use else 0, leaf.tick, self._serial, leaf))

    def _valid(self, offer: tuple[int, int, int, Node]) -> bool:
        _, tick, _, leaf = offer
        return leaf.parent is not None and not leaf.locks and not leaf.children and leaf.tick == tick

    def _least(self) -> Node | None:
        while self._offers:
            offer = heapq.heappop(self._offers)
            if self._valid(offer):
                return offer[3]
        return None

    def nodes(self) -> Iterator[Node]:
        """Every node but the root; for checks and tests."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> I32:
        """Assert the tree's invariants; returns all its pages."""
        pages, locked, count = [_NONE], 0, 0
        offered = {id(offer[3]) for offer in self._offers if self._valid(offer)}
        for node in self.nodes():
            count += 1
            assert len(node.key) == len(node.pages) * self.page_tokens > 0
            assert node.parent is not None and node.parent.children[node.edge] is node
            assert node.parent is self.root or node.parent.locks >= node.locks
            assert node.locks or node.children or id(node) in offered, "an unlocked leaf that eviction can't find"
            locked += len(node.pages) if node.locks else 0
            pages.append(node.pages)
        everything: I32 = np.concatenate(pages)
        assert (self.num_pages, self._locked_pages, self.num_nodes) == (len(everything), locked, count)
        return everything
