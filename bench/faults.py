"""What faults cost: kill to notice, kill to the next token, requests lost, errors of failed starts, ends, leftovers.

python bench/faults.py [SCENARIO ...] [--runs 5] [--streams 8] [--set section.key=value ...]

A real server on this machine and clients on sockets, as in tests/serve. Prints a line a scenario; times in seconds.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serve")]

from servekit import ENV, Server, StreamReply, alive, descendants  # noqa: E402

from runtime.names import DEFAULT_SOURCE  # noqa: E402
from runtime.sources import resolve  # noqa: E402

SCHEDULER = "replica0/scheduler0"
STORY = "Once upon a time there was a small town by the sea, and in it"
now = time.monotonic


class Watched:
    """A stream that knows when each of its events came."""

    def __init__(self, server: Server, **body: Any) -> None:
        self.reply: StreamReply = server.stream(STORY, **body)
        self.times: list[float] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        seen = 0
        while not self.reply._ended:
            self.reply.wait_events(seen + 1)
            while seen < len(self.reply.events):
                self.times.append(now())
                seen += 1

    def after(self, moment: float) -> float:
        """From ``moment`` to the next token; those that were on their way already don't count."""
        later = [at for at in self.times if at > moment + 0.05]
        return later[0] - moment if later else float("nan")


def words(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"p50 {statistics.median(ordered):.3f}, p99 {p99:.3f} (n = {len(ordered)})"


def say(name: str, *facts: str) -> None:
    print(f"{name:<28} " + " | ".join(facts), flush=True)


@contextlib.contextmanager
def serving(options: argparse.Namespace, *settings: str, model: str = "") -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (model,) if model else ()
        with Server(Path(folder), *arguments, settings=(*options.set, *settings)) as server:
            yield server


def all_up(server: Server) -> None:
    for reply in server.answers():
        if reply.status == 200 and reply.json["state"] == "ready":
            return


def notice(server: Server, path: str, generation: int, into: list[float]) -> None:
    """When the tree knew that this life of an actor is over, as /ready tells it."""
    for reply in server.answers():
        actor = next(actor for actor in reply.json["actors"] if actor["path"] == path)
        if actor["generation"] != generation or actor["state"] not in ("running", "stopping"):
            into.append(now())
            return


def deaths(
    options: argparse.Namespace, name: str, path: str, number: signal.Signals, *settings: str, active: bool = False
) -> None:
    """``active``: the scheduler that serves at the moment, wherever it is."""
    noticed: list[float] = []
    resumed: list[float] = []
    lost = total = 0
    with serving(options, *settings) as server:
        server.wait_ready()
        body = {"max_tokens": 80, "ignore_eos": True}
        expected = server.stream(STORY, **body).wait_end().text
        for _ in range(options.runs):
            all_up(server)
            streams = [Watched(server, **body) for _ in range(options.streams)]
            for stream in streams:
                stream.reply.wait_events(5)
            victim = path
            if active:
                both = (SCHEDULER, "standby0/scheduler0")
                victim = max(both, key=lambda each: server.metric("runtime_requests_running", source=each))
            actor = server.actors()[victim]
            heard: list[float] = []
            watcher = threading.Thread(target=notice, args=(server, victim, actor["generation"], heard))
            watcher.start()
            began = now()
            os.kill(actor["pid"], number)
            for stream in streams:
                stream.reply.wait_end()
            watcher.join()
            noticed += [at - began for at in heard]
            resumed += [stream.after(began) for stream in streams]
            total += len(streams)
            lost += sum(stream.reply.text != expected or not stream.reply.done for stream in streams)
    say(name, f"to notice {words(noticed)}", f"to the next token {words(resumed)}", f"lost {lost} of {total}")


def kill_scheduler(options: argparse.Namespace) -> None:
    deaths(options, "kill -9 scheduler", SCHEDULER, signal.SIGKILL, "supervision.intensity=1000")


def kill_with_standby(options: argparse.Namespace) -> None:
    settings = ("supervision.standby=1", "supervision.intensity=1000")
    deaths(options, "kill -9 scheduler, standby", SCHEDULER, signal.SIGKILL, *settings, active=True)


def kill_detokenizer(options: argparse.Namespace) -> None:
    settings = ("supervision.placement.detokenizer=process", "supervision.intensity=1000")
    deaths(options, "kill -9 detokenizer", "detokenizer", signal.SIGKILL, *settings)


def stop_scheduler(options: argparse.Namespace) -> None:
    settings = ("supervision.hang_timeout_s=2", "supervision.intensity=1000")
    deaths(options, "SIGSTOP scheduler, limit 2 s", SCHEDULER, signal.SIGSTOP, *settings)


def failed_starts(options: argparse.Namespace) -> None:
    def failing(name: str, *settings: str, model: str = "") -> None:
        with serving(options, *settings, model=model) as server:
            code = server.wait_exit()
            say(f"start: {name}", f"exit {code} after {now() - server.started_at:.2f}")

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        began = now()
        command = [sys.executable, "-m", "runtime", "serve", "--port", str(other.getsockname()[1])]
        code = subprocess.run(command, env=ENV, cwd=ROOT, capture_output=True, check=False).returncode
        say("start: busy port", f"exit {code} after {now() - began:.2f}")
    failing("no such model", "model.source=/no/such/folder")
    source = Path(resolve(DEFAULT_SOURCE).folder)
    for name, spoil in SPOILT.items():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "model"
            shutil.copytree(source, copy)
            spoil(copy)
            failing(name, model=str(copy))


SPOILT: dict[str, Callable[[Path], object]] = {
    "truncated weights": lambda folder: os.truncate(folder / "model.safetensors", 100_000_000),
    "corrupt header": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 4096),
    "no tokenizer.json": lambda folder: (folder / "tokenizer.json").unlink(),
}


def ends(options: argparse.Namespace) -> None:
    for name, numbers in (("SIGTERM", (15,)), ("SIGINT twice", (2, 2)), ("kill -9 root", (9,))):
        with serving(options) as server:
            server.wait_ready()
            long = name != "SIGTERM"
            tokens = 4000 if long else 60
            streams = [Watched(server, max_tokens=tokens, ignore_eos=True) for _ in range(options.streams)]
            for stream in streams:
                stream.reply.wait_events(3)
            family = descendants(server.process.pid)
            files = leftovers()
            began = now()
            for at, number in enumerate(numbers):
                server.process.send_signal(number)
                if at < len(numbers) - 1:  # two of a kind at once are one to the kernel
                    next(reply for reply in server.answers() if reply.json["state"] == "draining")
            code = server.wait_exit()
            took = now() - began
            while now() - began < took + 2 and any(alive(pid) for pid in family):
                time.sleep(0.01)
            gone = now() - began
            left = [pid for pid in family if alive(pid)]
            whole = sum(stream.reply.wait_end().done and stream.reply.error is None for stream in streams)
            told = sum(stream.reply.error is not None for stream in streams)
            ended = f"{whole} complete, {told} with an error, {len(streams) - whole - told} cut"
            new = sorted(leftovers() - files)
            say(name, f"exit {code} after {took:.2f}", f"all gone after {gone:.2f}", f"left {left + new}", ended)


def leftovers() -> set[str]:
    """Files that a server could leave: shared memory, sockets and temporary files by its names."""
    found = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}
    return found | {f"/tmp/{name}" for name in os.listdir("/tmp") if "runtime" in name}


def hang_ups(options: argparse.Namespace) -> None:
    """A client hangs up while others' streams run: until the scheduler holds no slot and no page for it.

    Both ends are read from one clock: ours when we close the socket, the scheduler's own when it has let go. So it does
    not matter when we get to hear of it.
    """
    for tokens in (400, 4000):  # a step over long contexts takes longer, and is waited for
        taken: list[float] = []
        with serving(options) as server:
            server.wait_ready()
            body = {"max_tokens": tokens, "ignore_eos": True}
            others = [server.stream(STORY, **body) for _ in range(options.streams)]
            others[0].wait_events(4)
            steps, since = server.metric("runtime_steps_total"), now()
            for hung_up in range(40 * options.runs):
                others = [server.stream(STORY, **body) if other._ended else other for other in others]
                stream = server.stream(STORY, **body)
                stream.wait_events(4)
                time.sleep(random.uniform(0, 0.05))  # wherever a step is then; a token's coming is where one begins
                began = now()
                stream.hang_up()
                server.wait_metric("runtime_aborted_requests_total", hung_up + 1)
                taken.append(server.metric("runtime_last_abort") - began)
            step_s = (now() - since) / (server.metric("runtime_steps_total") - steps)
        who = f"{options.streams} streams of up to {tokens} tokens stay"
        say("client hangs up", f"freed {words(taken)}", who, f"a step takes {step_s:.3f}")


def idle_connections(options: argparse.Namespace) -> None:
    with serving(options) as server:
        server.wait_ready()
        pid = server.process.pid
        before, connections = memory_kb(pid), []
        for _ in range(1000):
            connection = socket.create_connection(("127.0.0.1", server.port))
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            connections.append(connection)
        for connection in connections:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        held, cpu, began = memory_kb(pid) - before, cpu_s(pid), now()
        time.sleep(5)
        share = (cpu_s(pid) - cpu) / (now() - began)
        for connection in connections:
            connection.close()
    say("1,000 idle connections", f"{held / 1000:.1f} kB each", f"CPU {100 * share:.1f} %")


def memory_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SCENARIOS: dict[str, Callable[[argparse.Namespace], None]] = {
    "kill": kill_scheduler,
    "standby": kill_with_standby,
    "detokenizer": kill_detokenizer,
    "stop": stop_scheduler,
    "start": failed_starts,
    "ends": ends,
    "hang-up": hang_ups,
    "idle": idle_connections,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="*", choices=[*SCENARIOS, []], help="default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    options = parser.parse_args()
    for name in options.scenario or SCENARIOS:
        SCENARIOS[name](options)


if __name__ == "__main__":
    main()
