"""Every async test runs on trio, asyncio and uvloop, in a loop of its own, and must leave nothing behind."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from functools import partial

import anyio
import pytest

from tests.actors.leaks import no_leaks

BACKENDS = {
    "trio": ("trio", {}),
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
}
TEST_TIMEOUT_S = 60.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if inspect.iscoroutinefunction(metafunc.function):
        if "loop" not in metafunc.fixturenames:
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


@pytest.fixture(scope="session", autouse=True)
def warm_loops() -> None:
    """What a loop opens once per process (uvloop: a pipe for forks) is no leak of the first test."""
    for backend, options in BACKENDS.values():
        anyio.run(anyio.sleep, 0, backend=backend, backend_options=options)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, an fd or a file in the current folder behind."""
    files = set(os.listdir("."))
    with no_leaks():
        yield
    assert set(os.listdir(".")) - files <= {".hypothesis"}, "files left"
