"""Process actors: handshake, messages, verdicts and stops, through real processes."""

from __future__ import annotations

import os
import signal

import pytest

import actors
from actors import ActorDied, ActorStartError, Down, Up
from tests.actors import targets
from tests.actors.helpers import process, until

KINDS = [
    pytest.param(targets.echo, "trio", id="child-trio"),
    pytest.param(targets.echo, "asyncio", id="child-asyncio"),
    pytest.param(targets.thread_echo, "main-thread", id="child-main-thread"),
]


@pytest.mark.parametrize(("target", "backend"), KINDS)
async def test_value_calls_casts_and_stop(target: object, backend: str) -> None:
    async with actors.open_supervisor([process("p", target, "hello", backend=backend)]) as sup:
        ref = sup.ref("p")
        assert ref.value == targets.Ready(ref.pid, "hello")
        assert await ref.call("echo", {"x": [1, 2]}, timeout=10) == {"x": [1, 2]}
        for number in range(50):
            await ref.cast(number)

        async def all_got() -> bool:
            return bool(await ref.call("got", timeout=10) == list(range(50)))

        await until(all_got)
    with pytest.raises(ProcessLookupError):
        os.kill(ref.pid, 0)


async def test_exception_in_start_crosses_with_traceback_and_stderr() -> None:
    async with actors.open_supervisor() as sup:
        with pytest.raises(ActorStartError) as caught:
            await sup.start(process("p", targets.fails))
        error = caught.value
        assert error.path == "p"
        assert error.phase == "weights"
        assert error.progress == actors.Progress("weights", 3, 10)
        assert isinstance(error.reason, actors.Raised) and error.reason.error.type == "ValueError"
        assert "no such weights" in error.remote_traceback and "targets.py" in error.remote_traceback
        assert "last words" in error.stderr_tail
        assert sup.snapshot().children == ()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
async def test_a_signal_during_start_is_the_verdict(number: int) -> None:
    async with actors.open_supervisor() as sup:
        with pytest.raises(ActorStartError) as caught:
            await sup.start(process("p", targets.dies_by, int(number), False))
        assert isinstance(caught.value.reason, actors.Signalled)
        assert caught.value.reason.signal == number


async def test_killed_actor_comes_back_with_a_new_generation() -> None:
    async with actors.open_supervisor([process("p", targets.echo, "x")]) as sup:
        ref = sup.ref("p")
        watch = sup.watch("p")
        assert await anext(watch) == Up("p", ref.value, 1)
        os.kill(ref.pid, signal.SIGKILL)
        assert await anext(watch) == Down("p", 1, actors.Signalled(signal.SIGKILL))
        up = await anext(watch)
        assert isinstance(up, Up) and up.generation == 2
        with pytest.raises(ActorDied):
            await ref.call("echo", 1, timeout=5)
        assert await sup.ref("p").call("echo", 1, timeout=5) == 1
        assert (await ref.down()).generation in (1, 2)


async def test_nested_supervisor_in_a_process() -> None:
    async with actors.open_supervisor([process("n", targets.nested)]) as sup:
        watch = sup.watch("n/inner")
        up = await anext(watch)
        assert isinstance(up, Up) and up.generation == 1 and up.value.text == "inner"
        assert await sup.ref("n/inner").call("echo", "deep", timeout=10) == "deep"
        assert await sup.ref("n/task").call("echo", "task", timeout=10) == "task"
        inner = await until(lambda: sup.snapshot().find("n/inner"))
        assert inner.kind == "process"
        os.kill(sup.ref("n").pid or 0, signal.SIGKILL)
        down = await anext(watch)
        assert down == Down("n/inner", 1, actors.Signalled(signal.SIGKILL))
        up = await anext(watch)
        assert isinstance(up, Up) and up.generation == 2
