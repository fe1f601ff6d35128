"""A look into a running tree from outside.

Opt in with a child that answers on an abstract Unix socket, to the same user and root only:
`ChildSpec("inspector", "actors.inspect:inspector", ("my-server",), depends_on=())`. Then, from a shell:

    python -m actors.inspect my-server              # the tree as text
    python -m actors.inspect my-server json         # the same as JSON
    python -m actors.inspect my-server stacks PATH  # where the tasks of an actor are
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys

import anyio
import msgspec
from anyio.abc import SocketAttribute, SocketStream

from ._context import Context
from ._door import STACKS
from ._errors import ActorError
from ._snapshot import format_tree

_TIMEOUT_S = 10.0


async def inspector(ctx: Context, name: str = "") -> None:
    """A task actor (or an async process actor) that answers inspections; its value is the socket's name."""
    name = name or f"actors-{os.getpid()}"

    async def serve(client: SocketStream) -> None:
        async with client:
            with anyio.move_on_after(_TIMEOUT_S), contextlib.suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                peer = client.extra(SocketAttribute.raw_socket)
                _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid in (0, os.geteuid()):
                    words = (await client.receive()).decode(errors="replace").split()
                    await client.send((await _answer(ctx, words)).encode())

    async with await anyio.create_unix_listener("\0" + name) as listener:
        ctx.started(name)
        await listener.serve(serve)


async def _answer(ctx: Context, words: list[str]) -> str:
    try:
        match words:
            case ["tree"]:
                return format_tree(await ctx.snapshot())
            case ["json"]:
                return msgspec.json.encode(await ctx.snapshot()).decode()
            case ["stacks", path]:
                return str(await ctx.call(path, STACKS, None, 2.0))
            case _:
                return "error: known are: tree, json, stacks PATH"
    except ActorError as exc:
        return f"error: {exc}"


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
