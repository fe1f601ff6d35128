"""What benches say: figures in a table or as JSON, and a bar while they run."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

Show = Callable[[str, int | None, int | None], None]


class BenchError(Exception):
    """The bench can't run as asked. The message is a sentence."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    note: str = ""


@dataclass(slots=True)
class Report:
    """The figures of each bench, and notes on how to read them."""

    title: str
    benches: dict[str, list[Figure]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def print(self) -> None:
        table = Table(title=self.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.add_column("bench")
        table.add_column("figure")
        table.add_column("value", justify="right")
        table.add_column("unit")
        table.add_column("of the limit")
        for bench, figures in self.benches.items():
            for number, figure in enumerate(figures):
                table.add_row("" if number else bench, figure.name, _short(figure.value), figure.unit, figure.note)
            table.add_section()
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def json(self) -> str:
        benches = {
            bench: {
                figure.name: {"value": figure.value, "unit": figure.unit, "note": figure.note} for figure in figures
            }
            for bench, figures in self.benches.items()
        }
        return msgspec.json.encode({"title": self.title, "benches": benches, "notes": self.notes}).decode()


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


@contextmanager
def progress(title: str) -> Iterator[Show]:
    """A bar on standard error, if that is a terminal; told (what, done, total), where None is not known."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task(title, total=None)

        def show(what: str, done: int | None, total: int | None) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done or 0, total=total or None)

        yield show
