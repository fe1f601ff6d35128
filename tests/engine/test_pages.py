import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.pages import PagePool


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "keep", "reclaim"]), st.integers(0, 6)), max_size=60))
def test_every_page_has_one_owner(moves: list[tuple[str, int]]) -> None:
    pool = PagePool(16)
    used, cached = np.zeros(0, np.int32), np.zeros(0, np.int32)
    for move, count in moves:
        if move == "take":
            used = np.concatenate([used, pool.take(min(count, pool.free))])
        elif move == "give":
            pool.give(used[:count])
            used = used[count:]
        elif move == "keep":
            moved, used = used[:count], used[count:]
            pool.keep(len(moved))
            cached = np.concatenate([cached, moved])
        else:
            pool.reclaim(cached[:count])
            cached = cached[count:]
        pool.check(used, cached)


def test_the_check_sees_a_page_with_two_owners() -> None:
    pool = PagePool(4)
    pages = pool.take(2)
    with pytest.raises(AssertionError, match="owned twice"):
        pool.check(np.array([pages[0], pages[0]], np.int32), np.zeros(0, np.int32))
