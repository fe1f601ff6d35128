"""Targets for process actors; imported in the child."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import anyio
import msgspec

import actors
from actors import Context, ThreadContext


class Ready(msgspec.Struct):
    pid: int
    text: str


async def echo(ctx: Context, text: str = "") -> None:
    got: list[object] = []

    async def do_echo(payload: object, info: actors.CallInfo) -> object:
        return payload

    async def do_got(payload: object, info: actors.CallInfo) -> object:
        return got

    ctx.on("echo", do_echo)
    ctx.on("got", do_got)
    ctx.started(Ready(os.getpid(), text))
    async for message in ctx.inbox:
        got.append(message)  # noqa: PERF401


def thread_echo(ctx: ThreadContext, text: str = "") -> None:
    got: list[object] = []
    ctx.on("echo", lambda payload: payload)
    ctx.on("got", lambda payload: got)
    ctx.started(Ready(os.getpid(), text))
    while True:
        select.select([ctx.wakeup_fd], [], [])
        for notice in ctx.notices():
            if isinstance(notice, actors.Stop):
                return
            got.append(notice.payload if isinstance(notice, actors.Cast) else notice)


async def fails(ctx: Context) -> None:
    ctx.progress("weights", 3, 10)
    print("last words", file=sys.stderr)
    raise ValueError("no such weights")


async def dies_by(ctx: Context, number: int, started: bool) -> None:
    ctx.progress("p1")
    if started:
        ctx.started()
        await anyio.sleep(0.05)
    os.kill(os.getpid(), number)
    time.sleep(10)  # noqa: ASYNC251  it is dead


async def nested(ctx: Context) -> None:
    child = actors.ChildSpec("inner", echo, ("inner",), where="process")
    task = actors.ChildSpec("task", echo, ("task",))
    async with ctx.open_supervisor([child, task]) as sup:
        ctx.started()
        await sup.wait()


SIGKILL = int(signal.SIGKILL)
