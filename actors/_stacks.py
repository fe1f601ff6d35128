"""Where the tasks of an actor, or the threads of a process, are at the moment."""

from __future__ import annotations

import gc
import linecache
import sys
import threading
import traceback
from types import FrameType
from typing import Any


def task_stacks(root_id: int) -> str:
    """The await stacks of a task and of the tasks below it, on any loop."""
    import anyio  # a main-thread actor does without

    tasks = {task.id: task for task in anyio.get_running_tasks()}
    parts: list[str] = []
    for task in tasks.values():
        at: int | None = task.id
        while at is not None and at != root_id:
            at = tasks[at].parent_id if at in tasks else None
        if at == root_id:
            parts += [f"task {task.name}:", *_lines(task.coro)]
    return "\n".join(parts)


def _lines(coro: Any) -> list[str]:
    lines: list[str] = []
    while coro is not None:
        if type(coro).__name__ in ("async_generator_asend", "async_generator_athrow"):
            coro = gc.get_referents(coro)[0]  # they don't tell which generator they step
        frame = getattr(coro, "cr_frame", None) or getattr(coro, "gi_frame", None) or getattr(coro, "ag_frame", None)
        if isinstance(frame, FrameType):
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}')
            if source := linecache.getline(code.co_filename, frame.f_lineno).strip():
                lines.append("    " + source)
        coro = getattr(coro, "cr_await", None) or getattr(coro, "gi_yieldfrom", None) or getattr(coro, "ag_await", None)
    return lines


def thread_stacks() -> str:
    """The stacks of all threads of this process."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts: list[str] = []
    for ident, frame in sys._current_frames().items():
        parts += [f"thread {names.get(ident, ident)}:", "".join(traceback.format_stack(frame)).rstrip()]
    return "\n".join(parts)
