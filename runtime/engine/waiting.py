"""The line of requests that wait to run: in order of priority and arrival, or of what the cache knows about them.

A request whose next page is being computed for another one (its *leader*) right now steps out of the line and follows
it: it comes back, at its old place, when the leader has computed what both have in common, or is gone.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Literal

from runtime.engine.request import Request

Policy = Literal["fcfs", "lpm"]

# So many are offered for admission in one step. Longest prefix match looks at the first few in line only, and lets
# nobody be overtaken more often than its patience allows.
WINDOW = 1024
LPM_WINDOW = 64
LPM_PATIENCE = 256


class WaitingLine:
    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._line: list[Request] = []  # sorted by rank
        self._following = 0
        self._overtaken: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._line) + self._following

    def __bool__(self) -> bool:
        return bool(self._line)

    @property
    def first(self) -> Request | None:
        return self._line[0] if self._line else None

    def join(self, request: Request) -> None:
        insort(self._line, request, key=lambda other: other.rank)

    def leave(self, request: Request) -> None:
        """Take out a request that is admitted or forgotten; it may follow a leader."""
        if request.leader is not None:
            del request.leader.followers[request]
            request.leader = None
            self._following -= 1
            return
        at = bisect_left(self._line, request.rank, key=lambda other: other.rank)
        assert self._line[at] is request
        del self._line[at]
        self._overtaken.pop(request, None)

    def follow(self, request: Request, leader: Request, until_tokens: int) -> None:
        self.leave(request)
        request.leader = leader
        leader.followers[request] = until_tokens
        self._following += 1

    def release(self, leader: Request, computed_tokens: int | None = None) -> None:
        """Back into line with the followers that need no more than ``computed_tokens`` (None: with all)."""
        for request, until_tokens in list(leader.followers.items()):
            if computed_tokens is None or until_tokens <= computed_tokens:
                del leader.followers[request]
                request.leader = None
                self._following -= 1
                self.join(request)

    def candidates(self, cached_tokens: Callable[[Request], int]) -> list[Request]:
        """Who should be admitted next, best first."""
        if self._policy == "fcfs" or len(self._line) < 2:
            return self._line[:WINDOW]
        window = self._line[:LPM_WINDOW]
        order = {
            request: (
                -request.priority,
                self._overtaken.get(request, 0) < LPM_PATIENCE,
                -cached_tokens(request),
                request.arrival,
            )
            for request in window
        }
        return sorted(window, key=order.__getitem__)

    def admitted(self, request: Request) -> None:
        """Take out an admitted request, and remember whom it has overtaken."""
        if self._policy == "lpm":
            for other in self._line[:LPM_WINDOW]:
                if other is request:
                    break
                self._overtaken[other] = self._overtaken.get(other, 0) + 1
        self.leave(request)
