"""Task actors and supervisors in one process."""

from __future__ import annotations

import anyio
import pytest

import actors
from actors import ActorStartError, Backoff, ChildSpec, Context, Down, RestartLimitExceeded, SupervisorSpec, Up

NOW = Backoff(min=0, max=0)


async def sleeper(ctx: Context, value: object = None) -> None:
    ctx.started(value)
    await anyio.sleep_forever()


async def crasher(ctx: Context) -> None:
    ctx.started()
    raise RuntimeError("boom")


async def never_starts(ctx: Context) -> None:
    ctx.progress("thinking", 1, 2)
    await anyio.sleep_forever()


async def test_start_returns_the_value_of_started() -> None:
    value = object()
    async with actors.open_supervisor() as sup:
        ref = await sup.start(ChildSpec("a", sleeper, (value,)))
        assert ref.value is value
        assert (ref.path, ref.generation) == ("a", 1)
        await ref.stop()
        with pytest.raises(actors.ActorDied):
            await ref.call("anything")


async def test_start_timeout_names_the_progress() -> None:
    async with actors.open_supervisor() as sup:
        with pytest.raises(ActorStartError) as caught:
            await sup.start(ChildSpec("a", never_starts, start_timeout=0.05))
        assert isinstance(caught.value.reason, actors.StartTimeout)
        assert caught.value.progress == actors.Progress("thinking", 1, 2)


async def test_failed_initial_start_raises_and_stops_the_others() -> None:
    stopped: list[str] = []

    async def first(ctx: Context) -> None:
        ctx.started()
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append("first")

    async def second(ctx: Context) -> None:
        raise ValueError("bad config")

    with pytest.raises(ActorStartError, match="bad config") as caught:
        async with actors.open_supervisor([ChildSpec("one", first), SupervisorSpec("sub", [ChildSpec("two", second)])]):
            raise AssertionError("not reached")
    assert caught.value.path == "sub/two"
    assert isinstance(caught.value.__cause__, ValueError)
    assert stopped == ["first"]


async def test_restart_limit_ends_the_block() -> None:
    with pytest.raises(RestartLimitExceeded) as caught:
        async with actors.open_supervisor([ChildSpec("a", crasher, backoff=NOW)], intensity=2):
            await anyio.sleep_forever()
    assert [path for path, _ in caught.value.causes] == ["a", "a", "a"]


async def test_wait_raises_the_limit() -> None:
    async with actors.open_supervisor([ChildSpec("a", crasher, backoff=NOW)], intensity=0) as sup:
        with pytest.raises(RestartLimitExceeded):
            await sup.wait()


async def test_stops_in_reverse_order() -> None:
    order: list[str] = []

    async def actor(ctx: Context) -> None:
        ctx.started()
        try:
            await anyio.sleep_forever()
        finally:
            order.append(ctx.name)

    async with actors.open_supervisor([ChildSpec(name, actor) for name in "abc"]):
        pass
    assert order == ["c", "b", "a"]


async def test_watch_calls_and_casts_by_path() -> None:
    seen: list[object] = []
    done = anyio.Event()

    async def server(ctx: Context) -> None:
        async def double(payload: int, info: actors.CallInfo) -> int:
            return payload * 2

        ctx.on("double", double)
        ctx.started("v")
        async for message in ctx.inbox:
            seen.append(message)
            done.set()

    async def client(ctx: Context) -> None:
        async for notice in ctx.watch("sub/server"):
            assert notice == Up("sub/server", "v", 1)
            break
        assert await ctx.call("sub/server", "double", 21) == 42
        await ctx.cast("sub/server", "hello")
        ctx.started()
        await anyio.sleep_forever()

    sub = SupervisorSpec("sub", [ChildSpec("server", server)])
    async with actors.open_supervisor([ChildSpec("client", client), sub], wait_started=False) as sup:
        pass
    async with actors.open_supervisor([sub, ChildSpec("client", client)]) as sup:
        await done.wait()
        assert seen == ["hello"]
        ref = sup.ref("sub/server")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ref.stop)
            down = await ref.down()
        assert isinstance(down, Down) and isinstance(down.reason, actors.Stopped)


async def test_cancelled_start_leaves_nothing() -> None:
    async with actors.open_supervisor() as sup:
        with anyio.move_on_after(0.02):
            await sup.start(ChildSpec("a", never_starts))
        assert sup.snapshot().children == ()


async def test_cancelled_scope_stops_the_tree() -> None:
    ended: list[str] = []

    async def actor(ctx: Context) -> None:
        ctx.started()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(ctx.path)

    with anyio.move_on_after(0.02) as scope:
        async with actors.open_supervisor([ChildSpec("a", actor)]):
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert ended == ["a"]


async def test_ctrl_c_in_an_actor_stops_the_tree_in_order_and_reaches_the_owner() -> None:
    ended: list[str] = []

    async def other(ctx: Context) -> None:
        ctx.started()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(ctx.name)

    async def interrupted(ctx: Context) -> None:
        ctx.started()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        async with actors.open_supervisor([ChildSpec("a", other), ChildSpec("b", other), ChildSpec("c", interrupted)]):
            await anyio.sleep_forever()
    assert ended == ["b", "a"]


async def test_a_raising_event_handler_ends_the_block_and_leaves_nothing() -> None:
    def on_event(event: actors.Event) -> None:
        if event.kind == "started" and event.path == "b":
            raise LookupError("a broken handler")

    specs = [ChildSpec("a", "tests.actors.targets:echo", where="process"), ChildSpec("b", sleeper)]
    with pytest.raises(LookupError):
        async with actors.open_supervisor(specs, on_event=on_event):
            await anyio.sleep_forever()


async def test_a_task_that_cannot_end_is_reported_with_its_stack_and_waited_for() -> None:
    reports: list[str] = []
    release = anyio.Event()

    async def stubborn(ctx: Context) -> None:
        ctx.started()
        with anyio.CancelScope(shield=True):
            await release.wait()

    def on_event(event: actors.Event) -> None:
        if event.kind == "stuck":
            reports.append(event.text)
            release.set()

    async with actors.open_supervisor([ChildSpec("a", stubborn, stop_timeout=0.0)], on_event=on_event):
        pass
    assert "in stubborn" in reports[0]


async def test_auto_shutdown_by_significant_children() -> None:
    async def job(ctx: Context) -> None:
        ctx.started()

    specs = [ChildSpec("a", sleeper), ChildSpec("job", job, restart="transient", significant=True)]
    async with actors.open_supervisor(specs, auto_shutdown="any_significant") as sup:
        assert isinstance(await sup.wait(), actors.Returned)
        with pytest.raises(actors.ActorClosed):
            await sup.start(ChildSpec("late", sleeper))


async def test_pool_children_come_and_go() -> None:
    async with actors.open_supervisor() as sup:
        for number in range(3):
            await sup.start(ChildSpec(f"w{number}", sleeper, (number,), depends_on=()))
        assert [child.path for child in sup.snapshot().children] == ["w0", "w1", "w2"]
        again = await sup.ref("w1").restart()
        assert (again.generation, again.value) == (2, 1)
        await again.stop()
        assert [child.path for child in sup.snapshot().children] == ["w0", "w2"]
        assert (await sup.start(ChildSpec("w1", sleeper))).generation == 3  # never the same one twice


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "no spaces"}, "is no actor name"),
        ({"where": "thread"}, "where must be one of task, process"),
        ({"restart": "always"}, "restart must be one of"),
        ({"significant": True}, "a permanent child is always restarted"),
        ({"restart": "transient", "significant": True}, "needs a supervisor with auto_shutdown"),
        ({"depends_on": ("nobody",)}, "is no earlier sibling"),
        ({"stop_timeout": -1.0}, "stop_timeout must be at least 0"),
        ({"target": "no target"}, "must be 'package.module:function'"),
        ({"nice": 3}, "are for process actors"),
        ({"hang_timeout": 1.0}, "has no hang timeout"),
        ({"where": "process", "args": (object(),)}, "can't go to another process"),
        ({"where": "process", "target": lambda ctx: None}, "not a module's own function"),
        ({"where": "process", "backend": "main-thread"}, "needs a plain function"),
        ({"mailbox": 0}, "at least 1 message"),
    ],
)
def test_specs_are_checked_without_starting_anything(options: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"name": "a", "target": sleeper, **options}
    with pytest.raises(actors.SpecError, match=words):
        actors.check([ChildSpec(**given)])  # type: ignore[arg-type]
