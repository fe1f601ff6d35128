"""What a test must not leave behind."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def child_processes() -> set[int]:
    """The children of this process, zombies included."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update(int(pid) for pid in (task / "children").read_text().split())
        except OSError:
            continue
    return found


def open_fds() -> dict[int, str]:
    """What every fd of this process is."""
    fds: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            fds[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return fds


@contextmanager
def no_leaks(ignore_threads: str = "trio|AnyIO|asyncio") -> Iterator[None]:
    """Raise AssertionError if the block leaves a child process, a thread or an fd behind.

    To be used around whole event loops; idle pool threads of the loops (by their names) are no leak.
    """
    children, threads, fds = child_processes(), set(threading.enumerate()), open_fds()
    yield
    new_threads = set(threading.enumerate()) - threads
    left = {thread for thread in new_threads if not re.search(ignore_threads, thread.name, re.I)}
    assert not left, f"threads left: {left}"
    assert not (more := child_processes() - children), f"processes left: {more}"
    new_fds = {fd: what for fd, what in open_fds().items() if fds.get(fd) != what}
    assert not new_fds, f"fds left: {new_fds}"
