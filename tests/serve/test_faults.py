"""The debug door, and what the tree does about what comes through it."""

import contextlib
import http.client
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servekit import Server

SCHEDULER = "replica0/scheduler0"
STORY = "Once upon a time there was a small town by the sea, and in it"
FAULTS = ("supervision.debug_faults=true", "supervision.hang_timeout_s=2", "supervision.intensity=1000")
SAFE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server with an open door. Each test leaves it whole."""
    settings = (*FAULTS, "supervision.placement.detokenizer=process")
    with Server(tmp_path_factory.mktemp("doors"), settings=settings) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def expected(doors: Server) -> Any:
    return doors.complete(STORY, max_tokens=40)["choices"][0]["text"]


def provoke(server: Server, actor: str, fault: str, **when: Any) -> None:
    reply = server.post("/debug/fault", {"actor": actor, "fault": fault, **when})
    assert reply.status == 200, reply.body


def restarts(server: Server, actor: str) -> float:
    return server.metric("runtime_actor_restarts_total", actor=actor)


def test_the_door_is_shut_unless_asked_for(server: Server) -> None:
    assert server.post("/debug/fault", {"actor": SCHEDULER, "fault": "kill"}).status == 404


def test_it_says_what_it_does_not_know(doors: Server) -> None:
    assert b"no actor" in doors.post("/debug/fault", {"actor": "nobody", "fault": "kill"}).body
    assert b"fault" in doors.post("/debug/fault", {"actor": SCHEDULER, "fault": "tickle"}).body
    assert b"is a task" in doors.post("/debug/fault", {"actor": "metrics", "fault": "kill"}).body


@pytest.mark.parametrize("fault", ["kill", "raise", "exit", "abort", "stop", "stuck"])
def test_whatever_befalls_the_scheduler_streams_go_on(doors: Server, expected: str, fault: str) -> None:
    before = restarts(doors, SCHEDULER)
    stream = doors.stream(STORY, max_tokens=40)
    stream.wait_events(4)
    provoke(doors, SCHEDULER, fault)
    assert stream.wait_end().text == expected and stream.finish == "length"
    assert restarts(doors, SCHEDULER) == before + 1
    if fault in ("stop", "stuck"):
        assert "gave no sign of life" in doors.log
    if fault == "stuck":
        assert "faults.py" in doors.log  # the stack says where
    doors.wait_metric("runtime_kv_pages", 0, state="used")


def test_a_slow_step_is_no_hang(doors: Server, expected: str) -> None:
    before = restarts(doors, SCHEDULER)
    provoke(doors, SCHEDULER, "slow_step", factor=20)
    assert expected.startswith(doors.complete(STORY, max_tokens=4)["choices"][0]["text"])
    provoke(doors, SCHEDULER, "clear")
    assert restarts(doors, SCHEDULER) == before


@pytest.mark.parametrize("phase", ["import torch", "weights", "first step"])
def test_a_death_while_it_comes_back(doors: Server, expected: str, phase: str) -> None:
    provoke(doors, SCHEDULER, "abort", phase=phase)
    stream = doors.stream(STORY, max_tokens=40)
    stream.wait_events(4)
    provoke(doors, SCHEDULER, "kill")
    assert stream.wait_end().text == expected


@pytest.mark.parametrize("actor", ["metrics", "model", "detokenizer", "http/frontend0/tokenizer"])
def test_a_fault_of_an_actor_is_its_death(doors: Server, expected: str, actor: str) -> None:
    before = restarts(doors, actor)
    stream = doors.stream(STORY, max_tokens=40)
    stream.wait_events(4)
    provoke(doors, actor, "raise")
    assert stream.wait_end().text == expected
    doors.wait_metric("runtime_actor_restarts_total", before + 1, actor=actor)


def test_a_tokenizer_may_die_as_often_as_any(doors: Server, expected: str) -> None:
    tokenizer = "http/frontend0/tokenizer"
    generation = doors.actors()["http/frontend0"]["generation"]
    for _ in range(6):
        before = restarts(doors, tokenizer)
        provoke(doors, tokenizer, "raise")
        doors.wait_metric("runtime_actor_restarts_total", before + 1, actor=tokenizer)
        assert doors.complete(STORY, max_tokens=40)["choices"][0]["text"] == expected
    assert doors.actors()["http/frontend0"]["generation"] == generation


def test_tasks_that_come_back_leave_no_file_open_and_no_memory_taken(doors: Server) -> None:
    def open_files() -> int:
        return len(os.listdir(f"/proc/{doors.process.pid}/fd"))

    def resident_kb() -> int:
        pages = int(Path(f"/proc/{doors.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") // 1024

    def revive(times: int) -> None:
        for _ in range(times):
            with contextlib.suppress(OSError, http.client.HTTPException):  # it may be gone before it can answer
                provoke(doors, "http/frontend0", "raise")
            doors.wait_ready()

    revive(1)
    before, before_kb = open_files(), resident_kb()
    revive(5)
    assert resident_kb() < before_kb + 16_000  # a vocabulary takes 8 MB
    deadline = time.monotonic() + 10
    while open_files() > before:  # connections are closed a moment later
        assert time.monotonic() < deadline, f"{before} open files became {open_files()}"


def test_a_stuck_tokenizer_is_replaced(doors: Server, expected: str) -> None:
    provoke(doors, "http/frontend0/tokenizer", "stuck")
    streams = [doors.stream(STORY, max_tokens=40) for _ in range(5)]
    assert [stream.wait_end().text for stream in streams] == [expected] * 5
    assert "gave no answer for 2 s" in doors.log
    assert doors.actors()["http/frontend0/tokenizer"]["state"] == "running"


def test_poison_fails_alone(doors: Server, expected: str) -> None:
    poison = doors.post("/tokenize", {"prompt": " xylophone"}).json["tokens"]
    provoke(doors, SCHEDULER, "kill", prompt=poison, lives=0)
    streams = [doors.stream(STORY, max_tokens=40) for _ in range(3)]
    for stream in streams:
        stream.wait_events(2)
    guilty = doors.stream("He plays the xylophone", max_tokens=8)
    assert [stream.wait_end().text for stream in streams] == [expected] * 3
    guilty.wait_end()
    provoke(doors, SCHEDULER, "clear")
    error = guilty.error or guilty.events[-1].get("error")
    assert error is not None and "taken for the cause" in error["message"]
    doors.wait_metric("runtime_kv_pages", 0, state="used")
