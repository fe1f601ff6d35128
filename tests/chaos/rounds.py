"""One fault at a moment, and what must hold when it is over."""

import contextlib
import http.client
import os
import signal
import time
from pathlib import Path
from typing import Any

from chaos.load import Answer, Load
from chaos.matrix import SCHEDULER, STARTS, Cell
from serve.servekit import Server, descendants, left_behind

PATIENCE_S = 90.0
CAUSES = {
    "kill": "killed by SIGKILL",
    "abort": "killed by SIGABRT",
    "exit": "exited with code 0",
    "raise": "Provoked: ",
    "stop": "did not start within",
    "stuck": "did not start within",
}


def provoke(server: Server, cell: Cell, **when: Any) -> None:
    """Through the debug door. A frontend may be gone before it can say that it has heard."""
    try:
        reply = server.post("/debug/fault", {"actor": cell.actor, "fault": cell.fault, **when})
    except (OSError, http.client.HTTPException):
        assert cell.may_cut
    else:
        assert reply.status == 200, reply.body


def play(load: Load, cell: Cell) -> int:
    """A cell of a server that has started. Returns how many requests were lost."""
    server = load.server
    answers: list[Answer] = []
    if cell.moment == "idle":
        provoke(server, cell)
        if cell.may_cut:
            wait_whole(server)
        answers = load.start()
    elif cell.moment in STARTS:
        provoke(server, cell, phase=cell.phase)
        answers = begin(load, 4)
        provoke(server, Cell(cell.actor, "kill" if cell.process else "raise", "decode", cell.process))
    elif cell.moment == "prefill":
        assert server.post("/flush_cache", None).status == 200  # else there is none for prompts that came before
        if cell.actor == SCHEDULER and cell.fault not in ("garbage", "oversized"):
            provoke(server, cell, step=2)
            answers = load.start()
        else:
            answers = begin(load, 1)  # the long prompt still has some chunks to go
            provoke(server, cell)
    else:
        answers = begin(load, 4)
        provoke(server, cell)
    lost = load.check(answers, may_fail=cell.may_cut)
    wait_whole(server)
    return lost


def begin(load: Load, events: int) -> list[Answer]:
    """The load, under way: its first stream has seen so many events."""
    answers = load.start()
    first = answers[0].stream
    assert first is not None
    first.wait_events(events)
    return answers


def play_drain(load: Load, cell: Cell) -> int:
    """A fault while a server, which has the load, drains: it ends within its budget, with exit code 0, and leaves
    nothing. Returns how many requests were lost.
    """
    server = load.server
    before = left_behind(set())
    answers = begin(load, 3)
    family = descendants(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    for reply in server.answers():
        if reply.json["state"] == "draining":
            break
    provoke(server, cell)
    lost = load.check(answers, may_fail=cell.may_cut)
    assert server.wait_exit() == 0
    server.wait_gone(family, 2)
    assert left_behind(family) <= before
    return lost


def play_first_start(server: Server, cell: Cell) -> None:
    """A server whose first start meets a fault (``supervision.debug_laid``): it says who, when and why, ends with exit
    code 1, and leaves nothing.
    """
    before = left_behind(set())
    family: set[int] = set()
    while server.process.poll() is None:
        family |= descendants(server.process.pid)
        time.sleep(0.02)
    assert server.process.returncode == 1, server.log
    block = server.log.partition("runtime: the start failed")[2]
    facts = {line[2:11].strip(): line[12:] for line in block.splitlines() if line[:2] == "  " and line[2:3] != " "}
    cause = facts.get("cause", "")
    assert CAUSES[cell.fault] in cause, block
    if facts.get("actor") != cell.actor:  # inside another process, whose start has failed by it
        assert f"actor {cell.actor!r} did not start" in cause, block
        facts["phase"] = cause.partition("in phase '")[2]
    assert facts.get("phase") or cell.name == "metrics", block
    # Who is gone at once takes the word of its last phase along; a stuck task goes on to where it would wait; "started"
    # is no phase of its own to the tree.
    if cell.fault == "raise" and cell.phase != "started":
        assert facts["phase"].startswith(cell.phase), block
    server.wait_gone(family, 2)
    assert left_behind(family) <= before


def wait_whole(server: Server) -> None:
    """Until the tree has its full shape, and nothing is held for anybody."""
    deadline = time.monotonic() + PATIENCE_S
    why = ""
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            ready = server.get("/ready")
            if ready.status == 200 and ready.json["state"] == "ready":
                held = {
                    "kv_pages": server.metric("runtime_kv_pages", state="used"),
                    "open": server.metric("runtime_requests_open"),
                    "running": server.metric("runtime_requests_running"),
                    "waiting": server.metric("runtime_requests_waiting"),
                }
                if not any(held.values()):
                    return
                why = f"still held: {held}"
            else:
                why = str(ready.json)
    raise AssertionError(why)


def footprint(server: Server) -> dict[str, int]:
    """What the whole tree holds: processes, threads, open files, files and memory; the root's memory by itself."""
    root = server.process.pid
    family = {root, *descendants(root)}
    total = dict.fromkeys(("threads", "fds", "sockets", "files", "root_kb", "tree_kb"), 0)
    total["processes"] = len(family)
    for pid in family:
        with contextlib.suppress(OSError):  # it ends just now
            total["threads"] += len(os.listdir(f"/proc/{pid}/task"))
            total["fds"] += len(os.listdir(f"/proc/{pid}/fd"))
            total["tree_kb"] += resident_kb(pid)
    for line in Path("/proc/net/unix").read_text().splitlines():
        total["sockets"] += "@runtime-" in line and " 00010000 " in line  # listening; of all servers on this machine
    for folder in ("/dev/shm", "/tmp"):
        total["files"] += sum(name.startswith(("runtime-", "actor-")) for name in os.listdir(folder))
    total["root_kb"] = resident_kb(root)
    return total


def resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)


def settled(server: Server) -> dict[str, int]:
    """The footprint as soon as it has not changed for a moment: connections close, threads end."""

    def counts(of: dict[str, int]) -> dict[str, int]:
        return {name: count for name, count in of.items() if not name.endswith("_kb")}

    seen = footprint(server)
    for _ in range(20):
        time.sleep(0.2)
        now = footprint(server)
        if counts(now) == counts(seen):
            return now
        seen = now
    return seen
