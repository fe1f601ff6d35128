"""Process actors: handshake, messages, verdicts and stops, through real processes."""

from __future__ import annotations

import os
import signal

import pytest

import actors
from actors import ActorStartError
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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV])
async def test_a_signal_during_start_is_the_verdict(number: int) -> None:
    async with actors.open_supervisor() as sup:
        with pytest.raises(ActorStartError) as caught:
            await sup.start(process("p", targets.dies_by, int(number), False))
        assert isinstance(caught.value.reason, actors.Signalled)
        assert caught.value.reason.signal == number
