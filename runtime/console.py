"""What the terminal shows of a start: a live table, or plain lines where it is none; then the URL and the times.

Only presentation: it is fed the tree's events, and neither blocks nor raises. Once the server is ready, what happens to
its actors is logged.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

import actors

from .config import Config
from .service import ModelInfo

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

logger = logging.getLogger("runtime.tree")

_BYTES_FROM = 1_000_000  # totals from here on are bytes
_MARKS = 4  # plain lines tell each quarter of a long phase


@dataclass(slots=True)
class _Phase:
    name: str
    began: float  # seconds since the start, as all times here
    ended: float | None = None


@dataclass(slots=True)
class _Actor:
    """What is known of one actor's start."""

    began: float
    phases: list[_Phase] = field(default_factory=list)
    progress: actors.Progress = field(default_factory=actors.Progress)
    state: str = "starting"
    ended: float | None = None
    mark: int = 0  # quarters of the present phase that were told

    def enter(self, phase: str, now: float) -> None:
        self.leave(now)
        self.phases.append(_Phase(phase, now))
        self.mark = 0

    def leave(self, now: float) -> None:
        if self.phases and self.phases[-1].ended is None:
            self.phases[-1].ended = now


class Console:
    """``began`` is the time (of ``time.monotonic``) from which everything is counted."""

    def __init__(self, config: Config, began: float, stream: TextIO | None = None) -> None:
        self._config, self._began = config, began
        self._stream = stream or sys.stdout
        self._actors: dict[str, _Actor] = {}
        self._starting = True
        self._live = _open_live(self) if self._stream.isatty() else None
        self.last_words = ""  # what the actor that ended last wrote to its standard error

    # -- what the tree tells

    def event(self, event: actors.Event) -> None:
        """One fact about one actor."""
        if event.kind == "exited" and event.text:
            self.last_words = event.text
        if self._starting:
            self._show(event)
        elif event.kind in ("exited", "failed_start", "stuck") and event.next not in ("stopped", "removed"):
            logger.warning("%s", event)
        else:
            logger.debug("%s", event)

    def ready(self, url: str, tree: actors.Snapshot | None = None, model: ModelInfo | None = None) -> None:
        """The server answers at ``url``: say so, with what numbers, and where memory and time went."""
        self.close()
        self._starting = False
        numbers = f", in {model.numbers} on {model.device}" if model is not None else ""
        self._say(f"{self._config.model.name} is ready at {url} after {self._now():.1f} s{numbers}{_size_of(tree)}")
        if model is not None and model.memory_bytes:
            parts = ", ".join(f"{use} {size / 2**30:.2f}" for use, size in model.memory_bytes.items())
            self._say(f"  memory, GiB: {parts}; the KV cache holds {model.kv_tokens:,} tokens")
        # Supervisors, and actors that were up at once, have no phases to tell.
        told = {path: actor for path, actor in self._actors.items() if actor.phases}
        width = max(map(len, told), default=0)
        for path, actor in told.items():
            times = ", ".join(f"{phase.name} {(phase.ended or 0) - phase.began:.1f} s" for phase in actor.phases)
            total = (self._now() if actor.ended is None else actor.ended) - actor.began
            self._say(f"  {path:<{width}}  {total:5.1f} s  {times}".rstrip())

    def stopping(self, signal_name: str) -> None:
        """A signal has come: the first lets running requests finish, the second doesn't."""
        self.close()
        if self._starting or not self._config.supervision.drain_timeout_s:
            self._say(f"{signal_name}: stopping")
        else:
            patience = self._config.supervision.drain_timeout_s
            self._say(f"{signal_name}: finishing running requests, for at most {patience:g} s; another signal ends now")
        self._starting = False

    def close(self) -> None:
        """Leave the terminal as it was; may be called again."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    # -- how it is shown

    def _show(self, event: actors.Event) -> None:
        now = self._now()
        if event.kind in ("stopping", "supervisor_ended"):
            return
        actor = self._actors.get(event.path)
        if actor is None or event.kind == "starting":
            actor = self._actors[event.path] = _Actor(now)
        match event.kind:
            case "progress" if event.progress is not None and event.progress.phase:
                actor.progress = event.progress
                if not actor.phases or actor.phases[-1].name != event.progress.phase:
                    actor.enter(event.progress.phase, now)
                    self._tell(now, event.path, _progress(event.progress))
                elif (mark := _quarters(event.progress)) > actor.mark:
                    actor.mark = mark
                    self._tell(now, event.path, _progress(event.progress))
            case "started":
                actor.leave(now)
                actor.state, actor.ended = "started", now
                self._tell(now, event.path, f"started after {now - actor.began:.1f} s")
            case "failed_start" | "exited" | "stuck":
                actor.leave(now)
                actor.state, actor.ended = "ended", now
                if not _follows(event.reason):
                    self._tell(now, event.path, _first_line(str(event.reason or event.text)))

    def _tell(self, now: float, path: str, words: str) -> None:
        if self._live is None:
            self._say(f"{now:6.1f} s  {path}: {words}")

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more; the server goes on
            print(line, file=self._stream, flush=True)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def table(self) -> "Table":
        """The live picture: an actor a line."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._now()
        table = Table.grid(padding=(0, 1))
        for path, actor in list(self._actors.items()):  # rich calls this from a thread of its own
            if not actor.phases:
                continue
            colour = {"started": "green", "ended": "red"}.get(actor.state, "yellow")
            seconds = (now if actor.ended is None else actor.ended) - actor.began
            words = _progress(actor.progress) if actor.state == "starting" else actor.state
            bar: Any = ""
            if actor.state == "starting" and actor.progress.total and actor.progress.done is not None:
                bar = ProgressBar(total=actor.progress.total, completed=actor.progress.done, width=12)
            what = Text(words, no_wrap=True, overflow="ellipsis")
            table.add_row(Text("●", colour), Text(path), Text(f"{seconds:.1f} s", justify="right"), what, bar)
        table.add_row(
            "", Text("all", "dim"), Text(f"{now:.1f} s", justify="right"), Text(self._config.model.name, "dim")
        )
        return table


def _open_live(console: Console) -> "Live":
    from rich.console import Console as Terminal
    from rich.live import Live

    terminal = Terminal(file=console._stream)
    # The picture is gone when the start is over: what stays is said in plain lines.
    live = Live(console=terminal, get_renderable=console.table, refresh_per_second=8, transient=True)
    live.start()
    return live


def _follows(reason: actors.ExitReason | None) -> bool:
    """Whether an end is only the consequence of another one: a stop, or a supervisor that passes on a failed start."""
    match reason:
        case actors.Stopped():
            return True
        case actors.Raised(error=error):
            return error.type.endswith(".ActorStartError")
    return False


def _progress(progress: actors.Progress) -> str:
    words = progress.phase
    if progress.done is not None and progress.total:
        words += f" {100 * progress.done // progress.total} %"
        if progress.total >= _BYTES_FROM:
            words += f" ({progress.done / 1e6:.0f} of {progress.total / 1e6:.0f} MB)"
    elif progress.done is not None and progress.done >= _BYTES_FROM:
        words += f" ({progress.done / 1e6:.0f} MB)"
    return f"{words}: {progress.text}" if progress.text else words


def _quarters(progress: actors.Progress) -> int:
    return _MARKS * progress.done // progress.total if progress.done is not None and progress.total else 0


def _size_of(tree: actors.Snapshot | None) -> str:
    if tree is None:
        return ""
    kinds = [actor.kind for actor in _walk(tree)]
    return f" ({kinds.count('process')} process and {kinds.count('task')} task actors)"


def _walk(tree: actors.Snapshot) -> Iterator[actors.Snapshot]:
    yield tree
    for child in tree.children:
        yield from _walk(child)


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else ""


# ---------------------------------------------------------------------------------------------- failures


def failure_block(fault: actors.ActorError, last_words: str = "") -> str:
    """Why the server ends, in one block: which actor, in which phase, the cause, its traceback, its last lines.

    ``last_words`` is what the actor wrote to its standard error, where the error doesn't know it itself.
    """
    if isinstance(fault, actors.ActorStartError):
        head = "the start failed"
        facts = [("actor", fault.path), ("phase", _progress(fault.progress) if fault.progress.phase else fault.phase)]
        reasons: list[tuple[str, actors.ExitReason]] = [(fault.path, fault.reason)]
        last_words = "\n".join(fault.stderr_tail) or last_words
    elif isinstance(fault, actors.RestartLimitExceeded):
        head = f"supervisor {fault.path or 'root'!r} gave up: {fault.why}"
        reasons = list(fault.causes)
        facts = [("actor", reasons[-1][0])] if reasons else []
        facts += [("before", f"{path} {_first_line(str(reason))}") for path, reason in reasons[:-1]]
    else:
        return f"runtime: {fault}\n"
    lines = [f"runtime: {head}", ""]
    facts += [("cause", str(_bare(reason))) for _, reason in reasons[-1:]]
    for name, words in facts:
        if words:
            lines += _labelled(name, words)
    for title, text in (("traceback", _traceback(reasons)), ("last lines", last_words)):
        if text.strip():
            lines += ["", f"  {title}", *(f"    {line}" for line in text.rstrip().splitlines())]
    return "\n".join([*lines, ""])


def _bare(reason: actors.ExitReason) -> actors.ExitReason:
    """Without the groups that nurseries put around a single error."""
    while isinstance(reason, actors.Raised) and len(reason.error.group) == 1:
        reason = actors.Raised(reason.error.group[0])
    return reason


def _labelled(name: str, words: str) -> Iterator[str]:
    first, *rest = words.splitlines() or [""]
    yield f"  {name:<9} {first}"
    yield from (f"  {'':<9} {line}" for line in rest)


def _traceback(reasons: list[tuple[str, actors.ExitReason]]) -> str:
    match reasons:
        case [*_, (_, actors.Raised(error=error))]:
            return error.format()
        case [*_, (_, actors.Unresponsive(stacks=stacks))]:
            return stacks
    return ""
