"""Every async test runs on trio, asyncio and uvloop, in a loop of its own, and must leave nothing behind."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

BACKENDS = {
    "trio": ("trio", {}),
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}
TEST_TIMEOUT_S = 40.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("loop")
        only = metafunc.definition.get_closest_marker("loops")
        metafunc.parametrize("loop", only.args if only else list(BACKENDS))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = [name for name in pyfuncitem._fixtureinfo.argnames if name in pyfuncitem.funcargs]
    backend, options = BACKENDS[pyfuncitem.callspec.params["loop"]]
    function = partial(
        pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names if name in pyfuncitem.funcargs}
    )

    async def bounded() -> None:
        with anyio.fail_after(TEST_TIMEOUT_S):
            await function()

    anyio.run(bounded, backend=backend, backend_options=options)
    return True


def children_of(pid: int) -> set[int]:
    """Living and dead children, from /proc."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(int(child) for child in (task / "children").read_text().split())
        except OSError:
            continue
    return found


def open_fds() -> dict[int, str]:
    fds: dict[int, str] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            fds[int(entry)] = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return fds


@pytest.fixture(scope="session", autouse=True)
def warm_loops() -> None:
    """What a loop opens once per process (uvloop: a pipe for forks) is no leak of the first test."""
    for backend, options in BACKENDS.values():
        anyio.run(anyio.sleep, 0, backend=backend, backend_options=options)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an fd or a file in the current folder behind."""
    children, threads, fds = children_of(os.getpid()), set(threading.enumerate()), open_fds()
    files = set(os.listdir("."))
    yield
    deadline = time.monotonic() + 12  # a loop's own pool threads end when idle
    while (left := set(threading.enumerate()) - threads) and time.monotonic() < deadline:
        if all("trio" in thread.name.lower() or "AnyIO" in thread.name for thread in left):
            break
        time.sleep(0.01)
    else:
        assert not left, f"threads left: {left}"
    left_children = children_of(os.getpid()) - children
    for pid in left_children:
        os.kill(pid, signal.SIGKILL)
    assert not left_children, f"processes left: {left_children}"
    left_fds: dict[int, Any] = {fd: what for fd, what in open_fds().items() if fds.get(fd) != what}
    assert not left_fds, f"fds left: {left_fds}"
    assert set(os.listdir(".")) - files <= {".hypothesis"}, "files left"
