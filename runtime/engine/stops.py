"""Which token ids may end a request: one look-up for a whole step, the exact question only for the hits."""

import numpy as np
import numpy.typing as npt

from runtime.engine.batch import I32

# Ids beyond this are no token of any vocabulary.
MOST = 1 << 24


class StopIds:
    """How many live requests each token id would end."""

    def __init__(self, always: frozenset[int]) -> None:
        self._users = np.zeros(2, np.int32)  # by token id; the last entry stands for all ids beyond
        self.add(always)

    def add(self, ids: frozenset[int]) -> None:
        known = [id for id in ids if 0 <= id < MOST]
        if known and max(known) >= len(self._users) - 1:
            grown = np.zeros(max(known) + 2, np.int32)
            grown[: len(self._users)] = self._users
            self._users = grown
        for id in known:
            self._users[id] += 1

    def remove(self, ids: frozenset[int]) -> None:
        for id in ids:
            if 0 <= id < MOST:
                self._users[id] -= 1

    def hits(self, tokens: I32) -> npt.NDArray[np.bool_]:
        """[n] -> [n]: which of these may end somebody's request."""
        users = self._users[np.clip(tokens, 0, len(self._users) - 1)]
        return users > 0
