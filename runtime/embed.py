"""The runtime inside someone's own program: the whole serving tree in a nursery of theirs, on trio or asyncio.

    async with open_runtime(config) as runtime:
        async for delta in runtime.generate("Once upon a time", max_tokens=32):
            print(delta.text, end="")

No signal handlers, no global state; leaving the block stops everything that it started.
"""

import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from secrets import randbits
from typing import Any

import actors

from .config import Config, load_config, resolved
from .frontend import Frontend
from .listen import bind
from .messages import SamplingParams
from .service import Delta, ModelInfo, Unavailable
from .tree import Tree, open_tree


class Runtime:
    """A running serving tree, seen from the program that embeds it. Made by ``open_runtime``."""

    def __init__(self, tree: Tree, url: str | None) -> None:
        self._tree = tree
        self.url = url  # where it serves HTTP, if it does

    @property
    def config(self) -> Config:
        return self._tree.config

    @property
    def service(self) -> Frontend:
        """The frontend of this program, for ``runtime_http.create_app`` and for token-level work."""
        if self._tree.frontend is None:
            raise Unavailable("The runtime's frontend is being restarted; try again.")
        return self._tree.frontend

    @property
    def info(self) -> ModelInfo:
        info = self.service.info
        if info is None:
            raise Unavailable("The model is still being loaded.")
        return info

    async def snapshot(self) -> actors.Snapshot:
        """The state of every actor."""
        return await self._tree.supervisor.refresh()

    async def generate(
        self, prompt: str | Sequence[int] | Sequence[dict[str, Any]], *, seed: int | None = None, **params: Any
    ) -> AsyncIterator[Delta]:
        """Generate from a text, token ids, or chat messages (``[{"role": ..., "content": ...}]``).

        ``params`` are the fields of ``SamplingParams``. Yields deltas; the last one has ``finish``, and with
        ``finish == "error"`` a sentence in ``error``. Closing the iterator, or cancelling, aborts the request. Raises
        BadRequest or Unavailable.
        """
        service = self.service
        ids = await to_ids(service, prompt)
        sampling = SamplingParams(seed=randbits(63) if seed is None else seed, **params)
        async with service.open(ids, sampling) as generation:
            async for delta in generation:
                yield delta

    async def complete(
        self, prompt: str | Sequence[int] | Sequence[dict[str, Any]], *, seed: int | None = None, **params: Any
    ) -> Delta:
        """The whole answer of ``generate`` as one delta."""
        whole = Delta()
        async for delta in self.generate(prompt, seed=seed, **params):
            whole.merge(delta)
        return whole


async def to_ids(service: Frontend, prompt: str | Sequence[int] | Sequence[dict[str, Any]]) -> list[int]:
    """Token ids of a text, of chat messages, or of what are ids already."""
    if isinstance(prompt, str):
        return await service.tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], dict):
        messages: Any = prompt
        return await service.tokenizer.encode_chat(messages, None, {})
    ids: Any = prompt
    return list(ids)


@asynccontextmanager
async def open_runtime(
    config: Config | None = None,
    *,
    http: bool = False,
    on_event: Callable[[actors.Event], None] | None = None,
) -> AsyncIterator[Runtime]:
    """Run the serving tree until the block is left; entered when everything is up.

    Without ``config`` the embedded default model is served. ``http``: also serve HTTP, on ``config.http``'s address.
    Raises ``actors.ActorStartError`` where something does not start, and OSError where the address is taken; nothing is
    left then. Cancellation stops everything.
    """
    config = load_config() if config is None else resolved(config)
    listener: socket.socket | None = bind(config.http.host, config.http.port) if http else None
    try:
        async with open_tree(config, listener=listener, with_client=True, on_event=on_event) as tree:
            url = None if listener is None else "http://{}:{}".format(*listener.getsockname()[:2])
            yield Runtime(tree, url)
    finally:
        if listener is not None:
            listener.close()
