"""What can go wrong with a real process, in every phase of its life."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import pytest

import actors
from actors import ActorStartError, ChildSpec, Down, Exited, Raised, Returned, Signalled, Stopped, Unresponsive
from tests.actors import targets
from tests.actors.helpers import NOW, process, until

ENDS: dict[str, Any] = {
    "return": Returned(),
    "sys.exit": Exited(3),
    "os._exit": Exited(4),
    "abort": Signalled(signal.SIGABRT),
    "kill": Signalled(signal.SIGKILL),
}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_every_end_in_start_and_after(kind: str) -> None:
    target, backend = (targets.ends, "trio") if kind == "async" else (targets.thread_ends, "main-thread")
    found: dict[tuple[str, bool], Any] = {}

    async def one(sup: actors.Supervisor, how: str, started: bool) -> None:
        name = f"{how}-{started}"
        spec = process(name, target, how, started, backend=backend, restart="temporary", depends_on=())
        watch = sup.watch(name)
        try:
            await sup.start(spec)
        except ActorStartError as exc:  # or it died before its control thread had said that it has started
            found[how, started] = exc.reason
            return
        while not isinstance(notice := await anext(watch), Down):
            pass
        found[how, started] = notice.reason

    async with actors.open_supervisor() as sup, anyio.create_task_group() as tasks:
        for how in (*ENDS, "raise"):
            for started in (False, True):
                tasks.start_soon(one, sup, how, started)
    for (how, started), reason in found.items():
        if how == "raise" or (how == "return" and not started):
            assert isinstance(reason, Raised), (how, started, reason)
        elif isinstance(reason, Signalled):
            assert reason.signal == ENDS[how].signal, (how, started, reason)
        else:
            assert reason == ENDS[how], (how, started, reason)
    assert len(found) == 12


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_hung_actors_are_found_with_their_stacks(kind: str) -> None:
    target, backend = (targets.spins, "trio") if kind == "async" else (targets.thread_spins, "main-thread")
    limits: dict[str, Any] = {"hang_timeout": 30.0, "hang_timeouts": {"steps": 0.3}, "restart": "temporary"}
    async with actors.open_supervisor() as sup:
        ref = await sup.start(process("p", target, True, backend=backend, **limits))
        down = await ref.down()
        assert isinstance(down.reason, Unresponsive)
        assert "stuck_in_this_function" in down.reason.stacks
        assert down.reason.phase == "steps" and down.reason.last_beat_s >= 0.3


async def test_beats_and_phases_keep_an_actor_alive() -> None:
    limits: dict[str, Any] = {"hang_timeout": 1.5, "hang_timeouts": {"idle": 3600.0}}
    async with actors.open_supervisor() as sup:
        beats = await sup.start(process("beats", targets.beats, **limits))
        idles = await sup.start(process("idles", targets.idles, **limits))
        stopped = await sup.start(process("stopped", targets.beats, restart="temporary", **limits))
        os.kill(stopped.pid or 0, signal.SIGSTOP)
        down = await stopped.down()  # one of three falls silent
        assert isinstance(down.reason, Unresponsive) and "state T" in down.reason.stacks
        assert sup.ref("beats").generation == beats.generation
        assert sup.ref("idles").generation == idles.generation


async def test_nobody_waits_for_the_stacks_of_a_stopped_process() -> None:
    launched = actors.LocalLauncher().launch(process("p", targets.echo), "/p", 1.0)
    try:
        os.kill(launched.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, launched.pid, os.WSTOPPED)  # noqa: ASYNC222  at once, by the line above
        assert await launched.dump_stacks(math.inf) == ""
    finally:
        launched.kill()
        await launched.wait()
        launched.reap()
        launched.close()


async def test_sigstop_in_start_and_in_stop() -> None:
    async with actors.open_supervisor() as sup:
        spec = process("p", targets.never_starts, start_timeout=0.8, restart="temporary")

        async def freeze() -> None:
            pid = await until(lambda: (found := sup.snapshot().find("p")) and found.state == "starting" and found.pid)
            os.kill(pid, signal.SIGSTOP)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(freeze)
            with pytest.raises(ActorStartError) as caught:
                await sup.start(spec)
        assert isinstance(caught.value.reason, actors.StartTimeout)
        ref = await sup.start(process("q", targets.echo, stop_timeout=0.2))
        os.kill(ref.pid or 0, signal.SIGSTOP)
        await ref.stop()
        down = await ref.down()
        assert isinstance(down.reason, Stopped) and down.reason.how == "killed"


@pytest.mark.parametrize("kind", ["async", "thread"])
async def test_stop_of_a_stuck_actor_kills_it_in_its_budget(kind: str) -> None:
    target, backend = (targets.spins, "asyncio") if kind == "async" else (targets.thread_spins, "main-thread")
    async with actors.open_supervisor([process("p", target, True, backend=backend, stop_timeout=0.2)]) as sup:
        ref = sup.ref("p")
    down = await ref.down()
    assert isinstance(down.reason, Stopped) and down.reason.how == "killed"


async def test_a_second_stop_shortens_the_deadline() -> None:
    async with actors.open_supervisor([process("p", targets.spins, True, stop_timeout=3600.0)]) as sup:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sup.stop)
            await anyio.sleep(0.05)
            tasks.start_soon(sup.stop, 0.1)
        assert isinstance(await sup.wait(), Stopped)


async def test_stop_interrupts_starts_and_backoff() -> None:
    """The start hears nothing for an hour, the backoff takes as long: both end at once."""
    slow = actors.Backoff(min=3600, max=3600, jitter="none")
    children = [
        process("backoff", targets.ends, "raise", True, backoff=slow),
        process("importing", targets.slow_import_like, 3600.0, stop_timeout=0.2, depends_on=()),
        process("starting", targets.never_starts, depends_on=()),
    ]
    async with actors.open_supervisor(children, wait_started=False) as sup:
        await until(lambda: [child.state for child in sup.snapshot().children] == ["backoff", "starting", "starting"])


async def test_grandchildren_end_with_the_session() -> None:
    """They hold the control channel and stderr open, too: the verdict is the kernel's and comes at once."""
    async with actors.open_supervisor() as sup:
        for end in ("kill", "stop"):
            ref = await sup.start(process("p", targets.forks, restart="temporary"))
            assert all(alive(pid) for pid in ref.value)
            if end == "kill":
                os.kill(ref.pid or 0, signal.SIGKILL)
                assert (await ref.down()).reason == Signalled(signal.SIGKILL)
            else:
                await ref.stop()
            await until(lambda: not any(alive(pid) for pid in ref.value))  # noqa: B023


async def test_env_cpus_nice_title_session() -> None:
    cpu = min(os.sched_getaffinity(0))
    spec = process("p", targets.facts, env={"COLOUR": "blue"}, cpus=(cpu,), nice=3, title="a nice title")
    async with actors.open_supervisor([spec]) as sup:
        assert sup.ref("p").value == {
            "env": "blue",
            "cpus": [cpu],
            "nice": os.nice(0) + 3,
            "title": "a nice title",
            "session": True,
            "modules": [],
        }


async def test_a_closed_control_channel_is_lost() -> None:
    async with actors.open_supervisor() as sup:
        ref = await sup.start(process("p", targets.goes_dark, restart="temporary"))
        assert isinstance((await ref.down()).reason, actors.Lost)


async def test_errors_in_cleanup_are_no_crash() -> None:
    async with actors.open_supervisor([process("p", targets.raises_in_cleanup)]) as sup:
        ref = sup.ref("p")
        await ref.stop()
        reason = (await ref.down()).reason
        assert isinstance(reason, Stopped) and reason.how == "raised" and "in the cleanup" in reason.detail


async def test_give_up_on_a_cause() -> None:
    def config_error(reason: actors.ExitReason) -> bool:
        return isinstance(reason, Raised) and reason.error.matches("ValueError")

    spec = process("p", targets.ends, "raise", True, backoff=NOW, give_up_on=config_error)
    with pytest.raises(actors.RestartLimitExceeded) as caught:
        async with actors.open_supervisor([spec], intensity=100):
            await anyio.sleep_forever()
    assert len(caught.value.causes) == 1


async def test_stacks_on_demand() -> None:
    async with actors.open_supervisor() as sup:
        server = await sup.start(process("server", targets.server))
        assert "sleep_forever" in await server.stacks()
        spins = await sup.start(process("spins", targets.spins, True, stop_timeout=0.1))
        assert "stuck_in_this_function" in await spins.stacks()
        thread = await sup.start(process("t", targets.thread_spins, True, backend="main-thread", stop_timeout=0.1))

        async def is_there() -> bool:
            return "stuck_in_this_function" in await thread.stacks()

        await until(is_there)
        task = await sup.start(ChildSpec("task", targets.server))
        assert "sleep_forever" in await task.stacks()


@pytest.mark.parametrize("phase", ["spawning", "starting", "running", "stuck", "stopping"])
def test_parent_killed_in_every_phase(phase: str) -> None:
    """Nothing of the tree outlives its root by more than the grace."""
    host = subprocess.Popen(
        [sys.executable, "-m", "tests.actors.host", phase],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert host.stdout is not None
    pids: list[int] = []
    with host, host.stdout:
        for line in host.stdout:
            if line.strip() == "ready":
                break
            pids.append(int(line))
        pids += [pid for pid in descendants(host.pid) if pid not in pids]
        host.kill()
    assert pids
    deadline = time.monotonic() + 15
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found
