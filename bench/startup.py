"""How long a start takes: exec to port open, to the first answer (503), to ready, to the first token; and idle CPU.

python bench/startup.py [MODEL.toml] [--runs 3] [--set section.key=value ...]
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from serve import ask

TICKS = os.sysconf("SC_CLK_TCK")


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            data = b""
            while part := connection.recv(65536):
                data += part
    except OSError:
        return 0, b""
    head, _, body = data.partition(b"\r\n\r\n")
    return (int(head.split(b" ")[1]) if head.startswith(b"HTTP") else 0), body


def tree_cpu_s(root: int) -> float:
    """CPU seconds so far of a process and its descendants."""
    stats: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            stats[int(entry.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    members, grew = {root}, True
    while grew:
        more = {pid for pid, (parent, _) in stats.items() if parent in members} - members
        members |= more
        grew = bool(more)
    return sum(stats[pid][1] for pid in members if pid in stats)


def one(arguments: list[str], idle_s: float) -> dict[str, float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    command = [sys.executable, "-m", "runtime", "serve", *arguments, "--port", str(port)]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    figures: dict[str, float] = {}

    def until(name: str, wanted: set[int], path: str) -> bytes:
        while time.perf_counter() < began + 300 and server.poll() is None:
            status, body = get(port, path)
            if status in wanted:
                figures[name] = time.perf_counter() - began
                return body
            time.sleep(0.005)
        raise SystemExit(f"the server did not get to {name!r} (exit code {server.poll()})")

    try:
        until("first answer", {200, 503}, "/ready")
        until("ready", {200}, "/ready")
        model = json.loads(get(port, "/v1/models")[1])["data"][0]["id"]
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 1, "temperature": 0, "stream": True}
        answer = asyncio.run(ask(urlsplit(f"http://127.0.0.1:{port}"), "/v1/completions", body))
        figures["first token"] = answer.chunks[0] - began
        time.sleep(1.0)
        cpu, since = tree_cpu_s(server.pid), time.perf_counter()
        time.sleep(idle_s)
        figures["idle CPU, % of a core"] = 100 * (tree_cpu_s(server.pid) - cpu) / (time.perf_counter() - since)
    finally:
        stopping = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        figures["exit code"] = server.wait(60)
        figures["stop"] = time.perf_counter() - stopping
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle", type=float, default=10.0, help="seconds over which idle CPU is taken")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    arguments = [*([args.model] if args.model else []), *(part for value in args.set for part in ("--set", value))]
    runs = [one(arguments, args.idle) for _ in range(args.runs)]
    for name in runs[0]:
        values = sorted(run[name] for run in runs)
        print(f"{name:22s} best {values[0]:.2f}  median {values[len(values) // 2]:.2f}  worst {values[-1]:.2f}")


if __name__ == "__main__":
    main()
