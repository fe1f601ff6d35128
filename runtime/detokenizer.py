"""The detokenizer actor: token ids from the scheduler become text for the frontends, a message per step and frontend.

It holds one ``TextStream`` per live request, and nothing that could not be made again: ``Opened`` carries what a
request needs to begin, the output of earlier attempts included, which is replayed silently.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import anyio

import actors

from .config import Config
from .detokenize import TextStream
from .faults import Door, open_door
from .handshakes import DetokenizerUp, FrontendUp
from .mailbox import DataPlane, Outbox
from .messages import FinishReason, Opened, StepText, StepTokens, TextRow, TokenRow, ids
from .peers import MODEL, Peers, value, wait_up
from .restarts import sweep
from .sources import ModelFiles
from .tokenizer import Tokenizer
from .tokenizing import open_tokenizer


class _Live:
    """A request on its way through: its text so far lives in ``stream``."""

    __slots__ = ("attempt", "opened", "source", "start", "stream", "told")

    def __init__(self, opened: Opened, source: str, tokenizer: Tokenizer) -> None:
        self.source = source
        self.opened, self.attempt, self.told = opened, opened.attempt, False
        replay = ids(opened.output)
        self.stream = TextStream(
            tokenizer,
            prompt_tail=ids(opened.prompt_tail),
            stop=opened.stop,
            include_stop=opened.include_stop,
            skip_special_tokens=opened.skip_special_tokens,
        )
        self.stream.push(replay)
        self.start = len(replay)


class Detokenization:
    """Steps in, texts out: the actor without its IO."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._live: dict[tuple[str, int], _Live] = {}

    def step(self, message: StepTokens) -> dict[str, StepText]:
        """The news of one step by the frontend that waits for them."""
        for opened in message.opened:
            known = self._live.get((opened.origin, opened.id))
            if known is None or known.attempt < opened.attempt:  # else a dead scheduler's word, come late
                self._live[opened.origin, opened.id] = _Live(opened, message.source, self._tokenizer)
        texts: dict[str, list[TextRow]] = {}
        for origin, number, attempt, token in message.plain_rows():
            live = self._live.get((origin, number))
            if live is not None and live.attempt == attempt:
                texts.setdefault(origin, []).append(self._plain(live, number, token))
                if live.stream.matched is not None:
                    del self._live[origin, number]
        for row in message.news:
            live = self._live.get((row.origin, row.id))
            if live is None or live.attempt != row.attempt:
                # Ended by a stop string that the scheduler has not heard of yet.
                continue
            if (text := self._advance(live, row)) is not None:
                texts.setdefault(row.origin, []).append(text)
        return {origin: StepText(tuple(rows)) for origin, rows in texts.items()}

    @staticmethod
    def _plain(live: _Live, number: int, token: int) -> TextRow:
        """One token and nothing else: the way of almost every row."""
        stream, start, offset = live.stream, live.start, live.stream.offset
        live.start += 1
        text = stream.push((token,))
        finish: FinishReason | None = None if stream.matched is None else "stop"
        told, live.told = live.told, True
        return TextRow(
            number,
            live.attempt,
            start,
            (token,),
            offset,
            text,
            finish,
            stop_match=stream.matched,
            prompt_tokens=0 if told else live.opened.prompt_tokens,
            cached_tokens=0 if told else live.opened.cached_tokens,
        )

    def _advance(self, live: _Live, row: TokenRow) -> TextRow | None:
        stream, start, offset = live.stream, live.start, live.stream.offset
        shown = row.tokens[:-1] if row.stop_token else row.tokens
        text = stream.push(shown)
        finish = row.finish
        match: str | int | None = None
        if stream.matched is not None:
            finish, match = "stop", stream.matched
        elif finish is not None and finish != "abort":
            text += stream.finish()
            match = row.tokens[-1] if row.stop_token else None
        live.start += len(row.tokens)
        if finish is not None:
            del self._live[row.origin, row.id]
        if finish == "abort":
            return None
        told, live.told = live.told, True
        return TextRow(
            id=row.id,
            attempt=row.attempt,
            start=start,
            tokens=row.tokens,
            offset=offset,
            text=text,
            finish=finish,
            error=row.error,
            code=row.code,
            stop_match=match,
            prompt_tokens=0 if told else live.opened.prompt_tokens,
            cached_tokens=0 if told else live.opened.cached_tokens,
            logprobs=row.logprobs,
            prompt_logprobs=row.prompt_logprobs,
        )

    def forget_origin(self, origin: str) -> None:
        """Drop the requests of a frontend that is gone."""
        self._live = {key: live for key, live in self._live.items() if key[0] != origin}

    def forget_source(self, source: str) -> None:
        """Drop the requests of a scheduler that is gone; they will be opened anew."""
        self._live = {key: live for key, live in self._live.items() if live.source != source}


async def detokenizer(ctx: actors.Context, config: Config, peers: Peers, plane: DataPlane | None = None) -> None:
    """The actor, as a task (``plane``: its process's) or as a process of its own. Started value: ``DetokenizerUp``."""
    sweep(ctx)
    async with open_door(ctx, config) as door:
        files = await wait_up(ctx, MODEL, ModelFiles, "wait for the model files", config.supervision.say_s)
        ctx.progress("load the tokenizer")
        tokenizer = await anyio.to_thread.run_sync(partial(open_tokenizer, files, config), abandon_on_cancel=True)
        await door.passed()
        await _serve(ctx, config, peers, plane or DataPlane(), Detokenization(tokenizer), door)


async def _serve(
    ctx: actors.Context, config: Config, peers: Peers, plane: DataPlane, texts: Detokenization, door: Door
) -> None:
    outboxes: dict[str, Outbox] = {}

    async def watch_scheduler(path: str) -> None:
        async for notice in ctx.watch(path):
            if isinstance(notice, actors.Down):
                texts.forget_source(path)

    async def watch_frontend(path: str) -> None:
        origin = ""
        async for notice in ctx.watch(path):
            if isinstance(notice, actors.Up):
                origin = value(notice.value, FrontendUp).origin
            elif origin:
                texts.forget_origin(origin)
                if (outbox := outboxes.pop(origin, None)) is not None:
                    outbox.close()

    def hang_up() -> None:
        for outbox in outboxes.values():
            outbox.close()

    with plane.bind(StepTokens, local=False) as mailbox, ExitStack() as closing:
        closing.callback(hang_up)  # the process may live on
        async with anyio.create_task_group() as tasks:
            for path in peers.engines:
                tasks.start_soon(watch_scheduler, path)
            for path in peers.frontends:
                tasks.start_soon(watch_frontend, path)
            ctx.started(DetokenizerUp(mailbox.address))
            while True:
                ctx.beat()
                messages: Sequence[StepTokens] = ()
                with anyio.move_on_after(config.supervision.beat_s):
                    messages = await mailbox.receive()
                await door.passed()
                for message in messages:
                    for origin, text in texts.step(message).items():
                        if origin not in outboxes:
                            outboxes[origin] = plane.connect(origin)
                        outboxes[origin].send_nowait(text)
