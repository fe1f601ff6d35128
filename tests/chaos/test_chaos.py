"""Seeded chaos over a real server with the real model under mixed load.

Every client gets the very text of an undisturbed run, or, where its own frontend died, a clear end; afterwards nothing
is held, the tree has its full shape, and the processes hold no more than before.
"""

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from chaos.load import Load
from chaos.rounds import SCHEDULER, Round, drawn, every_round, play, provoke, settled
from serve.servekit import Server, descendants

# Hangs are found soon, and no number of deaths is too many. Logs go to a disk that is full from the first line.
SETTINGS = (
    "supervision.debug_faults=true",
    "supervision.hang_timeout_s=3",
    "supervision.start_timeout_s=20",
    "supervision.intensity=10000",
    "log.file=/dev/full",
    "engine.step_tokens=256",
)
PLACED = {
    "tasks": (),
    "detokenizer process": ("supervision.placement.detokenizer=process",),
    "processes": ("supervision.placement.detokenizer=process", "supervision.placement.frontend=process"),
}


@pytest.fixture(scope="module", params=PLACED)
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """A server under watch, and the answers that it gives when nobody disturbs it."""
    if request.param != "detokenizer process" and not request.config.getoption("chaos_rounds"):
        pytest.skip("only with --chaos-rounds")
    settings = (*SETTINGS, *PLACED[request.param])
    with Server(tmp_path_factory.mktemp("chaos"), settings=settings) as server:
        load = Load(server.wait_ready())
        load.learn()
        yield load


def test_rounds(load: Load, pytestconfig: pytest.Config) -> None:
    seed = pytestconfig.getoption("chaos_seed")
    count = pytestconfig.getoption("chaos_rounds") or 6
    play(load, Round(SCHEDULER, "kill", "idle"))  # what is made once is made now
    before = settled(load.server)
    for number, chosen in enumerate(drawn(load.server, seed, count)):
        began = time.monotonic()
        try:
            lost = play(load, chosen)
        except BaseException as error:
            error.add_note(f"seed {seed}, round {number}: {chosen}")
            raise
        print(f"round {number}: {chosen}: {lost} lost, {time.monotonic() - began:.1f} s")
    after = settled(load.server)
    for what in ("processes", "threads", "fds"):
        assert after[what] <= before[what] + 2, (before, after)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_fault_while_draining(tmp_path: Path, load: Load, fault: str) -> None:
    with Server(tmp_path, settings=(*SETTINGS, "supervision.drain_timeout_s=40")) as server:
        mine = Load(server.wait_ready(), load.expected, load.stop)
        answers = mine.start()
        first = answers[0].stream
        assert first is not None
        first.wait_events(3)
        family = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        for reply in server.answers():
            if reply.json["state"] == "draining":
                break
        provoke(server, SCHEDULER, fault)
        mine.check(answers, may_fail=False)
        assert server.wait_exit() == 0
        server.wait_gone(family, 2)


def test_soak(load: Load, pytestconfig: pytest.Config) -> None:
    """Round after round for minutes: what the root and the whole tree hold does not grow by more than 2 %."""
    minutes = pytestconfig.getoption("soak_minutes")
    if not minutes:
        pytest.skip("only with --soak-minutes")
    rounds, draw = every_round(load.server), random.Random(pytestconfig.getoption("chaos_seed"))
    seen: list[dict[str, int]] = []
    lost = 0
    began = time.monotonic()
    while time.monotonic() < began + 60 * minutes:
        chosen = draw.choice(rounds)
        try:
            lost += play(load, chosen)
        except BaseException as error:
            error.add_note(f"after {len(seen)} rounds: {chosen}")
            raise
        seen.append(settled(load.server))
        print(f"{time.monotonic() - began:6.0f} s, {chosen}: {seen[-1]}", flush=True)
    quarter = max(len(seen) // 4, 1)  # the first quarter warms up
    for what in ("processes", "threads", "fds", "files", "root_kb", "tree_kb"):
        early = median(each[what] for each in seen[quarter : 2 * quarter] or seen)
        late = median(each[what] for each in seen[-quarter:])
        print(f"soak: {len(seen)} rounds, {lost} lost, {what}: {early} -> {late}")
        assert late <= early * 1.02 + 1, f"{what} grew from {early} to {late}"
