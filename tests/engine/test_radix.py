"""The radix tree against a model of it: a dict from every cached whole-page text to its page."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.radix import Node, RadixTree

Text = tuple[int, ...]


def array(text: Text | list[int] | range) -> np.ndarray:
    return np.array(text, np.int32)


class Cache:
    """A tree, and who owns which page by our own books."""

    def __init__(self, page_tokens: int, eviction: str = "lru") -> None:
        self.tree = RadixTree(page_tokens, eviction)
        self.page_tokens = page_tokens
        self.next_page = 0
        self.pages: dict[tuple[str, Text], int] = {}  # text up to a page's end -> that page

    def insert(self, text: Text, salt: str = "") -> Node:
        """Match, lock, put the rest in; the lock stays."""
        size = len(text) - len(text) % self.page_tokens
        node, depth = self.tree.match(array(text), salt)
        assert depth == self.known(text, salt)
        self.tree.lock(node)
        count = (size - depth) // self.page_tokens
        fresh = np.arange(self.next_page, self.next_page + count, dtype=np.int32)
        self.next_page += count
        node, known = self.tree.extend(node, array(text[depth:size]), fresh, salt)
        assert not len(known)
        for at, page in zip(range(depth, size, self.page_tokens), fresh.tolist(), strict=True):
            self.pages[salt, text[: at + self.page_tokens]] = page
        self.assert_path(node, text[:size], salt)
        return node

    def known(self, text: Text, salt: str = "") -> int:
        depth = 0
        while depth + self.page_tokens <= len(text) and (salt, text[: depth + self.page_tokens]) in self.pages:
            depth += self.page_tokens
        return depth

    def assert_path(self, node: Node, text: Text, salt: str = "") -> None:
        wanted = [self.pages[salt, text[:end]] for end in range(self.page_tokens, len(text) + 1, self.page_tokens)]
        assert self.tree.path(node).tolist() == wanted

    def evicted(self, pages: np.ndarray) -> None:
        gone = set(pages.tolist())
        assert len(gone) == len(pages), "a page was let go twice"
        assert gone <= set(self.pages.values())
        self.pages = {text: page for text, page in self.pages.items() if page not in gone}
        self.check()

    def check(self) -> None:
        assert sorted(self.tree.check().tolist()) == sorted(self.pages.values())


TEXTS = st.builds(tuple, st.lists(st.integers(0, 1), max_size=14))
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), TEXTS, st.sampled_from(["", "", "s"])),
        st.tuples(st.just("unlock"), st.integers(0, 9)),
        st.tuples(st.just("grow"), st.integers(0, 9), TEXTS),
        st.tuples(st.just("evict"), st.integers(1, 5)),
        st.tuples(st.just("peek"), TEXTS, st.sampled_from(["", "s"])),
        st.tuples(st.just("discard"), TEXTS),
        st.tuples(st.just("flush")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(moves=MOVES, page_tokens=st.sampled_from([1, 2, 3]), eviction=st.sampled_from(["lru", "lfu"]))
def test_the_tree_is_a_dict_of_texts(moves, page_tokens: int, eviction: str) -> None:
    cache = Cache(page_tokens, eviction)
    tree = cache.tree
    locked: list[tuple[Node, Text, str]] = []
    for move, *args in moves:
        if move == "insert":
            text, salt = args
            locked.append((cache.insert(text, salt), text[: len(text) - len(text) % page_tokens], salt))
        elif move == "unlock" and locked:
            tree.unlock(locked.pop(args[0] % len(locked))[0])
        elif move == "grow" and locked:
            node, text, salt = locked.pop(args[0] % len(locked))
            more = args[1][: len(args[1]) - len(args[1]) % page_tokens]
            size = len(text + more)
            known = cache.known(text + more, salt)
            own = np.arange(cache.next_page, cache.next_page + len(more) // page_tokens, dtype=np.int32)
            cache.next_page += len(own)
            node, theirs = tree.extend(node, array(more), own, salt)
            assert len(theirs) == (known - len(text)) // page_tokens
            for at in range(known, size, page_tokens):
                cache.pages[salt, (text + more)[: at + page_tokens]] = int(own[(at - len(text)) // page_tokens])
            cache.assert_path(node, text + more, salt)
            locked.append((node, text + more, salt))
        elif move == "evict":
            free = tree.evictable_pages
            pages = tree.evict(args[0])
            assert len(pages) == min(free, args[0])
            cache.evicted(pages)
        elif move == "peek":
            assert tree.peek(array(args[0]), args[1]) == cache.known(*args)
        elif move == "discard":
            cache.evicted(tree.discard(tree.match(array(args[0]))[0]))
        elif move == "flush":
            cache.evicted(tree.flush())
            assert not tree.evictable_pages
        cache.check()
        for node, text, salt in locked:
            cache.assert_path(node, text, salt)
    for node, _, _ in locked:
        tree.unlock(node)
    cache.evicted(tree.flush())
    assert not tree.num_pages and not tree.num_nodes and not cache.pages


def use(cache: Cache, text: Text) -> None:
    cache.tree.unlock(cache.insert(text))


def test_the_least_recently_used_goes_first_and_from_its_end() -> None:
    cache = Cache(2)
    for text in ((0, 0, 0, 1), (1, 1), (2, 2), (0, 0, 0, 1)):
        use(cache, text)
    for gone in ((1, 1), (2, 2), (0, 0, 0, 1), (0, 0)):
        page = cache.pages["", gone]
        pages = cache.tree.evict(1)
        assert pages.tolist() == [page]
        cache.evicted(pages)


def test_the_least_often_used_goes_first_if_asked() -> None:
    cache = Cache(2, "lfu")
    for text in ((1, 1), (1, 1), (2, 2), (3, 3), (3, 3), (3, 3)):
        use(cache, text)
    order = [cache.pages["", text] for text in ((2, 2), (1, 1), (3, 3))]
    assert [cache.tree.evict(1).tolist()[0] for _ in range(3)] == order


def test_what_is_locked_stays() -> None:
    cache = Cache(2)
    node = cache.insert((1, 1, 2, 2))
    use(cache, (1, 1, 3, 3))
    cache.evicted(cache.tree.evict(9))
    assert cache.known((1, 1, 2, 2)) == 4 and cache.known((1, 1, 3, 3)) == 2
    cache.tree.unlock(node)
    assert len(cache.tree.evict(9)) == 2


def test_a_prompt_in_many_pieces_is_one_node() -> None:
    tree = RadixTree(4)
    node = tree.root
    tree.lock(node)
    for at in range(0, 400, 4):
        node, _ = tree.extend(node, array(range(at, at + 4)), array([at // 4]))
    assert tree.num_nodes == 1
    assert tree.path(node).tolist() == list(range(100))


def test_a_text_that_ends_inside_a_page_is_cached_up_to_that_page() -> None:
    cache = Cache(4)
    use(cache, (1, 2, 3, 4, 5, 6))
    assert cache.tree.num_pages == 1
    assert cache.tree.peek(array([1, 2, 3])) == 0
    assert cache.tree.peek(array([1, 2, 3, 4, 5])) == 4


@pytest.mark.parametrize("eviction", ["lru", "lfu"])
def test_the_order_book_stays_small(eviction: str) -> None:
    cache = Cache(1, eviction)
    for turn in range(5000):
        use(cache, (turn % 3, turn % 5))
    assert len(cache.tree._offers) <= 2 * cache.tree.num_nodes + 65
