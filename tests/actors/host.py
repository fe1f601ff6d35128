"""A program with a tree, to be killed: `python -m tests.actors.host PHASE`. Prints the pids of its tree, one a line."""

from __future__ import annotations

import sys
from typing import Any

import anyio

import actors
from actors import ChildSpec
from tests.actors import targets


def say(line: object) -> None:
    print(line, flush=True)


async def main(phase: str) -> None:
    options: dict[str, Any] = {"where": "process", "stop_timeout": 0.5, "depends_on": ()}
    children = [
        ChildSpec("echo", targets.echo, **options),
        ChildSpec("thread", targets.thread_echo, backend="main-thread", **options),
        ChildSpec("nested", targets.nested, **options),
        ChildSpec("forks", targets.forks, **options),
    ]
    if phase == "stuck":
        children += [
            ChildSpec("spins", targets.spins, (True,), **options),
            ChildSpec("thread_spins", targets.thread_spins, (True,), backend="main-thread", **options),
        ]
    if phase == "starting":
        children.append(ChildSpec("never", targets.never_starts, **options))
    async with actors.open_supervisor(children, wait_started=False) as sup:
        while sum(child.pid is not None for child in sup.snapshot().children) < len(children):  # noqa: ASYNC110
            await anyio.sleep(0.001)
        if phase == "starting":
            await anyio.sleep(1)
        elif phase != "spawning":
            await sup.wait_started()
            for pid in sup.ref("forks").value:
                say(pid)
        if phase == "stopping":
            sup.request_stop()
        say("ready")
        await anyio.sleep_forever()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], backend="trio")
