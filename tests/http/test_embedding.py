"""The endpoints in somebody else's Quart app, on trio and on asyncio."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import hypercorn.asyncio
import hypercorn.trio
import pytest
import trio
from hypercorn.config import Config
from quart import Quart
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from scripted import ScriptedService
from sse import ask, stream

import runtime_http


class Host:
    """Somebody's app under their own hypercorn, in a thread."""

    def __init__(self, backend: str, connection_class: Any = None) -> None:
        self.backend = backend
        self.service = ScriptedService(step_s=0.001)
        app = self.app = QuartTrio("theirs") if backend == "trio" else Quart("theirs")
        if connection_class is not None:
            app.asgi_http_class = connection_class

        @app.get("/theirs")
        async def theirs() -> str:
            return "untouched"

        app.register_blueprint(runtime_http.blueprint(self.service), url_prefix="/llm")
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.config = Config()
        self.config.bind = [f"fd://{self.socket.fileno()}"]
        self.config.errorlog = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=anyio.run, args=(self._main,), kwargs={"backend": backend})
        self._thread.start()
        assert self._up.wait(10)

    async def _main(self) -> None:
        self._stop = anyio.Event()
        if self.backend == "trio":
            self._token: Any = trio.lowlevel.current_trio_token()
        else:
            self._token = asyncio.get_running_loop()
        serve: Any = hypercorn.trio.serve if self.backend == "trio" else hypercorn.asyncio.serve
        ended = anyio.Event()

        async def served() -> None:
            await serve(self.app, self.config, shutdown_trigger=self._stop.wait)
            ended.set()

        async with anyio.create_task_group() as group:
            group.start_soon(self.service.run)
            group.start_soon(served)
            self._up.set()
            await ended.wait()
            group.cancel_scope.cancel()

    def close(self) -> None:
        if self.backend == "trio":
            self._token.run_sync_soon(self._stop.set)
        else:
            self._token.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.socket.detach()  # hypercorn has closed it


@pytest.fixture(params=["trio", "asyncio"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    host = Host(request.param)
    yield host
    host.close()


def test_their_app_has_our_endpoints(host: Host) -> None:
    with httpx.Client(base_url=host.url) as http:
        assert http.get("/theirs").text == "untouched"
        assert http.get("/llm/health").status_code == 200
        body = {"model": "scripted", "prompt": "Hi", "max_tokens": 30, "temperature": 0}
        plain = ask(http, "/llm/v1/completions", body)["choices"][0]["text"]
        events = stream(http, "/llm/v1/completions", body)
        assert events.done and events.text() == plain
        refused = http.post("/llm/v1/completions", json={"model": "x"})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
        big = http.post("/llm/v1/completions", content=b"x" * (2 << 20))
        assert big.status_code == 413 and big.json()["error"]["message"]


def test_their_own_refusals_stay_theirs(host: Host) -> None:
    with httpx.Client(base_url=host.url) as http:
        response = http.get("/nothing")
        assert response.status_code == 404 and "html" in response.headers["content-type"]


@pytest.mark.parametrize("flag", [True, False], ids=["stream", "json"])
def test_a_client_that_leaves_frees_its_slot(host: Host, flag: bool) -> None:
    body = {"model": "scripted", "prompt": "Hi", "max_tokens": 8000, "ignore_eos": True, "stream": flag}
    with httpx.Client(base_url=host.url, timeout=httpx.Timeout(5, read=0.2)) as http:
        try:
            with http.stream("POST", "/llm/v1/completions", json=body) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not flag
    with httpx.Client(base_url=host.url) as http:
        for _ in range(1000):
            if "scripted_running 0" in http.get("/llm/metrics").text:
                break
        assert host.service.aborted == 1


def test_their_own_connection_class_does_not_leak() -> None:
    """quart-trio's own cancels a request while its end is being sent; the connection would stay open."""

    class Theirs(TrioASGIHTTPConnection): ...

    host = Host("trio", Theirs)
    try:
        for path in ("/llm/health", "/theirs"):
            with socket.create_connection(host.socket.getsockname(), timeout=5) as sock:
                sock.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
                while sock.recv(4096):
                    pass
    finally:
        host.close()


def test_streams_on_trio_take_the_short_way() -> None:
    host = Host("trio")
    try:
        with httpx.Client(base_url=host.url) as http:
            body = {"model": "scripted", "prompt": "Hi", "max_tokens": 100, "ignore_eos": True}
            assert stream(http, "/llm/v1/completions", body).done
            assert http.get("/llm/server_info").json()["http"]["fast_writes"] > 50
    finally:
        host.close()
