"""A front with a scripted service, in a thread of its own."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio
from scripted import ScriptedService
from wirelevel import Connection

import runtime_http
from runtime_http.front import Front


class Server:
    """A front in a thread of its own, on a port of its own."""

    def __init__(self, service: ScriptedService, options: runtime_http.Options) -> None:
        self.service = service
        self.socket = runtime_http.bind("127.0.0.1", 0)
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.app = runtime_http.create_app(service, options)
        self.front: Front = runtime_http.front_of(self.app)
        self._up = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,))
        self._thread.start()
        assert self._up.wait(10)

    async def _main(self) -> None:
        self.token = trio.lowlevel.current_trio_token()
        self._shutdown = trio.Event()
        self._budget_s: float | None = None
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.service.run)
                await nursery.start(self._serve)
                self._up.set()

    async def _serve(self, task_status: trio.TaskStatus[Any]) -> None:
        async def trigger() -> float | None:
            await self._shutdown.wait()
            return self._budget_s

        await runtime_http.serve(
            self.service, [self.socket], app=self.app, shutdown_trigger=trigger, task_status=task_status
        )
        self._scope.cancel()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run something on the server's loop."""
        return trio.from_thread.run_sync(function, *args, trio_token=self.token)

    def tasks(self) -> int:
        """Living tasks, as a condition of ``wait_until`` sees them."""

        async def count() -> int:
            return trio.lowlevel.current_statistics().tasks_living

        return trio.from_thread.run(count, trio_token=self.token)

    def begin_shutdown(self, budget_s: float | None = None) -> None:
        self._budget_s = budget_s
        self.socket.close()
        self.call(self._shutdown.set)

    def join(self, timeout_s: float = 10) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the server did not end"

    def cancel(self) -> None:
        if self._thread.is_alive():
            self.call(self._scope.cancel)
        self.join()
        self.socket.close()

    def connect(self, *, receive_buffer: int | None = None) -> Connection:
        return Connection(self.port, receive_buffer)

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 10) -> None:
        """Until a condition, looked at on the server's loop, holds."""

        async def watch() -> None:
            with trio.fail_after(timeout_s):
                while not condition():  # noqa: ASYNC110
                    await trio.sleep(0.002)

        trio.from_thread.run(watch, trio_token=self.token)


@contextmanager
def running(service: ScriptedService, **options: Any) -> Iterator[Server]:
    server = Server(service, runtime_http.Options(**({"max_body_bytes": 1 << 20} | options)))
    try:
        yield server
    finally:
        server.cancel()
