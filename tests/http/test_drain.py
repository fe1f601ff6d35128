"""Stopping: what runs is finished, what cannot be is told so, nothing holds the server."""

import json
import socket
from collections.abc import Callable

import h2.connection
import h2.settings
import pytest
from frontkit import Server
from scripted import ScriptedService
from wirelevel import request

Start = Callable[..., Server]
STREAM = {"model": "scripted", "prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
LARGE = STREAM | {"prompt": "x" * 400_000, "echo": True}  # more than the kernel takes for a client that does not read
ENDLESS = STREAM | {"max_tokens": 8000}


def test_streams_are_finished_and_idle_connections_closed(start: Start) -> None:
    server = start(ScriptedService(step_s=0.002))
    with server.connect() as idle, server.connect() as busy:
        assert idle.ask("/health").status == 200
        first = busy.begin("/v1/completions", STREAM)
        server.begin_shutdown(30)
        assert idle.eof()
        rest = first
        while chunk := busy.chunk():
            rest += chunk
        assert chunk == b"" and rest.endswith(b"data: [DONE]\n\n")
        assert busy.eof()
    server.join()  # long before the budget is spent
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))


def test_unstreamed_answers_are_finished(start: Start) -> None:
    server = start(ScriptedService(step_s=0.002))
    with server.connect() as busy:
        busy.send(request("/v1/completions", STREAM | {"stream": False}))
        server.wait_until(lambda: len(server.service.live) == 1)
        server.begin_shutdown(30)
        answer = busy.answer()
        assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 200
        assert busy.eof()
    server.join()


def test_what_cannot_be_finished_gets_an_error(start: Start) -> None:
    server = start(ScriptedService(step_s=0.005))
    with server.connect() as stream, server.connect() as plain, server.connect() as waiting:
        first = stream.begin("/v1/completions", ENDLESS)
        plain.send(request("/v1/completions", ENDLESS | {"stream": False}))
        waiting.send(request("/v1/completions", STREAM | {"prompt": "[[hang]]"}))
        server.wait_until(lambda: len(server.service.live) == 3)
        server.begin_shutdown(0.05)
        rest = first
        while chunk := stream.chunk():
            rest += chunk
        assert chunk == b""
        assert b'"code":"shutting_down"' in rest and b"[DONE]" not in rest and b'"finish_reason":"' not in rest
        for sock in (plain, waiting):
            answer = sock.answer()
            assert answer.status == 503 and answer.json["error"]["code"] == "shutting_down"
            assert sock.eof()
    server.join()
    assert not server.service.live


def test_new_requests_on_a_busy_connection_are_refused(start: Start) -> None:
    server = start(ScriptedService(step_s=0.002))
    with server.connect() as sock, server.connect() as other:
        other.begin("/v1/completions", STREAM)
        server.call(server.front.begin_drain)
        answer = sock.ask("/v1/completions", STREAM)
        assert answer.status == 503 and "retry-after" in answer.headers
        ready = sock.ask("/ready")
        assert ready.status == 503 and ready.json["state"] == "draining"
        assert sock.ask("/health").status == 200


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_does_not_read_does_not_hold_the_server(start: Start, version: str) -> None:
    """HTTP/1.0 goes through hypercorn's own send, which is shielded."""
    server = start(ScriptedService(context_tokens=10**6))
    with server.connect(receive_buffer=4096) as sock:
        sock.send(request("/v1/completions", LARGE, version=version))
        server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
        server.begin_shutdown(0.05)
        server.join()


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_cancelling_the_server_ends_it_whatever_its_clients_do(start: Start, version: str) -> None:
    server = start(ScriptedService(context_tokens=10**6))
    with server.connect(receive_buffer=4096) as sock, server.connect():
        sock.send(request("/v1/completions", LARGE, version=version))
        server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
        server.cancel()


def test_an_http_2_client_that_does_not_read_does_not_hold_it_either(start: Start) -> None:
    server = start(ScriptedService(context_tokens=10**6))
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
    client.increment_flow_control_window(2**30)
    data = json.dumps(LARGE).encode()
    headers = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
    client.send_headers(1, headers)
    with server.connect(receive_buffer=4096) as sock:
        sock.send(client.data_to_send())
        client.receive_data(sock.sock.recv(65536))  # its windows
        while data:
            part = data[: min(client.local_flow_control_window(1), client.max_outbound_frame_size)]
            if part:
                client.send_data(1, part, end_stream=len(part) == len(data))
                data = data[len(part) :]
                sock.send(client.data_to_send())
            else:
                client.receive_data(sock.sock.recv(65536))
        server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
        server.cancel()


def test_the_sockets_stay_the_callers(start: Start) -> None:
    server = start()
    listening = server.socket.dup()
    server.begin_shutdown(0)
    server.join()
    with listening, socket.create_connection(listening.getsockname()):
        listening.settimeout(5)
        accepted, _ = listening.accept()
        accepted.close()
