"""The tokenizer actor of a frontend, and the client's end of it.

Encoding is a pure function, so a call that meets the actor's death is simply made again once it is back.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import anyio

import actors

from .config import Config
from .faults import Door, open_door
from .peers import MODEL, wait_up
from .restarts import rules, sweep
from .service import BadRequest, Unavailable
from .sources import ModelFiles
from .tokenizer import TemplateError, Tokenizer

# Texts up to here are handled on the event loop: about 1 ms of work.
INLINE_CHARS = 2_000
THREADS = 2  # tokenizing releases the GIL, but the machine has better things to do with its cores
TRIES = 3

log = logging.getLogger("runtime.tokenizer")


def open_tokenizer(files: ModelFiles, config: Config) -> Tokenizer:
    return Tokenizer(files.tokenizer, config.model.chat_template, files.folder)


async def tokenizer(ctx: actors.Context, config: Config) -> None:
    """The actor. Calls: ``encode``, ``encode_chat`` (ids, or a sentence that says why not), ``decode`` (text)."""
    sweep(ctx)
    async with open_door(ctx, config) as door:
        await _serve(ctx, config, door)


async def _serve(ctx: actors.Context, config: Config, door: Door) -> None:
    files = await wait_up(ctx, MODEL, ModelFiles, "wait for the model files", config.supervision.say_s)
    ctx.progress("load the tokenizer")
    words = await anyio.to_thread.run_sync(partial(open_tokenizer, files, config), abandon_on_cancel=True)
    await door.passed()
    threads = anyio.CapacityLimiter(THREADS)

    async def work(size: int, function: Any) -> Any:
        await door.passed()
        if size <= INLINE_CHARS:
            return function()
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=threads)

    async def encode(payload: tuple[str, bool], info: actors.CallInfo) -> list[int]:
        text, special = payload
        ids: list[int] = await work(len(text), partial(words.encode, text, special))
        return ids

    async def decode(ids: list[int], info: actors.CallInfo) -> str:
        text: str = await work(len(ids), partial(words.decode, ids))
        return text

    async def encode_chat(payload: tuple[list[Any], list[Any] | None, dict[str, Any]], info: actors.CallInfo) -> Any:
        messages, tools, kwargs = payload

        def run() -> list[int] | str:
            try:
                return words.encode_chat(messages, tools, **kwargs)
            except TemplateError as error:
                return str(error)

        return await work(sum(len(str(message)) for message in messages), run)

    ctx.on("encode", encode)
    ctx.on("decode", decode)
    ctx.on("encode_chat", encode_chat)
    ctx.started(words)
    await anyio.sleep_forever()


def tokenizer_spec(config: Config) -> actors.ChildSpec:
    return actors.ChildSpec("tokenizer", tokenizer, args=(config,), **rules(config.supervision))


class TokenizerProxy:
    """See ``service.TokenizerClient``."""

    def __init__(self, ctx: actors.Context, path: str, hang_timeout_s: float) -> None:
        self.path = path
        self.up = False
        self.restart: Callable[[], Awaitable[Any]] | None = None  # what to do about an actor that does not answer
        self._patience_s = hang_timeout_s or None
        self._generation = 0
        self._ctx = ctx
        self._back = anyio.Event()
        self._words: Tokenizer | None = None

    def heard(self, notice: actors.Up | actors.Down) -> None:
        """News of the actor at ``path``."""
        self.up = isinstance(notice, actors.Up)
        if isinstance(notice, actors.Up):
            self._words, self._generation = notice.value, notice.generation
            self._back.set()
        else:
            self._lost()

    def _lost(self) -> None:
        """Calls wait from now on. Those that wait already do so for the same event."""
        self.up = False
        if self._back.is_set():
            self._back = anyio.Event()

    async def _call(self, method: str, payload: Any) -> Any:
        for _ in range(TRIES):
            await self._back.wait()
            asked = self._generation
            try:
                return await self._ctx.call(self.path, method, payload, self._patience_s)
            except (actors.ActorDied, actors.NoSuchActor):
                if self._generation in (0, asked):  # else the next one is up already
                    self._lost()
            except TimeoutError:
                await self._replace(asked)
        raise Unavailable("The tokenizer died while it worked on this text; try again later.")

    async def _replace(self, asked: int) -> None:
        """The actor that was asked is stuck: have it started anew, once for all who wait for it."""
        if asked == self._generation and self.restart is not None:
            self._generation = 0
            self._lost()
            log.warning("%s gave no answer for %g s; it is started anew", self.path, self._patience_s)
            with suppress(actors.ActorError):
                await self.restart()

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        ids: list[int] = await self._call("encode", (text, add_special))
        return ids

    async def decode(self, tokens: Sequence[int]) -> str:
        text: str = await self._call("decode", list(tokens))
        return text

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> list[int]:
        ids: list[int] | str = await self._call("encode_chat", (messages, tools, dict(kwargs)))
        if isinstance(ids, str):
            raise BadRequest(f"The model's chat template refuses this conversation: {ids}", "messages")
        return ids

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        return [] if self._words is None else self._words.token_bytes(tokens)
