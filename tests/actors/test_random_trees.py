"""Over a thousand random trees with random faults: all end, cleanly, with every life's end explained."""

from __future__ import annotations

import pytest

from tests.actors.chaos import run_tree

BATCHES = 17
TREES = 20  # a batch; on three loops


@pytest.mark.parametrize("batch", range(BATCHES))
async def test_random_trees(batch: int, loop: str) -> None:
    for number in range(TREES):
        seed = f"{loop} {batch} {number}"
        try:
            await run_tree(hash_of(seed))
        except BaseException as exc:
            exc.add_note(f"seed {hash_of(seed)}")
            raise


def hash_of(text: str) -> int:
    """Stable, unlike hash()."""
    return int.from_bytes(text.encode(), "big") % (2**61 - 1)
