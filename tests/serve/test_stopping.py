"""Ends: by signal, with and without patience, and by the root's own death."""

import signal
from pathlib import Path

import pytest
from servekit import Server, descendants, left_behind

STORY = "Once upon a time there was a small town by the sea, and in it"
LONG = {"max_tokens": 4000, "ignore_eos": True}


def test_sigterm_lets_running_requests_finish(fresh: Server) -> None:
    stream = fresh.stream(STORY, max_tokens=40, ignore_eos=True)
    stream.wait_events(2)
    family = descendants(fresh.process.pid)
    fresh.process.send_signal(signal.SIGTERM)
    stream.wait_end()
    assert (stream.finish, stream.done, stream.whole) == ("length", True, True)
    assert fresh.wait_exit() == 0
    fresh.wait_gone(family, 2)


def test_what_does_not_finish_in_time_gets_a_last_word(placement: tuple[str, ...], tmp_path: Path) -> None:
    settings = (*placement, "supervision.drain_timeout_s=4")
    with Server(tmp_path, settings=settings) as server:
        server.wait_ready()
        stream = server.stream(STORY, **LONG)
        stream.wait_events(2)
        server.process.send_signal(signal.SIGINT)
        stream.wait_end()
        assert stream.error is not None and "shutting down" in stream.error["message"]
        assert stream.whole, stream.failure
        assert server.wait_exit() == 0


def test_new_requests_are_refused_while_it_drains(fresh: Server) -> None:
    stream = fresh.stream(STORY, **LONG)
    stream.wait_events(2)
    fresh.process.send_signal(signal.SIGTERM)
    for reply in fresh.answers():
        if reply.json["state"] == "draining":
            break
    refused = fresh.post("/v1/completions", {"prompt": "x"})
    assert refused.status == 503 and "retry-after" in refused.headers
    stream.hang_up()
    assert fresh.wait_exit() == 0


def test_a_second_signal_ends_now(fresh: Server) -> None:
    stream = fresh.stream(STORY, **LONG)
    stream.wait_events(2)
    family = descendants(fresh.process.pid)
    fresh.process.send_signal(signal.SIGINT)
    for reply in fresh.answers():
        if reply.json["state"] == "draining":
            break
    fresh.process.send_signal(signal.SIGINT)
    assert fresh.wait_exit(5) == 128 + signal.SIGINT
    fresh.wait_gone(family, 2)


@pytest.mark.parametrize("moment", ["idle", "streaming", "draining"])
def test_kill_9_of_the_root_leaves_nothing(fresh: Server, moment: str) -> None:
    before = left_behind(set())
    stream = fresh.stream(STORY, **LONG)
    stream.wait_events(2)
    if moment == "idle":
        stream.hang_up()
        fresh.wait_metric("runtime_kv_pages", 0, state="used")
    if moment == "draining":
        fresh.process.send_signal(signal.SIGTERM)
        for reply in fresh.answers():
            if reply.json["state"] == "draining":
                break
    family = descendants(fresh.process.pid)
    assert family
    fresh.process.kill()
    fresh.wait_exit()
    fresh.wait_gone(family, 2)
    assert left_behind(family) <= before
