"""Who is who in the tree, and how one actor hears of another."""

from collections.abc import Iterator
from typing import Any, TypeVar

import anyio
import msgspec

import actors

METRICS = "metrics"
MODEL = "model"
DETOKENIZER = "detokenizer"

T = TypeVar("T")


class Peers(msgspec.Struct, frozen=True):
    """The paths of those of whom there may be several."""

    schedulers: tuple[str, ...] = ("replica0/scheduler0",)  # rank 0 of each replica
    standbys: tuple[str, ...] = ()  # schedulers that are kept ready to take over
    frontends: tuple[str, ...] = ()
    detokenizer_is_process: bool = False

    @property
    def engines(self) -> tuple[str, ...]:
        """All schedulers that may serve."""
        return (*self.schedulers, *self.standbys)


def value(given: Any, kind: type[T]) -> T:
    """A handshake value; it arrives as plain data where its actor is a process."""
    return given if isinstance(given, kind) else msgspec.convert(given, kind)


async def wait_up(ctx: actors.Context, path: str, kind: type[T], say: str, every_s: float) -> T:
    """The handshake value of the actor at ``path``, as soon as it is up; says now and then that it waits."""
    notices = ctx.watch(path)
    while True:
        ctx.progress(say)
        with anyio.move_on_after(every_s):
            notice = await anext(notices)
            if isinstance(notice, actors.Up):
                return value(notice.value, kind)


def walk(tree: actors.Snapshot) -> Iterator[actors.Snapshot]:
    """The actors of a tree, parents first."""
    yield tree
    for child in tree.children:
        yield from walk(child)
