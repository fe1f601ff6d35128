"""Every actor x every moment x every fault: the cells of the matrix, and the table of those that were visited."""

from dataclasses import dataclass, field
from typing import Any

SCHEDULER = "replica0/scheduler0"
STARTS = ("starting", "loading", "warming")
# The columns: phases of the first start of all, of a start after a death, and what a server does in between.
MOMENTS = (*(f"first {name}" for name in STARTS), *STARTS, "idle", "prefill", "decode", "draining")
DEATHS = ("kill", "stop", "raise", "exit", "abort", "stuck")
FRAMES = ("garbage", "oversized")
LOADS_TOKENIZER = {"starting": "wait for the model files", "loading": "load the tokenizer", "warming": "started"}
# What an actor reports at these moments of its start.
PHASES: dict[str, dict[str, str]] = {
    "scheduler0": {"starting": "import torch", "loading": "weights", "warming": "first step"},
    "detokenizer": LOADS_TOKENIZER,
    "tokenizer": LOADS_TOKENIZER,
    "model": {"loading": "find the model", "warming": "started"},
    "metrics": {"warming": "started"},
    "frontend0": {"starting": "wait for the engine", "warming": "started"},
}
# Tasks whose work others wait for, and that are replaced if it doesn't come. A task that holds the loop holds everyone.
STUCK_TASKS = {"tokenizer": ("starting", "loading", "idle", "prefill", "decode", "draining"), "model": ("loading",)}


@dataclass(frozen=True)
class Cell:
    """``process``: of its own, or else the actor is a task of another one's."""

    actor: str
    fault: str
    moment: str
    process: bool

    @property
    def name(self) -> str:
        return self.actor.rpartition("/")[2]

    @property
    def phase(self) -> str:
        """Of a start, as the actor reports it."""
        return PHASES[self.name].get(self.moment.removeprefix("first "), "")

    @property
    def may_cut(self) -> bool:
        """A frontend that dies takes its connections along."""
        return self.name == "frontend0" and self.fault in DEATHS

    def __str__(self) -> str:
        return f"{self.fault} {self.actor} ({'process' if self.process else 'task'}) at {self.moment!r}"


def cells(actors: dict[str, dict[str, Any]], sockets: tuple[str, ...]) -> list[Cell]:
    """All that there are. ``actors``: as /ready tells them; ``sockets``: those of them that have a data socket."""
    found: list[Cell] = []
    for path, actor in actors.items():
        if path == "faults":
            continue
        process = actor["pid"] is not None
        for moment in MOMENTS:
            cell = Cell(path, "", moment, process)
            start = moment.removeprefix("first ")
            if start in STARTS and not cell.phase:
                continue
            faults = list(DEATHS) if process else ["raise"]
            if not process and start in STUCK_TASKS.get(cell.name, ()):
                faults.append("stuck")
            if path in sockets and start not in STARTS:  # nobody knows the address of one that is not up
                faults += FRAMES
            found += [Cell(path, fault, moment, process) for fault in faults]
    return found


@dataclass
class Chart:
    """What was visited, and how it went."""

    title: str
    cells: list[Cell]
    marks: dict[Cell, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """A line for each actor and fault, a column for each moment; seconds, where all was as it must be."""
        head = ["" if moment in MOMENTS[-4:] else "again" for moment in MOMENTS]
        head[: len(STARTS)] = ["first"] * len(STARTS)
        names = [moment.removeprefix("first ") for moment in MOMENTS]
        lines = [self._line(self.title, "", head), self._line("", "", names)]
        known = set(self.cells)
        rows = dict.fromkeys((cell.actor, cell.fault, cell.process) for cell in self.cells)
        for actor, fault, process in sorted(rows, key=lambda row: row[0]):
            row = [Cell(actor, fault, moment, process) for moment in MOMENTS]
            marks = [self.marks.get(cell, "not yet") if cell in known else "-" for cell in row]
            lines.append(self._line(actor + ("" if process else " (task)"), fault, marks))
        failed = sum(mark == "FAILED" for mark in self.marks.values())
        lines.append(f"{len(self.marks)} of {len(self.cells)} cells visited, {failed} failed; the log's disk was full")
        return "\n".join(lines)

    @staticmethod
    def _line(actor: str, fault: str, marks: list[str]) -> str:
        return f"{actor:<32}{fault:<10}" + "".join(f"{mark:>9}" for mark in marks)
