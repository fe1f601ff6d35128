"""A look into a running tree from outside.

Opt in with a child that answers on an abstract Unix socket, to the same user and root only:
`ChildSpec("inspector", "actors.inspect:inspector", ("my-server",), depends_on=())`. Then, from a shell:

    python -m actors.inspect my-server              # the tree as text
    python -m actors.inspect my-server json         # the same as JSON
    python -m actors.inspect my-server stacks PATH  # where the tasks of an actor are
"""

from __future__ import annotations

import os
import socket
import struct
import sys

import anyio
import msgspec

from ._context import Context
from ._errors import ActorError
from ._snapshot import format_tree

_TIMEOUT_S = 10.0


async def inspector(ctx: Context, name: str = "") -> None:
    """A task actor (or an async process actor) that answers inspections; its value is the socket's name."""
    name = name or f"actors-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen(8)
        listener.setblocking(False)
        ctx.started(name)
        async with anyio.create_task_group() as tasks:
            while True:
                await anyio.wait_readable(listener)
                try:
                    client, _ = listener.accept()
                except OSError:
                    continue
                tasks.start_soon(_serve, ctx, client)


async def _serve(ctx: Context, client: socket.socket) -> None:
    with client, anyio.move_on_after(_TIMEOUT_S):
        client.setblocking(False)
        _, uid, _ = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid not in (0, os.geteuid()):
            return
        try:
            await anyio.wait_readable(client)
            answer = await _answer(ctx, client.recv(4096).decode().split())
        except (ActorError, ValueError) as exc:
            answer = f"error: {exc}"
        except OSError:
            return
        data = answer.encode()
        while data:
            await anyio.wait_writable(client)
            try:
                data = data[client.send(data) :]
            except OSError:
                return


async def _answer(ctx: Context, words: list[str]) -> str:
    match words:
        case ["tree"]:
            return format_tree(await ctx.snapshot())
        case ["json"]:
            return msgspec.json.encode(await ctx.snapshot()).decode()
        case ["stacks", path]:
            return str(await ctx.call(path, "$stacks", None, 2.0))
        case _:
            raise ValueError("known are: tree, json, stacks PATH")


def ask(name: str, *words: str) -> str:
    """The answer of the tree whose inspector listens as `name`. Blocks. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_TIMEOUT_S)
        sock.connect("\0" + name)
        sock.sendall(" ".join(words or ("tree",)).encode())
        parts: list[bytes] = []
        while data := sock.recv(65536):
            parts.append(data)
    return b"".join(parts).decode()


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        print(ask(*sys.argv[1:]))
    except OSError as exc:
        sys.exit(f"no answer from {sys.argv[1]!r}: {exc}")


if __name__ == "__main__":
    main()
