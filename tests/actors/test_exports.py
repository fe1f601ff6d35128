"""What `import actors` offers, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import actors


def test_every_name_of_all_is_there() -> None:
    for name in actors.__all__:
        assert getattr(actors, name) is not None
    assert not hasattr(actors, "annotations")


def test_importing_all_of_it_is_light() -> None:
    code = (
        "import sys, actors\n"
        "for name in actors.__all__: getattr(actors, name)\n"
        "heavy = {'torch', 'numpy', 'zmq', 'quart', 'hypercorn', 'h11', 'trio', 'asyncio', 'transformers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert 'runtime' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_bootstrap_is_stdlib_only_and_says_boot_first() -> None:
    code = (
        "import os, socket, sys, actors._child as child\n"
        "before = set(sys.modules)\n"
        "ours, theirs = socket.socketpair()\n"
        "child.boot(theirs.fileno())\n"
        "from actors._wire import Boot, FrameReader\n"
        "assert FrameReader().feed(ours.recv(100)) == [Boot(os.getpid(), 1)]\n"
        "assert not {'msgspec', 'anyio', 'trio', 'json', 'threading'} & before, before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
