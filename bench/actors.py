"""What supervision costs: `python bench/actors.py [--backend trio|asyncio|uvloop] [--quick]`.

Latencies are medians (p90 behind), CPU is this process's own, per operation. Ratios and CPU hold on a busy machine,
latencies only on a quiet one; the load is printed first.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # here, this file would be taken for the package

import actors
from actors import Backoff, CallInfo, ChildSpec, Context, Down

NOW = Backoff(min=0, max=0)


async def server(ctx: Context) -> None:
    """Counts its casts, answers calls."""
    seen = 0

    async def echo(payload: Any, info: CallInfo) -> Any:
        return payload

    async def count(payload: Any, info: CallInfo) -> int:
        return seen

    ctx.on("echo", echo)
    ctx.on("count", count)
    ctx.started()
    async for _ in ctx.inbox:
        seen += 1


BARE = "bench.actors_bare:bare"


def show(what: str, values: list[float], unit: str, bar: str = "") -> None:
    ordered = sorted(values)
    p50, p90 = statistics.median(ordered), ordered[int(len(ordered) * 0.9)]
    print(f"{what:<58} {p50:10.2f} {unit:<8} p90 {p90:9.2f}  {bar}", flush=True)


def show_one(what: str, value: float, unit: str, bar: str = "") -> None:
    print(f"{what:<58} {value:10.2f} {unit:<24}{bar}", flush=True)


def process(name: str, target: Callable[..., Any] | str, **options: Any) -> ChildSpec:
    return ChildSpec(name, target, where="process", **{"backoff": NOW, "depends_on": (), **options})


async def spawn(rounds: int) -> None:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import msgspec"], check=True)  # noqa: ASYNC221
        times.append((time.perf_counter() - begin) * 1e3)
    show("for comparison: python -c 'import msgspec'", times, "ms")
    async with actors.open_supervisor() as sup:
        for what, target, backend, bar in (
            ("spawn to started, main-thread", BARE, "main-thread", "bar: 80 ms"),
            ("spawn to started, asyncio", server, "asyncio", ""),
            ("spawn to started, trio", server, "trio", ""),
        ):
            times = []
            for _ in range(rounds):
                begin = time.perf_counter()
                ref = await sup.start(process("p", target, backend=backend))
                times.append((time.perf_counter() - begin) * 1e3)
                await ref.stop()
            show(what, times, "ms", bar)


async def death(rounds: int) -> None:
    times = []
    async with actors.open_supervisor([process("p", BARE, backend="main-thread")], intensity=10**6) as sup:
        watch = sup.watch("p")
        await anext(watch)
        for _ in range(rounds):
            pid = sup.ref("p").pid
            assert pid is not None
            begin = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            assert isinstance(await anext(watch), Down)
            times.append((time.perf_counter() - begin) * 1e3)
            await anext(watch)
    show("SIGKILL to the verdict", times, "ms", "bar: 5 ms")


async def calls(rounds: int) -> None:
    specs = [
        ChildSpec("task", server),
        process("trio", server),
        process("asyncio", server, backend="asyncio"),
    ]
    async with actors.open_supervisor(specs) as sup:
        for name, what in (("task", "in this process"), ("trio", "to a trio process"), ("asyncio", "to asyncio")):
            ref = sup.ref(name)
            times = []
            for _ in range(rounds):
                begin = time.perf_counter()
                await ref.call("echo", b"x" * 100)
                times.append((time.perf_counter() - begin) * 1e6)
            show(f"call and answer, {what}", times, "us")


async def casts(rounds: int) -> None:
    specs = [
        ChildSpec("task", server),
        process("trio", server),
        process("asyncio", server, backend="asyncio"),
    ]
    payload = b"x" * 1000
    async with actors.open_supervisor(specs) as sup:
        for name, what in (("task", "in this process"), ("trio", "to a trio process"), ("asyncio", "to asyncio")):
            ref = sup.ref(name)
            await ref.cast(payload)
            begin, cpu = time.perf_counter(), time.process_time()
            for _ in range(rounds):
                await ref.cast(payload)
            while await ref.call("count") <= rounds:  # noqa: ASYNC110
                await anyio.sleep(0.001)
            wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
            show_one(f"casts of 1 KB, {what}", rounds / wall / 1e3, "k/s", "bar: 100 k/s" if name != "task" else "")
            show_one("  CPU of the sender's process", cpu / rounds * 1e6, "us a cast")


async def trees(size: int) -> None:
    begin = time.perf_counter()
    specs = [process(f"p{number}", BARE, backend="main-thread") for number in range(size)]
    async with actors.open_supervisor(specs) as sup:
        show_one(f"start of {size} process actors in parallel", time.perf_counter() - begin, "s")
        pids = [child.pid for child in sup.snapshot().children]
        memory = [private_kib(pid) for pid in pids if pid is not None]
        show("memory of a bare process actor (private)", [kib / 1024 for kib in memory], "MiB")
        begin, cpu = time.perf_counter(), time.process_time()
        await sup.stop()
        show_one(f"stop of {size} process actors", time.perf_counter() - begin, "s")
        show_one("  CPU of the supervisor's process", (time.process_time() - cpu) / size * 1e3, "ms an actor")
    before = private_kib(os.getpid())
    count = 2000
    async with actors.open_supervisor([ChildSpec(f"t{number}", server, depends_on=()) for number in range(count)]):
        show_one("memory of a task actor", (private_kib(os.getpid()) - before) / count, "KiB")


def private_kib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


async def main(quick: bool) -> None:
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    scale = 5 if quick else 1
    await spawn(25 // scale)
    await death(50 // scale)
    await calls(2000 // scale)
    await casts(200_000 // scale)
    await trees(100 // scale)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("trio", "asyncio", "uvloop"), default="trio")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    given = parser.parse_args()
    uvloop = {"use_uvloop": True} if given.backend == "uvloop" else {}
    anyio.run(main, given.quick, backend=given.backend.replace("uvloop", "asyncio"), backend_options=uvloop)
