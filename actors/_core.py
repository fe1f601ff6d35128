"""The rules of one supervisor as a state machine without IO: events in, actions out, time as an argument.

What it decides: who starts when, what a death means, who goes down with whom, when to give up, in which order and by
when everyone stops. What it leaves to its runner: starting, stopping and watching the children.

The rules are OTP's with four additions: starts that don't depend on each other run in parallel; restarts back off; a
cause can be declared not worth a retry; and deaths age only while no restart is under way (a slow stop, backoff or
start can't keep a supervisor from ever reaching its limit).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from ._exit import ExitReason, is_abnormal
from ._spec import Spec, Strategy, SupervisorSpec, check_child

Status: TypeAlias = Literal["down", "starting", "running", "stopping"]


# -- actions ---
class Start(Struct, frozen=True):
    name: str


class Stop(Struct, frozen=True):
    """Also sent again with an earlier deadline."""

    name: str
    deadline: float
    by: str


class AllStarted(Struct, frozen=True):
    """Once: every child of the first hour is up."""


class Decided(Struct, frozen=True):
    """For reports: what follows from a child's end. next: "restart", "stays down", "give up", "stopped", "removed"."""

    name: str
    reason: ExitReason
    next: str
    delay_s: float = 0.0
    count: int = 0


class Removed(Struct, frozen=True):
    """The child is forgotten: stopped for good, or its first start on a running supervisor failed."""

    name: str


class Finished(Struct, frozen=True):
    """All children are down and stay so. cause: "stop", "auto_shutdown", "start_failed", "limit", "give_up"."""

    cause: str
    by: str = ""
    name: str = ""
    deaths: tuple[tuple[str, ExitReason], ...] = ()

    @property
    def stopper(self) -> str:
        """Who stops the children."""
        if self.cause == "stop":
            return self.by
        return f"its supervisor ({self.cause.replace('_', ' ')}{self.name and ': ' + self.name})"


Action: TypeAlias = Start | Stop | AllStarted | Decided | Removed | Finished


class Child(Struct, eq=False):
    spec: Spec
    depends_on: tuple[str, ...]
    first_hour: bool  # part of the supervisor's own start
    status: Status = "down"
    want: bool = True  # up, sooner or later
    cycling: bool = False  # goes down as part of a restart, then up again
    removing: bool = False
    ever_started: bool = False
    recovering: bool = False  # from a death until it is up again
    hold_until: float = -math.inf
    waits_on: frozenset[str] = frozenset()
    deadline: float = math.inf
    failures: int = 0
    last_delay: float = 0.0
    running_since: float = 0.0
    restarts: int = 0
    last_exit: ExitReason | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def settled(self) -> bool:
        return self.status == "running" or (self.status == "down" and not self.want)


class Core(Struct, eq=False):
    """Give it events through its methods; carry out the actions they return, in order."""

    spec: SupervisorSpec
    draw: Callable[[], float]  # a share in [0, 1) for the jitter
    children: dict[str, Child] = {}
    started: bool = False
    ending: Finished | None = None
    finished: bool = False
    deadline: float = math.inf
    deaths: list[tuple[float, str, ExitReason]] = []
    _healthy_s: float = 0.0  # the clock on which deaths age
    _seen_at: float = math.nan
    _actions: list[Action] = []

    # -- events ---
    def begin(self, now: float) -> list[Action]:
        self._tick(now)
        for spec in self.spec.children:
            self._insert(spec, first_hour=True)
        names = frozenset(self.children)
        for child in self.children.values():
            child.waits_on = frozenset(child.depends_on) & names
        return self._settle(now)

    def add(self, spec: Spec, now: float) -> list[Action]:
        """One more child. Raises SpecError, and changes nothing then."""
        check_child(spec, [child.spec for child in self.children.values()], self.spec.auto_shutdown)
        self._tick(now)
        self._insert(spec, first_hour=False)
        return self._settle(now)

    def child_started(self, name: str, now: float) -> list[Action]:
        self._tick(now)
        child = self.children[name]
        if child.status == "starting":
            child.status = "running"
            child.running_since = now
            child.recovering = False
            child.ever_started = True
        return self._settle(now)

    def child_exited(self, name: str, reason: ExitReason, now: float) -> list[Action]:
        self._tick(now)
        child = self.children[name]
        was, child.status = child.status, "down"
        child.last_exit = reason
        if was == "stopping":
            self._on_stopped(child, reason)
        else:
            self._on_death(child, reason, was == "starting", now)
        return self._settle(now)

    def advance(self, now: float) -> list[Action]:
        """Time has passed: call it at `next_timer()`."""
        self._tick(now)
        return self._settle(now)

    def next_timer(self) -> float:
        """When `advance` has something to do next; inf if never."""
        if self.ending is not None:
            return math.inf
        held = [child.hold_until for child in self.children.values() if child.want and child.status == "down"]
        return min((until for until in held if until > self._seen_at), default=math.inf)

    def is_down_for_good(self, name: str) -> bool:
        """Whether the child has ended and nothing but a request will start it again."""
        child = self.children[name]
        return child.status == "down" and not child.want

    def stop(self, now: float, deadline: float, by: str) -> list[Action]:
        """End all of it, in reverse order; a second stop may only shorten the deadline."""
        self._tick(now)
        ending = self._end(Finished("stop", by))
        if deadline < self.deadline:
            self.deadline = deadline
            for child in self.children.values():
                if child.status == "stopping":
                    self._stop_child(child, now, deadline, ending.stopper)
        return self._settle(now)

    def stop_child(self, name: str, now: float, deadline: float, by: str) -> list[Action]:
        """Stop one child and forget it."""
        self._tick(now)
        child = self.children[name]
        child.want, child.removing, child.recovering = False, True, False
        if child.status == "down":
            self._remove(child)
        else:
            self._stop_child(child, now, deadline, by)
        return self._settle(now)

    def restart_child(self, name: str, now: float, by: str) -> list[Action]:
        """Take one child down and up again; no death is counted."""
        self._tick(now)
        child = self.children[name]
        if self.ending is None and not child.removing:
            child.want, child.hold_until, child.waits_on = True, -math.inf, frozenset()
            if child.status in ("starting", "running"):
                child.cycling = True
                self._stop_child(child, now, math.inf, by)
        return self._settle(now)

    # -- rules ---
    def _insert(self, spec: Spec, *, first_hour: bool) -> None:
        earlier = tuple(self.children)
        depends_on = earlier if spec.depends_on is None else spec.depends_on
        self.children[spec.name] = Child(spec, depends_on, first_hour)

    def _on_stopped(self, child: Child, reason: ExitReason) -> None:
        child.cycling = False
        child.waits_on &= frozenset(self.children)
        if child.removing:
            self._decide(child, reason, "removed")
            self._remove(child)
        else:
            self._decide(child, reason, "restart" if child.want and self.ending is None else "stopped")
            self._forget_if_done(child)

    def _on_death(self, child: Child, reason: ExitReason, in_start: bool, now: float) -> None:
        """It ended by itself."""
        spec = child.spec
        if self.ending is not None:
            self._decide(child, reason, "stopped")
            return
        if in_start and not child.ever_started:
            if not child.first_hour:
                child.want = False
                self._decide(child, reason, "removed")
                self._remove(child)
                return
            if not self.started:
                self._give_up("start_failed", child, reason)
                return
        abnormal = in_start or is_abnormal(reason)
        if spec.restart == "temporary" or (spec.restart == "transient" and not abnormal):
            child.want = child.recovering = False
            self._decide(child, reason, "stays down")
            if spec.significant:
                self._auto_shutdown()
            self._forget_if_done(child)
            return
        if spec.give_up_on is not None and spec.give_up_on(reason):
            self._give_up("give_up", child, reason)
            return
        self.deaths = [death for death in self.deaths if self._healthy_s - death[0] <= self.spec.period]
        self.deaths.append((self._healthy_s, child.name, reason))
        if len(self.deaths) > self.spec.intensity:
            self._give_up("limit", child, reason)
            return
        delay = self._backoff(child, in_start, now)
        self._decide(child, reason, "restart", delay)
        self._plan_restart(child, now + delay)

    def _backoff(self, child: Child, in_start: bool, now: float) -> float:
        if not in_start and now - child.running_since >= max(self.spec.period, 10 * child.last_delay):
            child.failures = 0
        child.failures += 1
        child.last_delay = child.spec.backoff.delay(child.failures, self.draw())
        return child.last_delay

    def _plan_restart(self, dead: Child, hold_until: float) -> None:
        affected = [child for child in self._affected(dead) if not child.removing]
        round_names = frozenset(child.name for child in affected if child.want)
        for child in affected:
            up = child.status in ("starting", "running", "stopping")
            if child.spec.restart == "temporary" and (up or child.ever_started):  # goes down with them, stays down
                child.want = False
                child.cycling = up
                continue
            if not child.want:
                continue  # a transient that has done its work
            child.cycling = up
            child.recovering = True
            child.hold_until = max(child.hold_until, hold_until)
            child.waits_on = frozenset(child.depends_on) & round_names
            child.restarts += 1

    def _affected(self, dead: Child) -> list[Child]:
        every = list(self.children.values())
        strategy: Strategy = self.spec.strategy
        if strategy == "one_for_all":
            return every
        if strategy == "rest_for_one":
            return every[every.index(dead) :]
        return [dead]

    def _auto_shutdown(self) -> None:
        significant = [child for child in self.children.values() if child.spec.significant]
        all_gone = all(child.status == "down" and not child.want for child in significant)
        if self.spec.auto_shutdown == "any_significant" or (self.spec.auto_shutdown == "all_significant" and all_gone):
            self._end(Finished("auto_shutdown"))

    def _give_up(self, cause: str, child: Child, reason: ExitReason) -> None:
        self._decide(child, reason, "give up")
        deaths = [(name, why) for _, name, why in self.deaths] if cause == "limit" else [(child.name, reason)]
        self._end(Finished(cause, name=child.name, deaths=tuple(deaths)))

    def _end(self, finished: Finished) -> Finished:
        """The first reason to end is the one that counts."""
        self.ending = self.ending or finished
        return self.ending

    def _remove(self, child: Child) -> None:
        del self.children[child.name]
        for other in self.children.values():
            other.depends_on = tuple(name for name in other.depends_on if name != child.name)
            other.waits_on -= {child.name}
        self._actions.append(Removed(child.name))

    def _forget_if_done(self, child: Child) -> None:
        """A temporary child of a pool leaves nothing behind when it has ended; its name is free again."""
        if child.spec.restart == "temporary" and not child.first_hour and self.ending is None:
            self._remove(child)

    def _decide(self, child: Child, reason: ExitReason, what: str, delay_s: float = 0.0) -> None:
        self._actions.append(Decided(child.name, reason, what, delay_s, len(self.deaths)))

    # -- what follows ---
    def _settle(self, now: float) -> list[Action]:
        if not self.finished:
            if self.ending is not None:
                self._settle_end(self.ending, now)
            else:
                self._settle_life(now)
        actions, self._actions = self._actions, []
        return actions

    def _settle_end(self, ending: Finished, now: float) -> None:
        self._stop_in_order(now, list(self.children.values()), ending.stopper)
        if all(child.status == "down" for child in self.children.values()):
            self.finished = True
            self._actions.append(ending)

    def _settle_life(self, now: float) -> None:
        cycling = [child for child in self.children.values() if child.cycling]
        self._stop_in_order(now, cycling, "its supervisor, to restart it")
        if not any(child.cycling and child.status != "down" for child in self.children.values()):
            for child in self.children.values():
                if child.want and child.status == "down" and child.hold_until <= now and self._may_start(child):
                    child.status = "starting"
                    child.cycling = False
                    child.hold_until = -math.inf
                    child.waits_on = frozenset()
                    self._actions.append(Start(child.name))
        if not self.started and all(child.settled for child in self.children.values() if child.first_hour):
            self.started = True
            self._actions.append(AllStarted())

    def _may_start(self, child: Child) -> bool:
        return all(name not in self.children or self.children[name].settled for name in child.waits_on)

    def _stop_in_order(self, now: float, whom: Sequence[Child], by: str) -> None:
        """Each of `whom` as soon as those of `whom` that depend on it are down."""
        up = [child for child in whom if child.status != "down"]
        for child in reversed(up):
            if child.status != "stopping" and not any(child.name in other.depends_on for other in up):
                self._stop_child(child, now, self.deadline, by)

    def _stop_child(self, child: Child, now: float, deadline: float, by: str) -> None:
        """Also one that is stopping: its deadline may only come nearer."""
        budget = child.spec.stop_timeout
        deadline = min(deadline, self.deadline, math.inf if budget is None else now + budget)
        if child.status != "stopping" or deadline < child.deadline:
            child.status = "stopping"
            child.deadline = deadline
            self._actions.append(Stop(child.name, deadline, by))

    def _tick(self, now: float) -> None:
        if not math.isnan(self._seen_at) and not any(child.recovering for child in self.children.values()):
            self._healthy_s += max(now - self._seen_at, 0.0)
        self._seen_at = now
