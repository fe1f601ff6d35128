"""Targets for process actors; imported in the child."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

import anyio
import anyio.lowlevel
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


async def server(ctx: Context) -> None:
    """Methods: "slow" (until cancelled), "begun" (wait for so many), "cancelled" (how many were), "fail", "double"."""
    cancelled = begun = 0

    async def slow(payload: object, info: actors.CallInfo) -> None:
        nonlocal cancelled, begun
        begun += 1
        try:
            await anyio.sleep_forever()
        finally:
            cancelled += 1

    async def wait_begun(payload: int, info: actors.CallInfo) -> None:
        while begun < payload:  # noqa: ASYNC110
            await anyio.sleep(0.001)

    async def count(payload: object, info: actors.CallInfo) -> int:
        return cancelled

    async def fail(payload: object, info: actors.CallInfo) -> None:
        try:
            raise KeyError("inner")
        except KeyError as exc:
            raise ValueError("outer") from exc

    async def double(payload: int, info: actors.CallInfo) -> int:
        return payload * 2

    for method, handler in {
        "slow": slow, "begun": wait_begun, "cancelled": count, "fail": fail, "double": double
    }.items():  # fmt: skip
        ctx.on(method, handler)
    ctx.started()
    await anyio.sleep_forever()


async def ends(ctx: Context, how: str, started: bool) -> None:
    """End in a way of one's own choice, before or after the start."""
    ctx.progress("about to end")
    if started:
        ctx.started()
    match how:
        case "return":
            return
        case "raise":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def thread_ends(ctx: ThreadContext, how: str, started: bool) -> None:
    ctx.progress("about to end")
    if started:
        ctx.started()
    match how:
        case "return":
            return
        case "raise":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        case "sys.exit":
            sys.exit(3)
        case "os._exit":
            os._exit(4)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


async def never_starts(ctx: Context, steps: int = 0, pause_s: float = 0.0) -> None:
    for step in range(steps):
        ctx.progress("step", step, steps)
        await anyio.sleep(pause_s)
    await anyio.sleep_forever()


async def drains(ctx: Context) -> None:
    ctx.started()
    await ctx.draining.wait()


async def slow_inbox(ctx: Context) -> None:
    """Takes one cast for each call of "take"; answers "ping"."""
    inbox = ctx.inbox

    async def take(payload: object, info: actors.CallInfo) -> object:
        return await anext(inbox)

    async def ping(payload: object, info: actors.CallInfo) -> None:
        pass

    ctx.on("take", take)
    ctx.on("ping", ping)
    ctx.started()
    await anyio.sleep_forever()


async def watcher(ctx: Context, path: str) -> None:
    """Keeps what it hears of `path` for calls of "heard"."""
    heard: list[str] = []

    async def tell(payload: object, info: actors.CallInfo) -> list[str]:
        return heard

    ctx.on("heard", tell)
    ctx.started()
    async for notice in ctx.watch(path):
        heard.append(f"{type(notice).__name__} {notice.generation}")  # noqa: PERF401


async def spins(ctx: Context, started: bool) -> None:
    """Blocks its loop for ever, in a function with a name that a stack dump shows."""
    if started:
        ctx.started()
        ctx.beat("steps")
    stuck_in_this_function()


def thread_spins(ctx: ThreadContext, started: bool) -> None:
    if started:
        ctx.started()
        ctx.beat("steps")
    stuck_in_this_function()


def stuck_in_this_function() -> None:
    while True:
        time.sleep(3600)


async def beats(ctx: Context) -> None:
    ctx.started()
    while True:
        ctx.beat("steps")
        await anyio.sleep(0.02)


async def idles(ctx: Context) -> None:
    ctx.started()
    ctx.beat("idle")
    await anyio.sleep_forever()


async def forks(ctx: Context) -> None:
    """Has a grandchild that holds every fd, and one in a process group of its own."""
    pids = []
    for own_group in (False, True):
        pid = os.fork()
        if pid == 0:
            if own_group:
                os.setpgid(0, 0)
            time.sleep(3600)  # noqa: ASYNC251  a process of its own
            os._exit(0)
        pids.append(pid)
    ctx.started(pids)
    await anyio.sleep_forever()


async def facts(ctx: Context) -> None:
    ctx.started(
        {
            "env": os.environ.get("COLOUR"),
            "cpus": sorted(os.sched_getaffinity(0)),
            "nice": os.nice(0),
            "title": command_name(),
            "session": os.getsid(0) == os.getpid(),
            "modules": sorted(name for name in ("torch", "zmq", "quart", "numpy") if name in sys.modules),
        }
    )
    await anyio.sleep_forever()


def command_name() -> str:
    return Path("/proc/self/comm").read_text().strip()


async def goes_dark(ctx: Context) -> None:
    """Closes its control channel and lives on."""
    ctx.started()
    for entry in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                socket.socket(fileno=os.dup(int(entry))).shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
    stuck_in_this_function()


async def raises_in_cleanup(ctx: Context) -> None:
    ctx.started()
    try:
        await anyio.sleep_forever()
    finally:
        raise RuntimeError("in the cleanup")


async def slow_import_like(ctx: Context, seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251  a start that hears nothing
    ctx.started()
