"""Random trees of actors with random faults, from a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel

import actors
from actors import Backoff, CallInfo, ChildSpec, Context, Down, Event, SupervisorSpec, Up
from tests.actors.fakes import FakeLauncher, open_fake_launcher

STEP_S = 0.002
LIVE: Counter[str] = Counter()  # targets that run at the moment, by path


async def actor(ctx: Context, seed: int, paths: list[str]) -> None:
    """Does what the seed, its path and its generation say: starts or fails, talks, ends or lives on."""
    LIVE[ctx.path] += 1
    try:
        await _act(ctx, random.Random(f"{seed} {ctx.path} {ctx.generation}"), paths)
    finally:
        LIVE[ctx.path] -= 1


async def _act(ctx: Context, rng: random.Random, paths: list[str]) -> None:
    async def answer(payload: Any, info: CallInfo) -> Any:
        if rng.random() < 0.3:
            await anyio.sleep(rng.random() * STEP_S)
        if rng.random() < 0.1:
            raise LookupError("not today")
        return payload

    ctx.on("ask", answer)
    for step in range(rng.randrange(3)):
        ctx.progress("step", step, 2)
        await anyio.sleep(rng.random() * STEP_S)
    if rng.random() < (0.03 if ctx.generation == 1 else 0.15):
        raise ValueError("no start today")
    ctx.started(ctx.generation)
    life = rng.choice(["for ever", "for ever", "for ever", "crash", "return", "talk", "talk", "talk"])
    if life == "for ever":
        if rng.random() < 0.3:
            await ctx.draining.wait()
            return
        await anyio.sleep_forever()
    await anyio.sleep(rng.random() * 4 * STEP_S)
    if life == "crash":
        raise RuntimeError("a crash")
    while life == "talk":
        await _talk(ctx, rng, rng.choice(paths))


async def _talk(ctx: Context, rng: random.Random, path: str) -> None:
    try:
        match rng.randrange(4):
            case 0:
                await ctx.call(path, "ask", [1, "x"], timeout=rng.choice([STEP_S, 1.0]))
            case 1:
                with anyio.move_on_after(STEP_S):
                    await ctx.cast(path, {"k": 1})
            case 2:
                ctx.cast_nowait(path, "x")
                await anyio.lowlevel.checkpoint()
            case 3:
                with anyio.move_on_after(STEP_S):
                    before: Any = None
                    async for notice in ctx.watch(path):
                        check_order(before, notice)
                        before = notice
    except (actors.ActorDied, actors.NoSuchActor, actors.CallTimeout, actors.RemoteError, actors.MailboxFull):
        await anyio.sleep(rng.random() * STEP_S)


def check_order(before: Up | Down | None, notice: Up | Down) -> None:
    """Up and Down alternate, and each Down is of the Up before it."""
    if isinstance(before, Up):
        assert isinstance(notice, Down) and notice.generation == before.generation, (before, notice)
    elif isinstance(before, Down):
        assert isinstance(notice, Up) and notice.generation > before.generation, (before, notice)


def random_tree(rng: random.Random, seed: int) -> tuple[list[actors.Spec], list[str]]:
    paths: list[str] = []

    def children(prefix: str, depth: int, auto: str) -> list[actors.Spec]:
        specs: list[actors.Spec] = []
        for number in range(rng.randrange(1, 4)):
            name = f"{'abc'[number]}"
            restart: Any = rng.choice(["permanent", "permanent", "transient", "temporary"])
            common: dict[str, Any] = {
                "restart": restart,
                "significant": auto != "never" and restart != "permanent" and rng.random() < 0.5,
                "depends_on": rng.choice([None, ()]),
                "backoff": Backoff(min=0, max=STEP_S * rng.randrange(3)),
                "stop_timeout": rng.choice([0.02, 0.1]),
            }
            if depth and rng.random() < 0.4:
                inner_auto: Any = rng.choice(["never", "never", "any_significant", "all_significant"])
                strategy: Any = rng.choice(["one_for_one", "one_for_all", "rest_for_one"])
                inner = children(f"{prefix}{name}/", depth - 1, inner_auto)
                intensity = rng.randrange(4)
                specs.append(
                    SupervisorSpec(
                        name, inner, strategy=strategy, intensity=intensity, auto_shutdown=inner_auto, **common
                    )
                )
            else:
                paths.append(prefix + name)
                overflow: Any = rng.choice(["wait", "fail", "drop-oldest"])
                options: dict[str, Any] = {
                    "mailbox": rng.choice([1, 4]),
                    "overflow": overflow,
                    "drain": rng.random() < 0.3,
                }
                where: Any = rng.choice(["task", "process"])
                specs.append(ChildSpec(name, actor, (seed, paths), where=where, **options, **common))
        return specs

    specs = children("", 2, "never")

    def finish(spec: actors.Spec) -> actors.Spec:
        """With the paths of the whole tree, now that they are known."""
        import msgspec

        if isinstance(spec, SupervisorSpec):
            return msgspec.structs.replace(spec, children=[finish(child) for child in spec.children])
        return msgspec.structs.replace(spec, args=(seed, list(paths)))

    return [finish(spec) for spec in specs], paths


async def run_tree(seed: int) -> None:
    """One tree from its start to its end; raises AssertionError when something of it isn't clean."""
    rng = random.Random(seed)
    LIVE.clear()
    specs, paths = random_tree(rng, seed)
    open_lives: set[tuple[str, int]] = set()

    def on_event(event: Event) -> None:
        life = (event.path, event.generation)
        if event.kind == "starting":
            assert life not in open_lives
            open_lives.add(life)
        elif event.kind == "exited":
            open_lives.remove(life)
            assert event.reason is not None and str(event.reason)
        assert event.kind != "stuck", str(event)

    async with open_fake_launcher() as launcher:
        with anyio.fail_after(10):
            try:
                with anyio.CancelScope() as scope:
                    async with actors.open_supervisor(
                        specs,
                        launcher=launcher,
                        on_event=on_event,
                        seed=seed,
                        intensity=rng.randrange(6),
                        strategy=rng.choice(["one_for_one", "one_for_all", "rest_for_one"]),
                        wait_started=rng.random() < 0.5,
                    ) as sup:
                        await disturb(sup, launcher, rng, paths, scope.cancel)
            except (actors.ActorStartError, actors.RestartLimitExceeded, actors.ActorClosed) as exc:
                assert str(exc)
    assert not open_lives, f"never reported as ended: {open_lives}"
    assert not +LIVE, f"still running: {+LIVE}"


async def disturb(
    sup: actors.Supervisor, launcher: FakeLauncher, rng: random.Random, paths: list[str], cancel: Callable[[], None]
) -> None:
    for step in range(rng.randrange(6)):
        path = rng.choice(paths)
        try:
            match rng.randrange(7):
                case 0 if path in launcher.processes:
                    launcher.kill(path, rng.choice([6, 9, 11]))
                case 1 if path in launcher.processes:
                    launcher.exit(path, rng.randrange(3))
                case 2:
                    await sup.start(ChildSpec(f"extra{step}", actor, (rng.randrange(99), paths), depends_on=()))
                case 3:
                    await sup.ref(path).stop()
                case 4:
                    await sup.ref(path).restart()
                case 5:
                    await sup.ref(path).call("ask", 1, timeout=STEP_S)
                case 6:
                    actors.format_tree(await sup.refresh())
        except (actors.ActorError, TimeoutError):
            pass
        await anyio.sleep(rng.random() * 2 * STEP_S)
    match rng.randrange(5):
        case 0:
            await sup.stop(rng.choice([None, 1.0]))
        case 1:
            cancel()
            await anyio.sleep_forever()
        case 2:
            with anyio.move_on_after(5 * STEP_S):
                await sup.wait()
        case 3:
            sup.request_stop(by="a test")
