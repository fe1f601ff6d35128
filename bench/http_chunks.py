"""CPU of the HTTP front per streamed chunk and per small request, without an engine.

    python bench/http_chunks.py [--streams 64] [--chunks 200] [--path completions|chat] [--long-way] [--json N]

A task gives every stream one token every 10 ms, as an engine's steps do; a client in a process of its own reads. CPU is
this process's own time (user and system), not wall time: marginal = between 10 % and 90 % of the tokens, gross =
everything. ``--long-way`` hides the short way to the socket, which shows what it is worth.
"""

import argparse
import json
import multiprocessing
import socket
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import trio

import runtime_http
import runtime_http.exchange
from runtime.messages import SamplingParams
from runtime.service import Delta, ModelInfo

STEP_S = 0.01


class Generation:
    prompt_tokens, cached_tokens, completion_tokens = 5, 0, 0

    def __init__(self, service: "Service", sink: Any, max_tokens: int) -> None:
        self.service, self.sink, self.max_tokens = service, sink, max_tokens

    def abort(self) -> None:
        self.service.live.discard(self)


class Service:
    """One token a step for everybody."""

    def __init__(self, streams: int) -> None:
        self.config = None
        self.info = ModelInfo("bench", 10**6, 1000, (), 0)
        self.tokenizer = SimpleNamespace(encode=self._encode, encode_chat=self._encode)
        self.live: set[Generation] = set()
        self.streams = streams
        self.marks: list[tuple[int, int]] = []  # (chunks, cpu ns)

    async def _encode(self, *_: Any) -> list[int]:
        return [1, 2, 3, 4, 5]

    def ready(self) -> bool:
        return True

    def open(self, prompt: list[int], params: SamplingParams, *, sink: Any, **_: Any) -> Generation:
        generation = Generation(self, sink, params.max_tokens)
        self.live.add(generation)
        return generation

    async def run(self) -> None:
        word, last = Delta(text=" token", tokens=(7,)), Delta(text=" token", tokens=(7,), finish="length")
        chunks = 0
        while True:
            await trio.sleep(STEP_S if self.streams else 0)
            if self.streams and len(self.live) < self.streams and not chunks:
                continue
            for generation in tuple(self.live):
                generation.completion_tokens += 1
                chunks += 1
                done = generation.completion_tokens == generation.max_tokens
                if done:
                    self.live.discard(generation)
                generation.sink.push(last if done else word)
            self.marks.append((chunks, time.process_time_ns()))


def read_streams(port: int, streams: int, chunks: int, path: str, ready: Any) -> None:
    body: dict[str, Any] = {"model": "bench", "max_tokens": chunks, "stream": True, "prompt": "Hi"}
    if path == "chat":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "Hi"}]
    data = json.dumps(body).encode()
    route = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    for sock in socks:
        sock.sendall(head.encode() + data)

    def drain(sock: socket.socket) -> None:
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            tail = (tail + sock.recv(65536))[-100:]

    threads = [threading.Thread(target=drain, args=(sock,)) for sock in socks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ready.set()


def ask_json(port: int, requests: int, ready: Any) -> None:
    data = b'{"model":"bench","prompt":"Hi","max_tokens":1}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

    def ask() -> None:
        with socket.create_connection(("127.0.0.1", port)) as sock:
            for _ in range(requests // 8):
                sock.sendall(head % len(data) + data)
                answer = b""
                while b"total_tokens" not in answer or not answer.endswith(b"}}"):
                    answer += sock.recv(65536)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ready.set()


async def main(args: argparse.Namespace) -> None:
    service = Service(0 if args.json else args.streams)
    sock = runtime_http.bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    spawn = multiprocessing.get_context("spawn")
    done = spawn.Event()
    if args.json:
        client = spawn.Process(target=ask_json, args=(port, args.json, done))
    else:
        client = spawn.Process(target=read_streams, args=(port, args.streams, args.chunks, args.path, done))
    app = runtime_http.create_app(service, runtime_http.Options())  # type: ignore[arg-type]
    front = runtime_http.front_of(app)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(service.run)

        async def served(task_status: trio.TaskStatus[Any]) -> None:
            await runtime_http.serve(service, [sock], app=app, task_status=task_status)  # type: ignore[arg-type]

        await nursery.start(served)
        client.start()
        while not front.exchanges:  # noqa: ASYNC110
            await trio.sleep(0.001)
        before = time.process_time_ns()
        await trio.to_thread.run_sync(done.wait)
        cpu = time.process_time_ns() - before
        nursery.cancel_scope.cancel()
    client.join()
    if args.json:
        print(f"json: {cpu / args.json / 1e3:.0f} us a request (fast_writes={front.stats.fast_writes})")
        return
    total = args.streams * args.chunks
    start = next(mark for mark in service.marks if mark[0] >= total * 0.1)
    end = next(mark for mark in service.marks if mark[0] >= total * 0.9)
    marginal = (end[1] - start[1]) / (end[0] - start[0]) / 1e3
    print(
        f"{args.path} streams={args.streams} chunks={args.chunks} {'long way' if args.long_way else 'short way'}:"
        f" marginal {marginal:.1f} us, gross {cpu / total / 1e3:.1f} us a chunk"
        f" (fast_writes={front.stats.fast_writes}, woken_writes={front.stats.woken_writes})"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--path", choices=["completions", "chat"], default="completions")
    parser.add_argument("--long-way", action="store_true")
    parser.add_argument("--json", type=int, default=0, metavar="N", help="instead: N small requests on 8 connections")
    arguments = parser.parse_args()
    if arguments.long_way:
        runtime_http.exchange.find_link = lambda send: None  # type: ignore[assignment]
    trio.run(main, arguments)
    sys.exit(0)
