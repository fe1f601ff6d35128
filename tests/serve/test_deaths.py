"""Kill -9 anything behind a client's connection: a pause, and then the very text that would have come anyway."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from servekit import Server, StreamReply, descendants

from runtime.names import DEFAULT_SOURCE
from runtime.sources import resolve

STORY = "Once upon a time there was a small town by the sea, and in it"
REQUESTS: list[dict[str, Any]] = [
    {"prompt": STORY, "max_tokens": 60},
    {"prompt": STORY + " lived", "max_tokens": 60, "temperature": 1.0, "seed": 5},
    {"prompt": STORY + " stood", "max_tokens": 60, "repetition_penalty": 1.3, "ignore_eos": True},
    {"prompt": "Repeat: 😀😃😄😁 😀😃😄😁 😀😃😄😁 😀😃", "max_tokens": 40, "logprobs": 2},
]


def start(server: Server) -> list[StreamReply]:
    options = {"include_usage": True}
    return [server.stream(stream_options=options, **request) for request in REQUESTS]


def outcome(stream: StreamReply) -> Any:
    """All that a client can tell from its stream, save for how the text was cut into chunks."""
    assert stream.wait_end().done and stream.whole, (stream.failure, stream.events[-1:])
    assert stream.error is None
    usage = next(event["usage"] for event in stream.events if event.get("usage"))
    logprobs = [e["choices"][0].get("logprobs") for e in stream.events if e.get("choices")]
    tokens = [t for part in logprobs if part for t in part["tokens"]]
    return stream.text, stream.finish, usage["prompt_tokens"], usage["completion_tokens"], tokens


@pytest.fixture(scope="session")
def expected(server: Server) -> list[Any]:
    return [outcome(stream) for stream in start(server)]


def kill(server: Server, path: str) -> None:
    pid = server.actors()[path]["pid"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("path", ["replica0/scheduler0", "detokenizer"])
def test_streams_survive_a_death(expected: list[Any], placement: tuple[str, ...], tmp_path: Path, path: str) -> None:
    if path == "detokenizer" and not placement:
        placement = ("supervision.placement.detokenizer=process",)
    with Server(tmp_path, settings=placement) as server:
        server.wait_ready()
        streams = start(server)
        for stream in streams:
            stream.wait_events(3)
        kill(server, path)
        late = server.stream(STORY, max_tokens=8)
        assert [outcome(stream) for stream in streams] == expected
        assert late.wait_end().finish == "length"
        assert server.metric("runtime_actor_restarts_total", actor=path) == 1
        server.wait_metric("runtime_kv_pages", 0, state="used")
        assert server.get("/ready").json["state"] == "ready"


def test_a_request_that_waits_survives_a_death_before_its_first_token(tmp_path: Path, expected: list[Any]) -> None:
    with Server(tmp_path) as server:
        server.wait_ready()
        kill(server, "replica0/scheduler0")
        streams = start(server)
        assert [outcome(stream) for stream in streams] == expected


def test_a_frontend_takes_its_own_connections_only(tmp_path: Path, expected: list[Any]) -> None:
    settings = ("supervision.placement.frontend=process", "http.frontends=2")
    with Server(tmp_path, settings=settings) as server:
        server.wait_ready()
        streams = [stream for _ in range(3) for stream in start(server)]
        for stream in streams:
            stream.wait_events(2)
        kill(server, "http/frontend0")
        ended = [stream.wait_end() for stream in streams]
        lived = [stream.whole for stream in ended]
        assert [outcome(s) for s in ended if s.whole] == [e for e, ok in zip(expected * 3, lived, strict=True) if ok]
        server.wait_metric("runtime_kv_pages", 0, state="used")
        assert server.complete(STORY, max_tokens=4)["choices"][0]["finish_reason"] == "length"


def test_a_cause_that_stays_ends_the_server_and_every_stream_hears_of_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(resolve(DEFAULT_SOURCE).folder).iterdir():
        (model / file.name).symlink_to(file)
    with Server(tmp_path, str(model)) as server:
        server.wait_ready()
        stream = server.stream(STORY, model="model", max_tokens=4000, ignore_eos=True)
        stream.wait_events(3)
        family = descendants(server.process.pid)
        (model / "model.safetensors").unlink()
        kill(server, "replica0/scheduler0")
        assert stream.wait_end().error is not None and stream.whole
        assert server.wait_exit() == 1
        server.wait_gone(family, 2)
        assert "model.safetensors" in server.log and "not to be retried" in server.log


def test_what_is_down_can_be_seen(tmp_path: Path) -> None:
    with Server(tmp_path) as server:
        server.wait_ready()
        kill(server, "replica0/scheduler0")
        down = server.wait_phase("replica0/scheduler0", lambda actor: actor["state"] != "running")
        assert down["last_exit"] == "killed by SIGKILL"
        assert any(reply.status == 503 and reply.json["state"] == "degraded" for reply in server.answers())
        assert server.complete(STORY, max_tokens=2)["choices"][0]["finish_reason"] == "length"  # it waited
        server.wait_ready()
        assert server.actors()["replica0/scheduler0"]["restarts"] == 1


def test_a_standby_takes_over(tmp_path: Path, expected: list[Any]) -> None:
    with Server(tmp_path, settings=("supervision.standby=1",)) as server:
        server.wait_ready()
        server.wait_phase("standby0/scheduler0", lambda actor: actor["state"] == "running")
        server.wait_phase("replica0/scheduler0", lambda actor: actor["state"] == "running")
        for _ in range(3):  # back and forth
            streams = start(server)
            for stream in streams:
                stream.wait_events(3)
            active = max(
                ("replica0/scheduler0", "standby0/scheduler0"),
                key=lambda path: server.metric("runtime_requests_running", source=path),
            )
            kill(server, active)
            assert [outcome(stream) for stream in streams] == expected
            server.wait_phase(active, lambda actor: actor["state"] == "running")
        server.wait_metric("runtime_kv_pages", 0, state="used")


def test_too_many_deaths_end_the_server_in_words(tmp_path: Path) -> None:
    with Server(tmp_path, settings=("supervision.intensity=0",)) as server:
        server.wait_ready()
        streams = [server.stream(STORY, max_tokens=4000, ignore_eos=True) for _ in range(2)]
        for stream in streams:
            stream.wait_events(3)
        family = descendants(server.process.pid)
        kill(server, "replica0/scheduler0")
        assert all(stream.wait_end().error is not None and stream.whole for stream in streams)
        assert server.wait_exit() == 1
        server.wait_gone(family, 2)
        assert "more than 0 deaths" in server.log and "killed by SIGKILL" in server.log
