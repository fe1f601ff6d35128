"""The debug door: faults on demand, for tests (``supervision.debug_faults``, off by default).

    POST /debug/fault  {"actor": "replica0/scheduler0", "fault": "kill"}

A fault happens at once, or where ``phase``, ``step`` or ``prompt`` say. Signals come from outside, by the pid; the rest
happens in the actor itself: each one that can be told has one hook, ``open_door`` (on an event loop) or ``ThreadDoor``
(a step loop). With the door closed a hook is not there: no check is left in the way of a token.
"""

import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal

import anyio
import msgspec
import zmq

import actors

from .config import Config
from .handshakes import DetokenizerUp, FrontendUp, SchedulerUp
from .mailbox import MAX_BYTES, SocketOutbox
from .peers import DETOKENIZER, Peers, value

FAULTS = "faults"
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
FRAMES = {"garbage": b"\xc1no message\x00" * 50, "oversized": bytes(MAX_BYTES + 1)}
FOR_TASKS = ("raise", "stuck")


class Provoked(Exception):
    """A fault that was asked for."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shall happen to whom, and when. Without a when: at once.

    ``phase``: when a coming life of the actor reports this phase of its start. ``step``: at the scheduler's n-th step
    from now. ``prompt``: at the first step after a request came whose prompt holds these tokens (poison).
    """

    actor: str
    fault: Literal[
        "kill", "stop", "continue", "raise", "exit", "abort", "stuck", "slow_step", "garbage", "oversized", "clear"
    ]
    phase: str = ""
    step: int = 0
    prompt: tuple[int, ...] = ()
    factor: float = 20.0  # slow_step: how many times longer a step takes
    lives: int = 1  # for phase and prompt: in how many lives of the actor, 0 = in all


def first_fault(text: str) -> Fault:
    """What a first start is to meet, as "FAULT ACTOR PHASE". Raises ValueError."""
    name, actor, phase = text.split(None, 2)
    return msgspec.convert({"actor": actor, "fault": name, "phase": phase}, Fault)


class Hello(msgspec.Struct, frozen=True):
    """A step loop begins, and asks what is laid for it."""

    path: str


class Laid(msgspec.Struct, frozen=True):
    """The answer. ``is_task``: it shares its process with others."""

    faults: tuple[Fault, ...]
    is_task: bool = False


def fire(fault: Fault) -> None:
    """Let it happen, here and now."""
    match fault.fault:
        case "raise":
            raise Provoked(f"{fault.actor}: asked for")
        case "exit":
            os._exit(0)
        case "abort":
            os.abort()
        case "stuck":
            while True:
                time.sleep(60)
        case "kill" | "stop":
            os.kill(os.getpid(), SIGNALS[fault.fault])


# --- the hooks


STARTED = "started"  # the last phase of every start: about to say that it is ready


def _trap_phases(ctx: Any, laid: list[Fault], fire: Callable[[Fault], None] = fire) -> None:
    """Have the actor's reports of its start set off what is laid there."""
    progress, started = ctx.progress, ctx.started

    def set_off(phase: str) -> None:
        for fault in laid:
            if fault.phase and fault.phase == phase:
                fire(fault)

    def report(phase: str, *arguments: Any, **more: Any) -> None:
        progress(phase, *arguments, **more)
        set_off(phase)

    def report_started(value: Any = None) -> None:
        set_off(STARTED)
        started(value)

    ctx.progress, ctx.started = report, report_started


class ThreadDoor:
    """The hook of a step loop. ``take`` what is cast to the actor; the answer to the first word sets ``opened``."""

    def __init__(self, ctx: actors.ThreadContext) -> None:
        self.opened = False
        self._laid: list[Fault] = []
        self._poisoned = False
        _trap_phases(ctx, self._laid)
        ctx.cast_nowait(FAULTS, Hello(ctx.path))

    def take(self, payload: Any) -> None:
        for fault in value(payload, Laid).faults:
            if fault.fault == "clear":
                self._laid.clear()
            elif fault.phase or fault.step or fault.prompt or fault.fault == "slow_step":
                self._laid.append(fault)
            else:
                fire(fault)
        self.opened = True

    def haunt(self, core: Any) -> None:
        """Have an engine's steps and submissions set off what is laid there."""
        step, submit = core.step, core.submit

        def haunted_submit(message: Any) -> None:
            self._poisoned = self._poisoned or any(
                fault.prompt and _ids(fault.prompt) in message.prompt for fault in self._laid
            )
            submit(message)

        def haunted_step() -> Any:
            for at, fault in enumerate(self._laid):
                if fault.step and not fault.phase:
                    self._laid[at] = fault = msgspec.structs.replace(fault, step=fault.step - 1)
                    if not fault.step:
                        fire(fault)
                elif fault.prompt and self._poisoned:
                    fire(fault)
            began = time.monotonic()
            news = step()
            for fault in self._laid:
                if fault.fault == "slow_step":
                    time.sleep((time.monotonic() - began) * (fault.factor - 1))
            return news

        core.step, core.submit = haunted_step, haunted_submit


class Door:
    """The hook of an actor on an event loop. Where ``stuck`` is set, its work must not go on."""

    stuck = False

    async def passed(self) -> None:
        """Never, where it is stuck."""
        if self.stuck:
            await anyio.sleep_forever()


class _OpenDoor(Door):
    def __init__(self, ctx: actors.Context, laid: Laid) -> None:
        self._is_task = laid.is_task
        self._send, self._coming = anyio.create_memory_object_stream[Fault](100)
        _trap_phases(ctx, list(laid.faults), self._fire)
        ctx.on("fault", self._take)

    async def _take(self, payload: Any, info: actors.CallInfo) -> None:
        self._send.send_nowait(value(payload, Fault))

    async def serve(self) -> None:
        """Raises what is asked for."""
        with self._send, self._coming:
            async for fault in self._coming:
                self._fire(fault)

    def _fire(self, fault: Fault) -> None:
        if fault.fault == "stuck" and self._is_task:
            self.stuck = True  # to block the loop would be to block everyone on it
        else:
            fire(fault)


CLOSED = Door()


@asynccontextmanager
async def open_door(ctx: actors.Context, config: Config) -> AsyncIterator[Door]:
    if not config.supervision.debug_faults:
        yield CLOSED
        return
    async for notice in ctx.watch(FAULTS):
        if isinstance(notice, actors.Up):
            break
    door = _OpenDoor(ctx, value(await ctx.call(FAULTS, "hello", Hello(ctx.path)), Laid))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(door.serve)
            yield door
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        if len(group.exceptions) > 1:
            raise
        raise group.exceptions[0] from None  # what the actor raises with the door closed


# --- the actor that faults are asked of


class _Faults:
    def __init__(self, ctx: actors.Context, config: Config, peers: Peers) -> None:
        self._ctx, self._peers = ctx, peers
        self._laid = [first_fault(text) for text in config.supervision.debug_laid]

    def _of(self, path: str) -> tuple[Fault, ...]:
        """What is laid for a life that begins; one life less is left of it."""
        mine = [fault for fault in self._laid if fault.actor == path]
        for fault in mine:
            if fault.lives:
                self._laid.remove(fault)
                if fault.lives > 1:
                    self._laid.append(msgspec.structs.replace(fault, lives=fault.lives - 1))
        return tuple(mine)

    async def hello(self, payload: Any, info: actors.CallInfo) -> Laid:
        path = value(payload, Hello).path
        seen = (await self._ctx.snapshot()).find(path)
        is_task = seen is not None and seen.kind == "task"
        laid = self._of(path)
        return Laid(tuple(fault for fault in laid if not is_task or fault.fault in FOR_TASKS), is_task)

    async def fault(self, payload: Any, info: actors.CallInfo) -> str:
        """Do it, or lay it. Returns an empty text, or a sentence that says why not."""
        try:
            fault = msgspec.convert(payload, Fault)
        except msgspec.ValidationError as error:
            return str(error)
        seen = (await self._ctx.snapshot()).find(fault.actor)
        if seen is None or seen.kind == "supervisor" or fault.actor == FAULTS:
            return f"there is no actor {fault.actor!r}"
        if fault.fault == "clear":
            self._laid = [other for other in self._laid if other.actor != fault.actor]
        elif seen.kind == "task" and fault.fault not in (*FOR_TASKS, *FRAMES):
            return f"{fault.actor} is a task: its faults are {' and '.join(FOR_TASKS)}"
        if fault.phase or fault.prompt:
            self._laid.append(fault)
            if fault.phase:
                return ""
        if fault.fault in FRAMES:
            return await self._send(fault)
        if fault.fault in SIGNALS and not (fault.step or fault.prompt):
            if seen.pid is None:
                return f"{fault.actor} has no process at the moment"
            os.kill(seen.pid, SIGNALS[fault.fault])
            return ""
        if fault.actor in self._peers.engines:
            self._ctx.cast_nowait(fault.actor, Laid((fault,)))
        elif fault.fault != "clear":
            await self._ctx.call(fault.actor, "fault", fault, timeout=5)
        return ""

    async def _send(self, fault: Fault) -> str:
        """Put a frame that is no message into the actor's mailbox."""
        kinds: dict[str, type] = {DETOKENIZER: DetokenizerUp, **dict.fromkeys(self._peers.engines, SchedulerUp)}
        notice = await anext(self._ctx.watch(fault.actor))
        if not isinstance(notice, actors.Up):
            return f"{fault.actor} is not up"
        up: Any = value(notice.value, kinds.get(fault.actor, FrontendUp))
        address = up.origin if isinstance(up, FrontendUp) else up.address
        if address.startswith("local:"):
            return f"{fault.actor} has no socket: all who talk to it are in its process"
        await anyio.to_thread.run_sync(_send_frame, address, FRAMES[fault.fault])
        return ""

    async def answer(self, payload: Any) -> None:
        path = value(payload, Hello).path
        self._ctx.cast_nowait(path, Laid(self._of(path)))


def _send_frame(address: str, frame: bytes) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = SocketOutbox(context, address)
    outbox.socket.setsockopt(zmq.SNDTIMEO, 1000)
    with suppress(zmq.ZMQError):
        outbox.socket.send(frame)
    outbox.socket.close(linger=1000)
    context.term()


async def faults(ctx: actors.Context, config: Config, peers: Peers) -> None:
    """The actor. Calls: ``fault`` (a ``Fault``) -> text; ``hello`` (``Hello``) -> ``Laid``. Casts: ``Hello``."""
    desk = _Faults(ctx, config, peers)
    ctx.on("fault", desk.fault)
    ctx.on("hello", desk.hello)
    ctx.started()
    async for payload in ctx.inbox:
        await desk.answer(payload)


def _ids(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
