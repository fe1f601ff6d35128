"""What every launcher must do: the same tests on real processes and on the fake ones."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

import actors
from actors import ActorDied, ActorStartError, CallTimeout, Down, Progress, RemoteError, Supervisor, Up
from tests.actors import targets
from tests.actors.fakes import open_fake_launcher
from tests.actors.helpers import NOW, process, until

Kill = Callable[[Supervisor, str], None]


@asynccontextmanager
async def opened(kind: str, *specs: actors.Spec, **options: Any) -> AsyncIterator[tuple[Supervisor, Kill]]:
    """A supervisor on the launcher of this kind, and a way to SIGKILL the process at a path."""
    if kind == "real":

        def kill(sup: Supervisor, path: str) -> None:
            pid = sup.ref(path).pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)

        async with actors.open_supervisor(specs, **options) as sup:
            yield sup, kill
    else:
        async with (
            open_fake_launcher() as launcher,
            actors.open_supervisor(specs, launcher=launcher, **options) as sup,
        ):
            yield sup, lambda sup, path: launcher.kill(path)


launchers = pytest.mark.parametrize("kind", ["real", "fake"])


@launchers
async def test_start_calls_casts_stop(kind: str) -> None:
    async with opened(kind, process("p", targets.echo, "hi")) as (sup, _):
        ref = sup.ref("p")
        assert isinstance(ref.value, targets.Ready) and ref.value.text == "hi"
        assert await ref.call("echo", ["x"]) == ["x"]
        await ref.cast(targets.Ready(1, "typed"))
        assert ref.cast_nowait("more")

        async def got() -> bool:
            return bool(await ref.call("got") == [{"pid": 1, "text": "typed"}, "more"])

        await until(got)
        await ref.stop()
        with pytest.raises(ActorDied) as caught:
            await ref.call("echo", 1)
        assert isinstance(caught.value.reason, actors.Stopped)


@launchers
async def test_failed_start(kind: str) -> None:
    async with opened(kind) as (sup, _):
        with pytest.raises(ActorStartError, match="no such weights") as caught:
            await sup.start(process("p", targets.fails))
        assert caught.value.progress == Progress("weights", 3, 10)
        assert "targets.py" in caught.value.remote_traceback
        with pytest.raises(ActorStartError, match="nowhere"):
            await sup.start(process("p", "tests.actors.targets:nowhere"))
        with pytest.raises(ActorStartError, match="Expected `int`"):
            await sup.start(process("p", targets.dies_by, "not a number", False))
        assert sup.snapshot().children == ()


@launchers
async def test_start_timeout_and_progress_extends_it(kind: str) -> None:
    limit = 1.5 if kind == "real" else 0.1
    silent = process("silent", targets.never_starts, 4, limit / 3, start_timeout=limit)
    endless = process("endless", targets.never_starts, 1000, 0.01, start_timeout=50.0, start_timeout_max=limit)
    errors: dict[str, ActorStartError] = {}

    async def fails(sup: Supervisor, spec: actors.ChildSpec) -> None:
        with pytest.raises(ActorStartError) as caught:
            await sup.start(spec)
        errors[spec.name] = caught.value

    async with opened(kind) as (sup, _), anyio.create_task_group() as tasks:
        tasks.start_soon(fails, sup, silent)
        tasks.start_soon(fails, sup, endless)
    assert all(isinstance(error.reason, actors.StartTimeout) for error in errors.values())
    assert errors["silent"].progress == Progress("step", 3, 4)
    assert errors["endless"].phase == "step"


@launchers
async def test_kill_restart_watch_and_stale_refs(kind: str) -> None:
    async with opened(kind, process("p", targets.echo), process("w", targets.watcher, "p")) as (sup, kill):
        ref = sup.ref("p")
        watch = sup.watch("p")
        assert isinstance(await anext(watch), Up)

        async def heard(*expected: str) -> bool:
            return bool(await sup.ref("w").call("heard") == list(expected))

        await until(lambda: heard("Up 1"))
        kill(sup, "p")
        assert await anext(watch) == Down("p", 1, actors.Signalled(signal.SIGKILL))
        assert (await ref.down()).reason == actors.Signalled(signal.SIGKILL)
        up = await anext(watch)
        assert isinstance(up, Up) and up.generation == 2
        with pytest.raises(ActorDied):
            await ref.cast("stale")
        assert not ref.cast_nowait("stale")
        assert (await sup.ref("p").restart()).generation == 3
        await until(lambda: heard("Up 1", "Down 1", "Up 2", "Down 2", "Up 3"))


@launchers
async def test_death_with_calls_pending(kind: str) -> None:
    async with opened(kind, process("p", targets.server)) as (sup, kill):
        ref = sup.ref("p")
        reasons: list[Any] = []

        async def pend() -> None:
            with pytest.raises(ActorDied) as caught:
                await ref.call("slow")
            reasons.append(caught.value.reason)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(pend)
            await ref.call("begun", 5)
            kill(sup, "p")
        assert reasons == [actors.Signalled(signal.SIGKILL)] * 5


@launchers
async def test_timeouts_and_cancellation_cross(kind: str) -> None:
    async with opened(kind, process("p", targets.server)) as (sup, _):
        ref = sup.ref("p")
        with pytest.raises(CallTimeout):
            await ref.call("slow", timeout=0.3)
        assert await ref.call("cancelled") == 1
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.call, "slow")
            await ref.call("begun", 2)
            tasks.cancel_scope.cancel()
        assert await ref.call("cancelled") == 2


@launchers
async def test_errors_of_handlers(kind: str) -> None:
    async with opened(kind, process("p", targets.server)) as (sup, _):
        with pytest.raises(RemoteError, match="outer") as caught:
            await sup.ref("p").call("fail")
        assert caught.value.type_name == "ValueError"
        assert caught.value.error.cause is not None and caught.value.error.cause.type == "KeyError"
        assert "inner" in caught.value.traceback
        with pytest.raises(RemoteError, match="no method 'nothing'"):
            await sup.ref("p").call("nothing")
        with pytest.raises(RemoteError, match="double"):
            await sup.ref("p").call("double", {"not": "a number"})


@launchers
async def test_ends_of_its_own(kind: str) -> None:
    reasons: dict[str, actors.ExitReason | None] = {}

    def on_event(event: actors.Event) -> None:
        if event.kind == "exited":
            reasons[event.path] = event.reason

    async def one(sup: Supervisor, how: str, started: bool) -> None:
        spec = process(f"{how}-{started}", targets.ends, how, started, restart="temporary")
        if started:
            await (await sup.start(spec)).down()
        else:
            with pytest.raises(ActorStartError):
                await sup.start(spec)

    async with opened(kind, on_event=on_event) as (sup, _), anyio.create_task_group() as tasks:
        for how in ("return", "raise", "sys.exit"):
            for started in (False, True):
                tasks.start_soon(one, sup, how, started)
    for started in (False, True):
        raised = reasons[f"raise-{started}"]
        assert isinstance(raised, actors.Raised)
        assert [error.type for error in raised.error.group] == ["ValueError", "KeyError"]
        assert reasons[f"sys.exit-{started}"] == actors.Exited(3)
    assert reasons["return-True"] == actors.Returned()
    assert isinstance(reasons["return-False"], actors.Raised)


@launchers
async def test_drain(kind: str) -> None:
    reasons: list[actors.ExitReason | None] = []

    def on_event(event: actors.Event) -> None:
        if event.kind == "exited":
            reasons.append(event.reason)

    specs = [process("p", targets.drains, drain=True), process("q", targets.echo, drain=True, stop_timeout=1.0)]
    async with opened(kind, *specs, on_event=on_event):
        pass
    assert [reason.how for reason in reasons if isinstance(reason, actors.Stopped)] == ["cancelled", "returned"]


@launchers
async def test_full_mailbox_then_stop(kind: str) -> None:
    """Calls and the stop pass casts that wait for room; waiting senders learn of the end."""
    async with opened(kind, process("p", targets.slow_inbox, mailbox=2)) as (sup, _):
        ref = sup.ref("p")
        sent = 0
        failed: list[BaseException] = []

        async def flood() -> None:
            nonlocal sent
            try:
                while True:
                    await ref.cast(sent)
                    sent += 1
            except ActorDied as exc:
                failed.append(exc)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood)
            still, last = 0, -1
            while still < 5:  # until no more goes in
                still, last = (still + 1, last) if last == sent else (0, sent)
                await ref.call("ping")
            assert sent >= 2
            assert await ref.call("take", timeout=5) == 0
            await ref.stop()
        assert len(failed) == 1


@launchers
async def test_overflow_policies(kind: str) -> None:
    specs = [
        process("fail", targets.slow_inbox, mailbox=2, overflow="fail"),
        process("drop", targets.slow_inbox, mailbox=2, overflow="drop-oldest"),
        process("wait", targets.slow_inbox, mailbox=2),
    ]
    async with opened(kind, *specs) as (sup, _):
        fail, drop, wait = (sup.ref(spec.name) for spec in specs)
        await fail.cast(1)
        await fail.cast(2)
        with pytest.raises(actors.MailboxFull):
            await fail.cast(3)
        for number in range(5):
            await drop.cast(number)

        async def seen() -> bool:  # the question overtakes casts that are on their way
            found = (await sup.refresh()).find("drop")
            return found is not None and (found.mailbox, found.dropped) == (2, 3)

        await until(seen)
        assert [await drop.call("take"), await drop.call("take")] == [3, 4]
        for number in range(4):
            await wait.cast(number)
        assert [await wait.call("take") for _ in range(4)] == [0, 1, 2, 3]


@launchers
async def test_nested_supervisors_and_generations(kind: str) -> None:
    async with opened(kind, process("n", targets.nested), process("w", targets.watcher, "n/inner")) as (sup, kill):
        inner = (await sup.refresh()).find("n/inner")
        assert inner is not None and inner.kind == "process"
        assert await sup.ref("n/task").call("echo", "task") == "task"

        async def heard(*expected: str) -> bool:
            return bool(await sup.ref("w").call("heard") == list(expected))

        await until(lambda: heard("Up 1"))
        kill(sup, "n")
        await until(lambda: heard("Up 1", "Down 1", "Up 2"))
        assert "inner (process)" in actors.format_tree(await sup.refresh())


@launchers
async def test_restart_storm_ends_at_the_limit(kind: str) -> None:
    spec = process("p", targets.ends, "raise", True, backoff=NOW)
    with pytest.raises(actors.RestartLimitExceeded) as caught:
        async with opened(kind, spec, intensity=2):
            await anyio.sleep_forever()
    assert len(caught.value.causes) == 3
