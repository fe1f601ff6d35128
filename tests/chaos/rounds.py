"""Rounds of chaos: a fault at a moment, drawn from a seed; and what must hold when it is over."""

import contextlib
import os
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos.load import Answer, Load
from serve.servekit import Server, descendants

SCHEDULER = "replica0/scheduler0"
STARTS = {SCHEDULER: ("import torch", "weights", "first step"), "detokenizer": ("load the tokenizer",)}
DEATHS = ("kill", "stop", "raise", "exit", "abort", "stuck")
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Round:
    """``moment``: idle, prefill, decode, or the phase of a start."""

    actor: str
    fault: str
    moment: str

    def __str__(self) -> str:
        return f"{self.fault} {self.actor} at {self.moment!r}"


def every_round(server: Server) -> list[Round]:
    """All of them that make sense for the actors of a server, as they are placed."""
    found: list[Round] = []
    for path, actor in server.actors().items():
        process = actor["pid"] is not None
        faults = DEATHS if process else ("raise", "stuck") if path.endswith("/tokenizer") else ("raise",)
        if path == "faults":
            continue
        for fault in faults:
            found += [Round(path, fault, moment) for moment in ("idle", "decode")]
            if path == SCHEDULER:
                found.append(Round(path, fault, "prefill"))
            if process:
                found += [Round(path, fault, phase) for phase in STARTS.get(path, ())]
    found += [Round(SCHEDULER, frame, "decode") for frame in ("garbage", "oversized")]
    found += [Round("detokenizer", frame, "decode") for frame in ("garbage", "oversized")]
    return found


def drawn(server: Server, seed: int, count: int) -> list[Round]:
    rounds = every_round(server)
    random.Random(seed).shuffle(rounds)
    return [rounds[at % len(rounds)] for at in range(count)]


def provoke(server: Server, actor: str, fault: str, **when: Any) -> None:
    reply = server.post("/debug/fault", {"actor": actor, "fault": fault, **when})
    assert reply.status == 200, reply.body


def play(load: Load, chosen: Round) -> int:
    """One round. Returns how many requests were lost, which only a frontend's death may cause."""
    server = load.server
    may_fail = chosen.actor.startswith("http/frontend") and not chosen.actor.endswith("tokenizer")
    answers: list[Answer] = []
    if chosen.moment == "idle":
        with contextlib.suppress(OSError) if may_fail else contextlib.nullcontext():
            provoke(server, chosen.actor, chosen.fault)
        if may_fail:
            wait_whole(server)
        answers = load.start()
    else:
        if chosen.moment == "prefill":
            provoke(server, chosen.actor, chosen.fault, step=2)
        elif chosen.moment != "decode":
            provoke(server, chosen.actor, chosen.fault, phase=chosen.moment)
        answers = load.start()
        first = answers[0].stream
        assert first is not None
        first.wait_events(4)
        if chosen.moment == "decode":
            with contextlib.suppress(OSError) if may_fail else contextlib.nullcontext():
                provoke(server, chosen.actor, chosen.fault)
        elif chosen.moment != "prefill":
            provoke(server, chosen.actor, "kill")
    lost = load.check(answers, may_fail=may_fail)
    wait_whole(server)
    return lost


def wait_whole(server: Server) -> None:
    """Until the tree has its full shape, and nothing is held for anybody."""
    deadline = time.monotonic() + PATIENCE_S
    why = ""
    while time.monotonic() < deadline:
        assert server.process.poll() is None, "the server has ended"
        with contextlib.suppress(OSError, ValueError):
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
        total["files"] += sum("runtime" in name or "actor" in name for name in os.listdir(folder))
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
