"""The state of a running tree as data, and as text."""

from __future__ import annotations

import msgspec

from ._exit import Progress


class Snapshot(msgspec.Struct, frozen=True):
    """One actor or supervisor and what is below it. Times in seconds; `mailbox` and `dropped` count casts."""

    path: str
    kind: str
    state: str
    phase: str = ""
    progress: Progress = Progress()
    generation: int = 0
    pid: int | None = None
    uptime_s: float | None = None
    restarts: int = 0
    mailbox: int = 0
    dropped: int = 0
    last_exit: str | None = None
    children: tuple[Snapshot, ...] = ()

    def find(self, path: str) -> Snapshot | None:
        """The snapshot of the actor at `path`, or None."""
        if self.path == path:
            return self
        return next((found for child in self.children if (found := child.find(path)) is not None), None)


def format_tree(snapshot: Snapshot) -> str:
    """The tree as text, one line an actor."""
    lines: list[str] = []
    _format(snapshot, "", "", lines)
    return "\n".join(lines)


def _format(snapshot: Snapshot, lead: str, below: str, lines: list[str]) -> None:
    name = snapshot.path.rpartition("/")[2] or "root"
    words = [f"{name} ({snapshot.kind})", snapshot.state]
    if snapshot.state != "running" and (snapshot.phase or snapshot.progress.phase):
        words.append(str(snapshot.progress) if snapshot.progress.phase == snapshot.phase else snapshot.phase)
    elif snapshot.phase:
        words.append(snapshot.phase)
    if snapshot.uptime_s is not None:
        words.append(f"up {snapshot.uptime_s:.1f} s")
    if snapshot.generation:
        words.append(f"generation {snapshot.generation}")
    if snapshot.pid is not None and snapshot.kind == "process":
        words.append(f"pid {snapshot.pid}")
    if snapshot.restarts:
        words.append(f"{snapshot.restarts} restarts")
    if snapshot.mailbox:
        words.append(f"{snapshot.mailbox} in its mailbox")
    if snapshot.dropped:
        words.append(f"{snapshot.dropped} dropped")
    if snapshot.last_exit is not None:
        words.append(f"last: {snapshot.last_exit.splitlines()[0][:120]}")
    lines.append(lead + "  ".join(words))
    for at, child in enumerate(snapshot.children):
        last = at == len(snapshot.children) - 1
        _format(child, below + ("└── " if last else "├── "), below + ("    " if last else "│   "), lines)
