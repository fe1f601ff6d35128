"""The supervisor's rules: random histories on a fake clock against a small model that shares no code with the core."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors import Backoff, ChildSpec, Signalled, Stopped, SupervisorSpec
from actors._core import (
    AllStarted,
    Core,
    Decided,
    Finished,
    Removed,
    Start,
    Stop,
)
from actors._exit import ExitReason, Raised, RemoteErrorData, Returned

CRASH = Signalled(9)
CONFIG_ERROR = Raised(RemoteErrorData("ConfigError", "never retry"))


async def target(ctx: Any) -> None:
    raise AssertionError("the core starts nothing itself")


def child(name: str, **options: Any) -> ChildSpec:
    return ChildSpec(name, target, **options)


def is_config_error(reason: ExitReason) -> bool:
    return reason == CONFIG_ERROR


class Model:
    """What should happen on a death, told in another way than the core tells it: from the whole history."""

    def __init__(self, spec: SupervisorSpec) -> None:
        self.spec = spec
        self.deaths: list[float] = []
        self.healthy: list[tuple[float, float]] = []  # spans without a restart under way
        self.recovering: set[str] = set()
        self.at = 0.0

    def pass_time(self, now: float) -> None:
        if not self.recovering:
            self.healthy.append((self.at, now))
        self.at = now

    def age(self, since: float) -> float:
        return sum(end - max(begin, since) for begin, end in self.healthy if end > since)

    def verdict(self, spec: Any, reason: ExitReason, in_start: bool) -> str:
        normal = isinstance(reason, Returned) and not in_start
        if spec.restart == "temporary" or (spec.restart == "transient" and normal):
            return "stays down"
        if reason == CONFIG_ERROR and spec.give_up_on is not None:
            return "give up"
        self.deaths.append(self.at)
        young = [death for death in self.deaths if self.age(death) <= self.spec.period + 1e-9]
        self.deaths = young
        return "give up" if len(young) > self.spec.intensity else "restart"


NAMES = "abcde"


@st.composite
def supervisors(draw: st.DrawFn) -> SupervisorSpec:
    count = draw(st.integers(1, 5))
    auto = draw(st.sampled_from(["never", "any_significant", "all_significant"]))
    children = []
    for at in range(count):
        restart = draw(st.sampled_from(["permanent", "permanent", "transient", "temporary"]))
        depends_on = draw(st.one_of(st.none(), st.sets(st.sampled_from(NAMES[:at])) if at else st.just(set())))
        children.append(
            child(
                NAMES[at],
                restart=restart,
                significant=auto != "never" and restart != "permanent" and draw(st.booleans()),
                depends_on=None if depends_on is None else tuple(sorted(depends_on)),
                stop_timeout=draw(st.sampled_from([None, 0.0, 5.0])),
                backoff=Backoff(min=1.0, max=8.0, jitter="none"),
                give_up_on=is_config_error if draw(st.booleans()) else None,
            )
        )
    strategy = draw(st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"]))
    intensity = draw(st.integers(0, 4))
    return SupervisorSpec("s", children, strategy=strategy, intensity=intensity, period=20.0, auto_shutdown=auto)


class CoreMachine(RuleBasedStateMachine):
    """Children are "up" from Start until the machine says that they exited; every action is checked as it comes."""

    @initialize(spec=supervisors())
    def open(self, spec: SupervisorSpec) -> None:
        self.spec = spec
        self.core = Core(spec, lambda: 0.5)
        self.model = Model(spec)
        self.now = 0.0
        self.status: dict[str, str] = {}  # starting, running or stopping; absent when down
        self.specs: dict[str, Any] = {c.name: c for c in spec.children}
        self.deps = {c.name: set(NAMES[:i]) if c.depends_on is None else set(c.depends_on)
                     for i, c in enumerate(spec.children)}  # fmt: skip
        self.ever_up: set[str] = set()
        self.done: set[str] = set()  # ended for good
        self.must_cycle: set[str] = set()  # up, and to go down before anything starts
        self.first_hour = set(self.specs)
        self.not_before: dict[str, float] = {}
        self.all_started = 0
        self.finished: Finished | None = None
        self.stop_deadline = math.inf
        self.stop_deadlines: dict[str, float] = {}
        self.ending = False
        self.removing: set[str] = set()
        self.decided: list[Decided] = []
        self.do(self.core.begin(self.now))

    # -- checking actions ---
    def do(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Start(name):
                    assert name not in self.status and not self.ending and name not in self.done
                    assert not self.must_cycle, "started while some still have to go down"
                    assert self.now >= self.not_before.get(name, -math.inf), "started before its backoff was over"
                    if not self.all_started and name in self.first_hour and not self.ever_up:
                        up = {n for n, s in self.status.items() if s == "running"}
                        assert self.deps[name] <= up | self.done
                    self.status[name] = "starting"
                case Stop(name, deadline):
                    if self.status.get(name) == "stopping":
                        assert deadline < self.stop_deadlines[name]
                    else:
                        assert self.status.get(name) in ("starting", "running")
                        up_dependents = {n for n in self.status if name in self.deps[n]}
                        scope = set(self.status) if self.ending else self.must_cycle
                        assert not (up_dependents & scope) or name in self.removing
                    budget = self.specs[name].stop_timeout
                    latest = math.inf if budget is None else self.now + budget
                    assert deadline <= min(latest, self.stop_deadline)
                    self.status[name] = "stopping"
                    self.stop_deadlines[name] = deadline
                case AllStarted():
                    assert not self.all_started and not self.ending
                    self.all_started += 1
                    for name in self.first_hour:
                        assert self.status.get(name) == "running" or name in self.done
                case Decided():
                    self.decided.append(action)
                case Removed(name):
                    assert name not in self.status
                    self.forget(name)
                case Finished():
                    assert not self.status and self.finished is None and self.ending
                    self.finished = action

    def forget(self, name: str) -> None:
        self.done.discard(name)
        self.ever_up.discard(name)
        self.must_cycle.discard(name)
        self.not_before.pop(name, None)
        self.first_hour.discard(name)
        self.model.recovering.discard(name)
        del self.specs[name], self.deps[name]
        for deps in self.deps.values():
            deps.discard(name)

    def after(self, name: str, reason: ExitReason) -> None:
        """A child exited: compute what must follow, then compare with what the core decided."""
        was = self.status.pop(name)
        self.must_cycle.discard(name)
        self.decided.clear()
        if was == "stopping" or self.ending:
            actions = self.core.child_exited(name, reason, self.now)
            if not self.ending and name in self.removing:
                self.removing.discard(name)
            self.do(actions)
            assert [d.next for d in self.decided] in (["stopped"], ["restart"], ["removed"])
            return
        spec = self.specs[name]
        in_start = was == "starting"
        if in_start and name not in self.ever_up and (name not in self.first_hour or not self.all_started):
            expected = "give up" if name in self.first_hour else "removed"
        else:
            expected = self.model.verdict(spec, reason, in_start)
        if expected == "give up":
            self.ending = True
        elif expected == "stays down":
            self.done.add(name)
            self.model.recovering.discard(name)
            self.check_auto_shutdown(name)
        elif expected == "restart":
            self.plan_restart(name)
        actions = self.core.child_exited(name, reason, self.now)
        (decision,) = [a for a in actions if isinstance(a, Decided)]
        assert decision.next == expected, (decision, expected)
        if expected == "restart":
            for affected in self.affected(name):
                if affected not in self.done:
                    self.not_before[affected] = max(self.not_before.get(affected, 0.0), self.now + decision.delay_s)
        self.do(actions)

    def check_auto_shutdown(self, name: str) -> None:
        if not self.specs[name].significant:
            return
        significant = {n for n, s in self.specs.items() if s.significant}
        if self.spec.auto_shutdown == "any_significant" or significant <= self.done:
            self.ending = True

    def affected(self, name: str) -> list[str]:
        order = list(self.specs)
        if self.spec.strategy == "one_for_all":
            return order
        return order[order.index(name) :] if self.spec.strategy == "rest_for_one" else [name]

    def plan_restart(self, name: str) -> None:
        for other in self.affected(name):
            if other in self.removing or other in self.done:
                continue
            if other in self.status:
                self.must_cycle.add(other)
                if self.specs[other].restart == "temporary":
                    self.done.add(other)
                    continue
            elif self.specs[other].restart == "temporary" and other in self.ever_up:
                self.done.add(other)
                continue
            self.model.recovering.add(other)

    # -- what can happen ---
    def running(self, *states: str) -> list[str]:
        return sorted(name for name, status in self.status.items() if status in states)

    @rule(data=st.data())
    @precondition(lambda self: self.running("starting"))
    def comes_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.running("starting")))
        self.status[name] = "running"
        self.ever_up.add(name)
        self.model.recovering.discard(name)
        self.not_before.pop(name, None)
        self.do(self.core.child_started(name, self.now))

    @rule(data=st.data(), reason=st.sampled_from([CRASH, CRASH, Returned(None), CONFIG_ERROR]))
    @precondition(lambda self: self.running("starting", "running"))
    def dies(self, data: st.DataObject, reason: ExitReason) -> None:
        name = data.draw(st.sampled_from(self.running("starting", "running")))
        if self.status[name] == "starting" and isinstance(reason, Returned):
            reason = CRASH  # who returns before it started has failed
        self.after(name, reason)

    @rule(data=st.data())
    @precondition(lambda self: self.running("stopping"))
    def has_stopped(self, data: st.DataObject) -> None:
        self.after(data.draw(st.sampled_from(self.running("stopping"))), Stopped("test"))

    @rule(step=st.sampled_from([0.1, 1.0, 7.0, 30.0]))
    def time_passes(self, step: float) -> None:
        target = self.now + step
        while (due := self.core.next_timer()) <= target:
            assert due > self.now, "a timer that is due stays due"
            self.now = due
            self.model.pass_time(due)
            self.do(self.core.advance(due))
        self.now = target
        self.model.pass_time(target)
        self.do(self.core.advance(target))

    @rule(name=st.sampled_from("vwxyz"), restart=st.sampled_from(["permanent", "transient", "temporary"]))
    @precondition(lambda self: not self.ending)
    def is_added(self, name: str, restart: str) -> None:
        if name not in self.specs:
            self.specs[name] = child(name, depends_on=(), restart=restart, backoff=Backoff(min=0.5, max=0.5))
            self.deps[name] = set()
            self.do(self.core.add(self.specs[name], self.now))

    @rule(data=st.data())
    @precondition(lambda self: self.specs and not self.ending)
    def is_removed(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.specs)))
        if name not in self.removing:
            if name in self.status:
                self.removing = self.removing | {name}
            self.must_cycle.discard(name)
            if name in self.core.children and self.core.children[name].cycling:
                self.must_cycle.add(name)
            self.model.recovering.discard(name)
            self.do(self.core.stop_child(name, self.now, math.inf, "test"))

    @rule(timeout=st.sampled_from([math.inf, 10.0, 1.0, 0.0]))
    def is_stopped(self, timeout: float) -> None:
        if self.finished is None:
            self.ending = True
            self.stop_deadline = min(self.stop_deadline, self.now + timeout)
            self.do(self.core.stop(self.now, self.now + timeout, "test"))

    @invariant()
    def quiet_means_settled(self) -> None:
        """With nothing in motion and no timer, all that should be up is up, or the end has been told."""
        if not hasattr(self, "core"):
            return
        if self.ending and not self.status:
            assert self.finished is not None
        moving = self.running("starting", "stopping") or self.core.next_timer() < math.inf
        if not self.ending and not moving:
            assert set(self.status) | self.done == set(self.specs)
            assert self.all_started


CoreMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_core_against_the_model = pytest.mark.filterwarnings("default")(CoreMachine.TestCase)


def start_all(core: Core, now: float = 0.0) -> None:
    actions = core.begin(now)
    while starts := [a for a in actions if isinstance(a, Start)]:
        actions = [a for start in starts for a in core.child_started(start.name, now)]


def test_deaths_do_not_age_during_backoff_and_restart() -> None:
    """A slow stop, backoff or start can't keep a supervisor from its limit."""
    slow = Backoff(min=100, max=100, jitter="none")
    core = Core(SupervisorSpec("s", [child("a", backoff=slow)], intensity=2), lambda: 0)
    start_all(core)
    now = 0.0
    for _ in range(2):
        core.child_exited("a", CRASH, now)
        now += 100.0  # far more than the period
        assert core.advance(now) == [Start("a")]
        now += 1000.0  # a slow start
        core.child_started("a", now)
    actions = core.child_exited("a", CRASH, now)
    assert isinstance(actions[-1], Finished) and actions[-1].cause == "limit"


def test_backoff_grows_and_is_reset_by_health() -> None:
    spec = SupervisorSpec("s", [child("a", backoff=Backoff(min=1, max=8, jitter="none"))], intensity=100, period=10)
    core = Core(spec, lambda: 0)
    start_all(core)
    now, delays = 0.0, []
    for healthy_s in (0, 0, 0, 0, 0, 79, 81, 0):
        now += healthy_s
        (decided,) = [a for a in core.child_exited("a", CRASH, now) if isinstance(a, Decided)]
        delays.append(decided.delay_s)
        now += decided.delay_s
        core.advance(now)
        core.child_started("a", now)
    assert delays == [1, 2, 4, 8, 8, 8, 1, 2]


def test_independent_children_start_and_stop_in_parallel() -> None:
    core = Core(SupervisorSpec("s", [child("a"), child("b", depends_on=()), child("c", depends_on=("a",))]), lambda: 0)
    assert core.begin(0.0) == [Start("a"), Start("b")]
    assert core.child_started("a", 0.0) == [Start("c")]
    core.child_started("b", 0.0)
    core.child_started("c", 0.0)
    stops = core.stop(1.0, 9.0, "test")
    assert [stop.name for stop in stops if isinstance(stop, Stop)] == ["c", "b"]
    assert [stop.deadline for stop in stops if isinstance(stop, Stop)] == [6.0, 6.0]
    assert core.stop(2.0, 3.0, "test") == [Stop("b", 3.0, "test"), Stop("c", 3.0, "test")]


def test_second_death_joins_the_round() -> None:
    core = Core(
        SupervisorSpec("s", [child(n, backoff=Backoff(min=0, max=0)) for n in "abc"], strategy="one_for_all"), lambda: 0
    )
    start_all(core)
    actions = core.child_exited("b", CRASH, 1.0)
    assert [a.name for a in actions if isinstance(a, Stop)] == ["c"]
    assert not [a for a in core.child_exited("a", CRASH, 1.1) if isinstance(a, Start | Stop)]
    assert [a for a in core.child_exited("c", Stopped(""), 1.2) if isinstance(a, Start)] == [Start("a")]
    assert core.child_started("a", 1.3) == [Start("b")]
