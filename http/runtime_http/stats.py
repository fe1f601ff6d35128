"""What the front counts of itself."""

from collections.abc import Iterable


class Stats:
    """Plain counters; shown by /server_info and appended to /metrics."""

    __slots__ = ("_endpoints", "disconnects", "fast_writes", "requests", "slow_readers", "woken_writes")

    def __init__(self, endpoints: Iterable[str]) -> None:
        self._endpoints = frozenset(endpoints)
        self.fast_writes = 0  # stream chunks written by the task that read them from the engine
        self.woken_writes = (
            0  # stream writes by the request's own task: the first, and those to clients that are behind
        )
        self.slow_readers = 0  # streams aborted because their client did not keep up
        self.disconnects = 0  # requests whose client left before the answer was whole
        self.requests: dict[tuple[str, int], int] = {}  # by endpoint and status

    def count(self, path: str, status: int, *, whole: bool) -> None:
        """A request has ended. Status 0: its client left before it had one."""
        key = path if path in self._endpoints else "other", status
        self.requests[key] = self.requests.get(key, 0) + 1
        self.disconnects += not whole

    def to_dict(self) -> dict[str, int]:
        return {
            "fast_writes": self.fast_writes,
            "woken_writes": self.woken_writes,
            "slow_readers": self.slow_readers,
            "disconnects": self.disconnects,
            "requests": sum(self.requests.values()),
        }

    def prometheus(self) -> bytes:
        lines = []
        for name, value, what in (
            ("fast_writes", self.fast_writes, "Stream chunks written without waking a task"),
            ("woken_writes", self.woken_writes, "Stream writes by a task that was woken for them"),
            ("slow_readers", self.slow_readers, "Streams aborted because the client did not read"),
            ("disconnects", self.disconnects, "Requests whose client left before the answer was whole"),
        ):
            name = f"runtime_http_{name}_total"
            lines.append(f"# HELP {name} {what}.\n# TYPE {name} counter\n{name} {value}\n")
        name = "runtime_http_requests_total"
        lines.append(f"# HELP {name} Answers by endpoint and status.\n# TYPE {name} counter\n")
        lines += [
            f'{name}{{endpoint="{endpoint}",status="{status}"}} {n}\n'
            for (endpoint, status), n in sorted(self.requests.items())
        ]
        return "".join(lines).encode()
