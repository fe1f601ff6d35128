"""The first code of a process actor: `python _child.py FD`. The stdlib only, and of that only what is quick to import.

It says "boot" before anything else, reads its setup (JSON), watches the control channel for its parent's death from a
thread of its own, and then hands over to `_child_async` or `_thread_context`.
"""

import os
import sys


def boot(fd: int) -> None:
    """The frame `Boot(pid, protocol=1)`, written by hand: msgpack array of "boot", uint32, 1."""
    body = b"\x93\xa4boot\xce" + os.getpid().to_bytes(4, "big") + b"\x01"
    os.write(fd, len(body).to_bytes(4, "big") + body)


def read_frame(fd: int) -> bytes:
    """The body of the next frame; it waits for all of it."""
    return _read(fd, int.from_bytes(_read(fd, 4), "big"))


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            os._exit(0)  # the parent is gone before it has said what to do
        data += more
    return data


def watch_parent(fd: int, grace_s: float) -> None:
    """In a thread: when the parent's end is closed, the loop (which sees it too) has the grace, then all ends at once.

    Programs that this actor started, its OS session, don't outlive it.
    """
    import select
    import time

    poll = select.poll()
    poll.register(fd, select.POLLRDHUP | select.POLLHUP)
    while not poll.poll():
        pass
    time.sleep(grace_s)
    end_session(os.getpid())
    os._exit(1)


def end_session(session: int) -> None:
    """SIGKILL for every process of this OS session but its leader; twice, for what was forked meanwhile."""
    for _ in range(2):
        found = False
        for pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]:
            try:
                if pid != session and os.getsid(pid) == session:
                    found = True
                    os.kill(pid, 9)
            except (ProcessLookupError, PermissionError):
                continue
        if not found:
            return


def main() -> None:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # grandchildren must not hold it
    boot(fd)
    import _thread
    import atexit
    import json

    setup = json.loads(read_frame(fd))
    _thread.start_new_thread(watch_parent, (fd, setup["grace_s"]))
    atexit.register(end_session, os.getpid())  # registered first, so that it runs last
    import faulthandler
    import signal

    faulthandler.enable()
    faulthandler.register(signal.SIGRTMIN + 1, file=setup["stacks"], all_threads=True)
    os.set_inheritable(setup["stacks"], False)
    if setup["cpus"] is not None:
        os.sched_setaffinity(0, setup["cpus"])
    if setup["nice"] is not None:
        os.nice(setup["nice"])
    sys.path[:] = setup["path"]
    sys.argv = [setup["title"]]
    if setup["backend"] == "main-thread":
        from actors._thread_context import run
    else:
        from actors._child_async import run
    run(fd, setup)


if __name__ == "__main__":
    main()
