"""The terminal's picture of a start, and the block that explains a failed one."""

import io
import logging
import time
from collections.abc import Iterator

import pytest

import actors
from actors import Event, Progress, Raised, RemoteErrorData, Signalled, Snapshot
from runtime.config import load_config
from runtime.console import Console, failure_block
from runtime.service import ModelInfo

ERROR = RemoteErrorData("runtime.models.config.ModelError", "x is cut off", traceback="Traceback:\n  File loader.py")


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def start_of(path: str = "replica0/scheduler0") -> Iterator[Event]:
    yield Event("starting", path, 1)
    yield Event("progress", path, 1, 42, progress=Progress("import torch"))
    for done in range(0, 269_000_001, 26_900_000):
        yield Event("progress", path, 1, 42, progress=Progress("weights", done, 269_000_000))
    yield Event("started", path, 1, 42)


def test_plain_lines_tell_phases_and_quarters_then_the_url_and_the_times() -> None:
    stream = io.StringIO()
    console = Console(load_config(), time.monotonic(), stream)
    for event in start_of():
        console.event(event)
    tree = Snapshot("", "supervisor", "running", children=(Snapshot("a", "task", "up"), Snapshot("b", "process", "up")))
    memory = {"weights": 3 << 28, "kv": 1 << 30}
    model = ModelInfo("m", 1, 1, (), 0, 0, "bfloat16", "int8", "cpu", 65536, memory)
    console.ready("http://127.0.0.1:8000", tree, model)
    console.close()
    lines = stream.getvalue().splitlines()
    told = [line.partition("s  ")[2] for line in lines[:7]]
    assert told == [
        "replica0/scheduler0: import torch",
        "replica0/scheduler0: weights 0 % (0 of 269 MB)",
        "replica0/scheduler0: weights 30 % (81 of 269 MB)",
        "replica0/scheduler0: weights 50 % (134 of 269 MB)",
        "replica0/scheduler0: weights 80 % (215 of 269 MB)",
        "replica0/scheduler0: weights 100 % (269 of 269 MB)",
        "replica0/scheduler0: started after 0.0 s",
    ]
    assert lines[7].startswith("SmolLM2-135M-Instruct is ready at http://127.0.0.1:8000 after 0.0 s")
    assert lines[7].endswith(" s, in bfloat16, int8 weights on cpu (1 process and 1 task actors)")
    assert lines[8] == "  memory, GiB: weights 0.75, kv 1.00; the KV cache holds 65,536 tokens"
    assert lines[9].split() == [
        "replica0/scheduler0",
        "0.0",
        "s",
        "import",
        "torch",
        "0.0",
        "s,",
        "weights",
        "0.0",
        "s",
    ]
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_live_picture() -> None:
    screen = Screen()
    console = Console(load_config(), time.monotonic(), screen)
    *before, last = start_of()
    for event in before:
        console.event(event)
    console.close()
    assert "\x1b[" in screen.getvalue()
    assert "replica0/scheduler0" in screen.getvalue()
    assert "weights 100 % (269 of 269 MB)" in screen.getvalue()
    console.event(last)
    console.ready("http://[::1]:80")
    assert screen.getvalue().splitlines()[-2].startswith("SmolLM2-135M-Instruct is ready at http://[::1]:80")


def test_what_only_follows_from_a_failure_is_not_told() -> None:
    stream = io.StringIO()
    console = Console(load_config(), time.monotonic(), stream)
    passed_on = Raised(RemoteErrorData("actors._errors.ActorStartError", "actor 'a/b' did not start"))
    console.event(Event("failed_start", "a/b", 1, 42, Raised(ERROR)))
    console.event(Event("exited", "a", reason=passed_on))
    console.event(Event("exited", "c", 1, 43, actors.Stopped("root")))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("a/b: raised runtime.models.config.ModelError: x is cut off")


def test_deaths_after_the_start_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    console = Console(load_config(), time.monotonic(), stream)
    console.ready("http://x")
    shown = stream.getvalue()
    with caplog.at_level(logging.INFO, "runtime.tree"):
        console.event(Event("exited", "detokenizer", 1, 42, Signalled(9), next="restart", count=1, intensity=3))
        console.event(Event("exited", "metrics", 1, None, actors.Stopped("root"), next="stopped"))
    (record,) = caplog.records
    assert (record.levelname, "SIGKILL" in record.getMessage()) == ("WARNING", True)
    assert stream.getvalue() == shown


def test_signals_are_answered() -> None:
    stream = io.StringIO()
    console = Console(load_config(), time.monotonic(), stream)
    console.ready("http://x")
    console.stopping("SIGTERM")
    console.stopping("SIGINT")
    assert "SIGTERM: finishing running requests, for at most 30 s; another signal ends now" in stream.getvalue()


def test_a_reader_that_went_away_is_no_fault() -> None:
    stream = io.StringIO()
    console = Console(load_config(), time.monotonic(), stream)
    stream.close()
    for event in start_of():
        console.event(event)
    console.ready("http://x")


def test_a_failed_start_is_one_block() -> None:
    progress = Progress("weights", 100, 400)
    fault = actors.ActorStartError("replica0/scheduler0", Raised(ERROR), "weights", progress, ("warming up", "oh no"))
    assert failure_block(fault).splitlines() == [
        "runtime: the start failed",
        "",
        "  actor     replica0/scheduler0",
        "  phase     weights 25 %",
        "  cause     raised runtime.models.config.ModelError: x is cut off",
        "",
        "  traceback",
        "    Traceback:",
        "      File loader.py",
        "    runtime.models.config.ModelError: x is cut off",
        "",
        "  last lines",
        "    warming up",
        "    oh no",
    ]


def test_a_supervisor_that_gave_up_is_one_block() -> None:
    causes = (("scheduler0", Signalled(9)), ("scheduler0", Signalled(11, core=True)))
    fault = actors.RestartLimitExceeded("replica0", causes, "2 deaths within 60 s")
    assert failure_block(fault, "last\nwords").splitlines() == [
        "runtime: supervisor 'replica0' gave up: 2 deaths within 60 s",
        "",
        "  actor     scheduler0",
        "  before    scheduler0 killed by SIGKILL",
        "  cause     killed by SIGSEGV (core dumped)",
        "",
        "  last lines",
        "    last",
        "    words",
    ]
    hung = actors.RestartLimitExceeded("", (("x", actors.Unresponsive(60.0, "step", "Thread 1:\n  poll")),), "hung")
    assert "Thread 1:" in failure_block(hung)


def test_one_error_in_groups_is_the_cause_itself() -> None:
    group = RemoteErrorData("builtins.ExceptionGroup", "from a nursery", group=(ERROR,))
    group = RemoteErrorData("builtins.ExceptionGroup", "from another", group=(group,))
    lines = failure_block(actors.ActorStartError("http/frontend0", Raised(group), "start", Progress())).splitlines()
    assert "  cause     raised runtime.models.config.ModelError: x is cut off" in lines
    assert any("from another" in line for line in lines)  # where it passed is in the traceback
