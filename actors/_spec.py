"""Child specs: frozen, validated on construction, without starting anything."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from msgspec import Struct
from msgspec.structs import force_setattr

from ._errors import SpecError
from ._exit import ExitReason
from ._wire import Overflow, dump

_COROUTINE = 0x80  # inspect.CO_COROUTINE; that module takes its time to import
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*|file:.+\.py:[A-Za-z_]\w*")

Restart: TypeAlias = Literal["permanent", "transient", "temporary"]
Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
AutoShutdown: TypeAlias = Literal["never", "any_significant", "all_significant"]
GiveUpOn: TypeAlias = Callable[[ExitReason], bool]


_hints_of = lru_cache(get_type_hints)


def _check_fields(spec: Struct, name: str) -> None:
    """Every choice is one of its kind, and every number at least 0."""
    for what, hint in _hints_of(type(spec)).items():
        given = getattr(spec, what)
        if get_origin(hint) is Literal and given not in get_args(hint):
            raise SpecError(f"{name}: {what} must be one of {', '.join(get_args(hint))}, not {given!r}")
        if hint in (int, float, float | None):
            _check_number(name, what, given)


def _check_number(name: str, what: str, given: float | None) -> None:
    if given is not None and not given >= 0:  # NaN neither
        raise SpecError(f"{name}: {what} must be at least 0, not {given!r}")


class Backoff(Struct, frozen=True):
    """Delay before the n-th restart in a row: `min * factor**(n-1)` up to `max`, times a random share with full jitter.

    The count starts anew after the actor ran for max(period of the supervisor, 10 times its last delay).
    """

    min: float = 0.2
    max: float = 30.0
    factor: float = 2.0
    jitter: Literal["full", "none"] = "full"

    def __post_init__(self) -> None:
        _check_fields(self, "Backoff")
        if self.factor < 1 or self.max < self.min:
            raise SpecError("Backoff: factor must be at least 1 and max at least min")

    def delay(self, failures: int, share: float) -> float:
        """Seconds to wait after `failures` (>= 1) deaths in a row; `share` in [0, 1) is the jitter's draw."""
        full = min(self.max, self.min * self.factor ** min(failures - 1, 64))
        return full if self.jitter == "none" else full * share


class _Common(Struct, frozen=True, kw_only=True):
    """What task actors, process actors and supervisors have in common as children."""

    restart: Restart = "permanent"
    significant: bool = False
    depends_on: tuple[str, ...] | None = None  # None: on all earlier siblings
    backoff: Backoff = Backoff()
    give_up_on: GiveUpOn | None = None

    def _check_common(self, name: str) -> None:
        if not _NAME.fullmatch(name):
            raise SpecError(f"{name!r} is no actor name: it may hold letters, digits, '_', '.' and '-' only")
        _check_fields(self, name)
        if self.significant and self.restart == "permanent":
            raise SpecError(f"{name}: a permanent child is always restarted, so it can't be significant")
        if self.depends_on is not None:
            force_setattr(self, "depends_on", tuple(self.depends_on))


class ChildSpec(_Common, frozen=True):
    """One actor: a task in its supervisor's process, or a process of its own.

    `target` is an async function of a Context and `args`; for backend "main-thread" a plain function of a
    ThreadContext; or "package.module:function", imported where it runs. Raises SpecError.
    """

    name: str
    target: Callable[..., Any] | str
    args: Sequence[Any] = ()
    where: Literal["task", "process"] = "task"
    backend: Literal["trio", "asyncio", "main-thread"] = "trio"
    start_timeout: float = 30.0  # seconds without progress
    start_timeout_max: float = 600.0  # seconds, whatever the progress
    stop_timeout: float | None = 5.0  # for drain and cancel together; None: what is left of the parent's deadline
    drain: bool = False
    hang_timeout: float | None = None  # seconds without a beat, unless `hang_timeouts` has its phase
    hang_timeouts: Mapping[str, float] = {}
    env: Mapping[str, str] = {}  # added to this process's
    cpus: tuple[int, ...] | None = None
    nice: int | None = None
    title: str | None = None
    pass_fds: tuple[int, ...] = ()  # inheritable copies under the same numbers, as for listening sockets
    mailbox: int = 1024  # casts
    overflow: Overflow = "wait"

    def __post_init__(self) -> None:
        self._check_common(self.name)
        force_setattr(self, "args", tuple(self.args))
        for phase, limit in self.hang_timeouts.items():
            _check_number(self.name, f"hang_timeouts[{phase}]", limit)
        if self.mailbox < 1:
            raise SpecError(f"{self.name}: mailbox must hold at least 1 message")
        if isinstance(self.target, str) and not _TARGET.fullmatch(self.target):
            raise SpecError(f"{self.name}: target must be 'package.module:function', not {self.target!r}")
        if not isinstance(self.target, str) and not callable(self.target):
            raise SpecError(f"{self.name}: target must be a function or 'package.module:function'")
        if self.where == "process":
            self._check_process()
        elif self.env or self.pass_fds or self.cpus is not None or self.nice is not None or self.title is not None:
            raise SpecError(f"{self.name}: env, cpus, nice, title and pass_fds are for process actors")
        elif self.hang_timeout is not None or self.hang_timeouts:
            raise SpecError(f"{self.name}: a task actor can't be killed, so it has no hang timeout")

    def _check_process(self) -> None:
        if not isinstance(self.target, str):
            path = target_path(self.target)
            is_async = bool(self.target.__code__.co_flags & _COROUTINE)
            if is_async != (self.backend != "main-thread"):
                wanted = "a plain function" if self.backend == "main-thread" else "an async function"
                raise SpecError(f"{self.name}: backend {self.backend!r} needs {wanted} as its target")
            force_setattr(self, "target", path)
        for at, arg in enumerate(self.args):
            try:
                dump(arg)
            except Exception as exc:
                raise SpecError(f"{self.name}: argument {at} can't go to another process: {exc}") from None
        if self.cpus is not None and not self.cpus:
            raise SpecError(f"{self.name}: cpus must name at least one CPU")


def target_path(function: Callable[..., Any]) -> str:
    """`package.module:function`, or `file:/path/script.py:function` for a function of the main script."""
    module, name = function.__module__, function.__qualname__
    if "." in name or "<" in name:
        raise SpecError(f"{name!r} is not a module's own function, so another process can't import it")
    if module != "__main__":
        return f"{module}:{name}"
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return f"{spec.name}:{name}"
    file = getattr(main, "__file__", None)
    if file is None:
        raise SpecError(f"{name!r} is defined in an interactive session, so another process can't import it")
    return f"file:{Path(file).resolve()}:{name}"


class SupervisorSpec(_Common, frozen=True):
    """A supervisor as a child of another one. `stop_timeout=None` is what is left of the parent's deadline."""

    name: str
    children: Sequence[ChildSpec | SupervisorSpec] = ()
    strategy: Strategy = "one_for_one"
    intensity: int = 3  # deaths within `period` seconds that are restarted
    period: float = 60.0
    auto_shutdown: AutoShutdown = "never"
    stop_timeout: float | None = None

    def __post_init__(self) -> None:
        self._check_common(self.name)
        force_setattr(self, "children", tuple(self.children))
        check(self.children, self.auto_shutdown)


Spec: TypeAlias = ChildSpec | SupervisorSpec


def check_child(child: Spec, siblings: Sequence[Spec], auto_shutdown: AutoShutdown) -> None:
    """Whether `child` fits behind `siblings`; raises SpecError."""
    names = [sibling.name for sibling in siblings]
    if child.name in names:
        raise SpecError(f"two children are named {child.name!r}")
    if unknown := [name for name in child.depends_on or () if name not in names]:
        raise SpecError(f"{child.name}: depends_on names {', '.join(unknown)}, which is no earlier sibling")
    if child.significant and auto_shutdown == "never":
        raise SpecError(f"{child.name}: a significant child needs a supervisor with auto_shutdown")


def check(specs: Sequence[Spec], auto_shutdown: AutoShutdown = "never") -> None:
    """Validate `specs` as siblings without starting anything; raises SpecError."""
    for at, spec in enumerate(specs):
        check_child(spec, specs[:at], auto_shutdown)
