"""The tokenizer actor of a frontend, and the client's end of it.

Encoding is a pure function, so a call that meets the actor's death is simply made again once it is back.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio

import actors

from .config import Config
from .peers import MODEL, wait_up
from .service import BadRequest, Unavailable
from .sources import ModelFiles
from .tokenizer import TemplateError, Tokenizer

# Texts up to here are handled on the event loop: about 1 ms of work, less than the way to a thread and back costs others.
INLINE_CHARS = 2_000
THREADS = 2  # tokenizing releases the GIL, but the machine has better things to do with its cores
TRIES = 3


async def tokenizer(ctx: actors.Context, config: Config) -> None:
    """The actor. Calls: ``encode``, ``encode_chat`` (ids, or a sentence that says why not), ``decode`` (text)."""
    ctx.progress("wait for the model files")
    files = await wait_up(ctx, MODEL, ModelFiles)
    ctx.progress("load the tokenizer")
    words = await anyio.to_thread.run_sync(partial(Tokenizer, files.folder), abandon_on_cancel=True)
    threads = anyio.CapacityLimiter(THREADS)

    async def work(size: int, function: Any) -> Any:
        if size <= INLINE_CHARS:
            return function()
        return await anyio.to_thread.run_sync(function, abandon_on_cancel=True, limiter=threads)

    async def encode(payload: tuple[str, bool], info: actors.CallInfo) -> list[int]:
        text, special = payload
        ids: list[int] = await work(len(text), partial(words.encode, text, add_special=special))
        return ids

    async def decode(payload: tuple[list[int], bool], info: actors.CallInfo) -> str:
        ids, skip = payload
        text: str = await work(len(ids), partial(words.decode, ids, skip_special_tokens=skip))
        return text

    async def encode_chat(payload: dict[str, Any], info: actors.CallInfo) -> list[int] | str:
        def run() -> list[int] | str:
            try:
                text = words.render_chat(**payload)
            except TemplateError as error:
                return str(error)
            return words.encode(text, add_special=False)

        ids: list[int] | str = await work(sum(len(str(m)) for m in payload["messages"]), run)
        return ids

    ctx.on("encode", encode)
    ctx.on("decode", decode)
    ctx.on("encode_chat", encode_chat)
    ctx.started()
    await anyio.sleep_forever()


def tokenizer_spec(config: Config) -> actors.ChildSpec:
    supervision = config.supervision
    return actors.ChildSpec(
        "tokenizer",
        tokenizer,
        args=(config,),
        start_timeout=supervision.start_timeout_max_s,  # it waits for the model's files, which have a limit of their own
        start_timeout_max=supervision.start_timeout_max_s,
        stop_timeout=supervision.stop_timeout_s,
    )


class TokenizerProxy:
    """See ``service.TokenizerClient``."""

    def __init__(self, ctx: actors.Context, path: str) -> None:
        self.path = path
        self.up = False
        self._ctx = ctx
        self._back = anyio.Event()

    def heard(self, up: bool) -> None:
        """News of the actor at ``path``."""
        self.up = up
        if up:
            self._back.set()
        else:
            self._back = anyio.Event()

    async def _call(self, method: str, payload: Any) -> Any:
        for _ in range(TRIES):
            await self._back.wait()
            try:
                return await self._ctx.call(self.path, method, payload)
            except (actors.ActorDied, actors.NoSuchActor):
                self.heard(False)
        raise Unavailable("The tokenizer died while it worked on this text; try again later.")

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = await self._call("encode", (text, add_special_tokens))
        return ids

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = await self._call("decode", (list(ids), skip_special_tokens))
        return text

    async def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        ids: list[int] | str = await self._call(
            "encode_chat",
            {
                "messages": list(messages),
                "tools": None if tools is None else list(tools),
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                **(template_kwargs or {}),
            },
        )
        if isinstance(ids, str):
            raise BadRequest(f"The model's chat template refuses this conversation: {ids}", "messages")
        return ids
