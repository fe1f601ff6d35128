"""What happens on the connection: its life, its framing, its end."""

import json
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import trio
from frontkit import Server
from scripted import ScriptedService
from wirelevel import Answer, request

from runtime_http.serve import KEEPALIVE_S, watch_clients

Start = Callable[..., Server]
COMPLETION = {"model": "scripted", "prompt": "Hi", "max_tokens": 30, "temperature": 0}
STREAM = COMPLETION | {"stream": True}
LARGE = STREAM | {"prompt": "x" * 400_000, "echo": True}  # more than the kernel takes for a client that does not read
ENDLESS = STREAM | {"max_tokens": 8000, "ignore_eos": True}


def test_connection_close_closes_after_json_and_after_a_stream(start: Start) -> None:
    server = start()
    for body in (COMPLETION, STREAM):
        with server.connect() as sock:
            sock.send(request("/v1/completions", body, headers={"Connection": "close"}))
            answer = sock.answer()
            assert answer.status == 200 and answer.whole
            assert sock.eof()


def test_idle_connections_close_after_json_and_after_a_stream(start: Start) -> None:
    server = start(keep_alive_s=0.1)
    for body in (COMPLETION, STREAM):
        with server.connect() as sock:
            sock.send(request("/v1/completions", body))
            assert sock.answer().whole
            assert sock.eof()


@pytest.mark.parametrize("reset", [False, True])
def test_a_client_that_leaves_an_idle_connection_leaves_no_file_open(start: Start, reset: bool) -> None:
    server = start()
    with server.connect() as sock:
        sock.send(request("/health"))
        assert sock.answer().status == 200
    before = len(os.listdir("/proc/self/fd"))
    for body in [None, STREAM] * 10:
        with server.connect() as sock:
            sock.send(request("/v1/completions" if body else "/health", body))
            assert sock.answer().status == 200
            if reset:
                sock.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_connection_is_used_again(start: Start) -> None:
    server = start()
    with server.connect() as sock:
        texts = set()
        for _ in range(3):
            sock.send(request("/v1/completions", STREAM))
            texts.add(sock.answer().text)
            sock.send(request("/v1/completions", COMPLETION))
            texts.add(sock.answer().json["choices"][0]["text"])
        assert len(texts) == 1


def test_a_head_that_never_ends_is_not_waited_for(start: Start) -> None:
    server = start(keep_alive_s=0.1)
    with server.connect() as sock:
        sock.send(b"POST /v1/completions HTTP/1.1\r\nHost: te")
        assert sock.eof()


def test_a_body_that_never_comes_is_not_waited_for(start: Start) -> None:
    server = start(body_idle_s=0.1, linger_s=0.1)
    with server.connect() as sock:
        sock.send(request("/v1/completions", COMPLETION)[:-5])
        answer = sock.answer()
        assert answer.status == 408 and answer.json["error"]["code"] == "request_timeout"
        assert sock.eof()


def test_pipelined_requests_are_answered_in_order(start: Start) -> None:
    server = start()
    with server.connect() as sock:
        sock.send(request("/v1/completions", STREAM) + request("/v1/models") + request("/v1/completions", COMPLETION))
        first, second, third = sock.answer(), sock.answer(), sock.answer()
        assert first.events[-1] == "[DONE]"
        assert second.json["object"] == "list"
        assert third.json["choices"][0]["text"] == first.text


@pytest.mark.parametrize("body", [COMPLETION, STREAM], ids=["json", "stream"])
def test_http_1_0_gets_no_chunks_and_a_close(start: Start, body: dict[str, object]) -> None:
    server = start()
    with server.connect() as sock:
        sock.send(request("/v1/completions", body, version="1.0"))
        answer = sock.answer()
        assert answer.status == 200
        assert "transfer-encoding" not in answer.headers
        if body is STREAM:
            assert answer.events[-1] == "[DONE]" and answer.text
        else:
            assert answer.json["choices"][0]["text"]


def test_chunked_request_bodies(start: Start) -> None:
    server = start()
    data = json.dumps(COMPLETION).encode()
    parts = [data[i : i + 7] for i in range(0, len(data), 7)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with server.connect() as sock:
        sock.send(head + body)
        assert sock.answer().status == 200


def test_expect_100_continue(start: Start) -> None:
    server = start()
    whole = request("/v1/completions", COMPLETION, headers={"Expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    with server.connect() as sock:
        sock.send(head + b"\r\n\r\n")
        assert sock.head()[0] == 100
        sock.send(body)
        assert sock.answer().status == 200


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_a_body_too_large_is_refused_and_the_refusal_arrives(start: Start, chunked: bool) -> None:
    server = start(max_body_bytes=100_000)
    data = b'{"prompt": "' + b"x" * 8_000_000 + b'"}'
    with server.connect() as sock:
        if chunked:
            head = "Transfer-Encoding: chunked"
            data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        else:
            head = f"Content-Length: {len(data)}"
        sock.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + data)
        answer = sock.answer()
        assert answer.status == 413
        assert answer.json["error"]["code"] == "request_too_large"
        sock.send(request("/v1/models"))  # and the connection lives on
        assert sock.answer().status == 200


def test_rubbish_instead_of_http_is_refused(start: Start) -> None:
    server = start()
    with server.connect() as sock:
        sock.send(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert sock.head()[0] == 400
        assert sock.eof()
    with server.connect() as sock:
        sock.send(request("/health"))
        assert sock.answer().status == 200


def test_rubbish_during_a_stream_harms_nobody_else(start: Start) -> None:
    server = start(ScriptedService(step_s=0.001))
    with server.connect() as sock, server.connect() as other:
        other.send(request("/v1/completions", STREAM | {"max_tokens": 100}))
        sock.send(request("/v1/completions", ENDLESS))
        assert sock.head()[0] == 200 and sock.chunk()
        sock.send(b"\x00\xff rubbish \r\n\r\n" * 10)
        assert other.answer().events[-1] == "[DONE]"
    server.wait_until(lambda: not server.front.exchanges)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_with_nothing_to_say_says_so(start: Start, version: str) -> None:
    server = start(ping_s=0.05)
    with server.connect() as sock:
        sock.send(request("/v1/completions", STREAM | {"prompt": "[[hang]]"}, version=version))
        assert sock.head()[0] == 200
        pings = b""
        while pings.count(b": nothing new\n\n") < 3:
            pings += sock.file.readline()
        if version == "1.1":
            assert sock.file.readline() == b"\r\n"
        server.call(server.service.release)
        rest = sock.file.read() if version == "1.0" else b"".join(iter(sock.chunk, b""))
        text = joined(rest[rest.index(b"data: ") :].replace(b": nothing new\n\n", b""))
        assert text and rest.endswith(b"data: [DONE]\n\n")


def test_head_requests_have_no_body(start: Start) -> None:
    server = start()
    with server.connect() as sock:
        sock.send(request("/health").replace(b"GET", b"HEAD"))
        status, headers = sock.head()
        assert status == 200 and int(headers["content-length"]) > 0
        assert sock.ask("/health").status == 200


def test_http_2_takes_the_long_way(start: Start) -> None:
    server = start()
    with httpx.Client(base_url=server.url, http1=False, http2=True) as http:
        response = http.post("/v1/completions", json=STREAM)
        assert response.http_version == "HTTP/2" and response.text.endswith("data: [DONE]\n\n")
        plain = http.post("/v1/completions", json=COMPLETION).json()
    assert joined(response.content) == plain["choices"][0]["text"]
    assert server.front.stats.fast_writes == 0 < server.front.stats.woken_writes


def test_clients_that_vanish_are_looked_for() -> None:
    """Of a peer that says nothing any more, not even goodbye, only the kernel's probes tell."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watch_clients(listener, stall_s=90)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == KEEPALIVE_S
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 90_000


def test_websockets_are_refused(start: Start) -> None:
    server = start()
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    with server.connect() as sock:
        sock.send(request("/v1/completions", headers=headers | {"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}))
        assert sock.head()[0] in (400, 403, 404, 405)
    with server.connect() as sock:
        assert sock.ask("/health").status == 200


def joined(body: bytes) -> str:
    return Answer(200, {}, body, whole=True).text


class TestDisconnect:
    """A client that leaves frees what it held."""

    @pytest.mark.parametrize("chunks", [0, 1, 3])
    def test_in_a_stream(self, start: Start, chunks: int) -> None:
        server = start(ScriptedService(step_s=0.001))
        with server.connect() as sock:
            sock.send(request("/v1/completions", ENDLESS))
            for _ in range(chunks):
                if _ == 0:
                    sock.head()
                assert sock.chunk()
            server.wait_until(lambda: len(server.service.live) == 1)
            sock.close()
        server.wait_until(lambda: not server.service.live)
        server.wait_until(lambda: not server.front.exchanges)
        assert server.service.aborted == 1
        assert server.front.stats.disconnects == 1

    def test_while_an_unstreamed_answer_is_made(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        with server.connect() as sock:
            sock.send(request("/v1/completions", ENDLESS | {"stream": False, "n": 3}))
            server.wait_until(lambda: len(server.service.live) == 3)
        server.wait_until(lambda: not server.service.live)
        assert server.service.aborted == 3

    def test_before_the_first_token(self, start: Start) -> None:
        server = start()
        with server.connect() as sock:
            sock.send(request("/v1/completions", STREAM | {"prompt": "[[hang]]"}))
            server.wait_until(lambda: len(server.service.live) == 1)
        server.wait_until(lambda: not server.service.live)

    def test_by_a_reset(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        sock = server.connect()
        sock.send(request("/v1/completions", ENDLESS))
        assert sock.head()[0] == 200 and sock.chunk()
        sock.reset()
        server.wait_until(lambda: not server.service.live and not server.front.exchanges)

    def test_with_another_request_in_the_pipe(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        idle_tasks = server.tasks()
        with server.connect() as sock:
            sock.send(request("/v1/completions", ENDLESS) + request("/v1/models"))
            assert sock.head()[0] == 200 and sock.chunk()
            sock.close()
        server.wait_until(lambda: not server.service.live and not server.front.exchanges)
        server.wait_until(lambda: trio.lowlevel.current_statistics().tasks_living == idle_tasks)

    def test_of_many_leaves_the_others_whole(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        socks = [server.connect() for _ in range(16)]
        for sock in socks:
            sock.send(request("/v1/completions", STREAM | {"max_tokens": 200, "ignore_eos": True}))
        for sock in socks[::2]:
            sock.close()
        texts = {sock.answer().text for sock in socks[1::2]}
        for sock in socks:
            sock.close()
        assert len(texts) == 1
        server.wait_until(lambda: not server.service.live and not server.front.jobs)


class TestSlowReaders:
    """A client that does not read costs bounded memory, and nobody else anything."""

    def test_one_that_never_reads_is_given_up(self, start: Start) -> None:
        server = start(ScriptedService(context_tokens=10**9), max_behind_bytes=10_000)
        with server.connect(receive_buffer=4096) as sock, server.connect() as other:
            sock.send(request("/v1/completions", ENDLESS | {"max_tokens": 10**8, "prompt": "[[burst:50]]"}))
            server.wait_until(lambda: server.front.stats.slow_readers == 1)
            server.wait_until(lambda: not server.service.live and not server.front.exchanges)
            other.send(request("/v1/completions", STREAM))
            assert other.answer().events[-1] == "[DONE]"
            sock.head()
            try:
                while chunk := sock.chunk():
                    pass
            except ConnectionResetError:
                chunk = None
            assert chunk is None

    def test_one_that_stalls_gets_everything_in_order_later(self, start: Start) -> None:
        server = start(ScriptedService(context_tokens=10**6), max_behind_bytes=10**7)
        body = STREAM | {"max_tokens": 20_000, "ignore_eos": True, "prompt": "[[burst:5]]"}
        with server.connect(receive_buffer=4096) as sock, server.connect() as other:
            sock.send(request("/v1/completions", body))
            server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)  # generated, not delivered
            other.send(request("/v1/completions", body))
            quick = other.answer()
            slow = sock.answer()
        assert slow.whole and slow.events[-1] == "[DONE]"
        assert slow.text == quick.text
        assert len(slow.events) < len(quick.events)  # merged while it was behind

    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    @pytest.mark.parametrize("body", [LARGE, LARGE | {"stream": False}], ids=["stream", "json"])
    def test_one_that_takes_nothing_for_too_long_is_dropped(
        self, start: Start, version: str, body: dict[str, Any]
    ) -> None:
        server = start(ScriptedService(context_tokens=10**6), send_stall_s=0.05)
        with server.connect(receive_buffer=4096) as sock:
            sock.send(request("/v1/completions", body, version=version))
            server.wait_until(lambda: bool(server.front.stats.requests))
            server.wait_until(lambda: not server.front.exchanges)
            with pytest.raises(ConnectionResetError):
                sock.answer()

    def test_a_failed_choice_ends_the_others_even_if_nobody_reads(self, start: Start) -> None:
        server = start(ScriptedService(context_tokens=10**6))
        with server.connect(receive_buffer=4096) as sock:
            sock.send(request("/v1/completions", LARGE | {"prompt": ["x" * 400_000, "[[hang]]", "[[fail:20]]"]}))
            server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
            assert server.front.exchanges and server.service.aborted == 2

    def test_one_that_stalls_and_leaves_frees_everything(self, start: Start) -> None:
        server = start(ScriptedService(context_tokens=10**6))
        with server.connect(receive_buffer=4096) as sock:
            sock.send(request("/v1/completions", LARGE))
            server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
        server.wait_until(lambda: not server.front.exchanges)

    def test_the_kernel_holds_little_for_a_client_that_does_not_read(self, start: Start) -> None:
        server = start(ScriptedService(context_tokens=10**6), max_behind_bytes=10**7)
        body = STREAM | {"max_tokens": 20_000, "ignore_eos": True}
        with server.connect(receive_buffer=4096) as sock:
            sock.send(request("/v1/completions", body))
            server.wait_until(lambda: bool(server.front.jobs) and not server.service.live)
            job = next(iter(server.front.jobs))
            assert job._behind_bytes > 5_000


class TestFastPath:
    def test_nothing_is_written_while_the_server_sends(self, start: Start) -> None:
        server = start(ScriptedService(step_s=0.001))
        with server.connect() as sock:
            text = sock.begin("/v1/completions", STREAM | {"max_tokens": 300, "ignore_eos": True})

            async def hold_the_send_lock() -> int:
                (exchange,) = server.front.exchanges
                (generation,) = server.service.live
                assert exchange.link is not None
                async with exchange.link.server.send_lock:
                    written, generated = server.front.stats.fast_writes, generation.completion_tokens
                    while generation.completion_tokens < generated + 20:
                        await trio.lowlevel.checkpoint()
                    return server.front.stats.fast_writes - written

            assert trio.from_thread.run(hold_the_send_lock, trio_token=server.token) == 0
            while chunk := sock.chunk():
                text += chunk
            assert chunk == b""
            with server.connect() as other:
                assert other.ask("/v1/completions", STREAM | {"max_tokens": 300, "ignore_eos": True}).text == joined(
                    text
                )

    def test_streams_are_written_by_the_task_that_reads_the_engine(self, start: Start) -> None:
        server = start()
        socks = [server.connect() for _ in range(4)]
        for sock in socks:
            sock.send(request("/v1/completions", STREAM | {"max_tokens": 100, "ignore_eos": True}))
        answers = [sock.answer() for sock in socks]
        for sock in socks:
            sock.close()
        events = sum(len(answer.events) for answer in answers)
        assert server.front.stats.fast_writes > 0.8 * (events - 2 * len(socks))

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
    def test_the_other_dialects_too(self, start: Start, path: str) -> None:
        server = start()
        chat = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}
        native = {"text": "Hi", "sampling_params": {"max_new_tokens": 50, "ignore_eos": True}, "stream": True}
        with server.connect() as sock:
            sock.send(request(path, native if path == "/generate" else chat))
            assert sock.answer().events[-1] == "[DONE]"
        assert server.front.stats.fast_writes > 20
