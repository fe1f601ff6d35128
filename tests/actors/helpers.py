"""Small helpers of the actors tests."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import anyio

from actors import Backoff, ChildSpec

SOON = Backoff(min=0.01, max=0.05)
NOW = Backoff(min=0, max=0)


async def until(check: Callable[[], Any]) -> Any:
    """Wait for a fact that only looking can tell; the test's own timeout bounds it."""
    while True:
        found = check()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        await anyio.sleep(0.002)


def process(name: str, target: Any, *args: Any, **options: Any) -> ChildSpec:
    """The spec of a process actor that comes back soon."""
    return ChildSpec(name, target, args, where="process", **{"backoff": SOON, **options})
