"""What an actor tells the metrics actor.

A report holds absolute figures of one source since its start, so that a restarted metrics actor is complete again at
the next report; a restarted source begins at zero, as Prometheus expects of counters.
"""

from bisect import bisect_left

import msgspec


class Report(msgspec.Struct, frozen=True):
    """One source's figures. ``histograms``: name -> (counts per bucket of ``BUCKETS_S`` and above, sum in seconds)."""

    source: str
    values: dict[str, float] = {}
    histograms: dict[str, tuple[list[int], float]] = {}


# Upper bounds in seconds, for every histogram.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Observations of one source, as a report carries them."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts, self.total = [0] * (len(BUCKETS_S) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def report(self) -> tuple[list[int], float]:
        return self.counts, self.total
