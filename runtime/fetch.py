"""The model actor: it knows where the model's files are, and has them fetched and converted if need be.

What is here is found at once. Anything else is done by a process of its own, so that the front keeps answering, and so
that a stop leaves no download behind.
"""

from functools import partial

import anyio

import actors

from .config import Config, ModelSection
from .faults import open_door
from .peers import value
from .sources import ModelFiles, Progress, cached, resolve


async def model(ctx: actors.Context, config: Config) -> None:
    """The actor. Started value: ``ModelFiles``."""
    async with open_door(ctx, config) as door:
        ctx.progress("find the model")
        await door.passed()
        section = config.model
        find = partial(cached, section.source, tokenizer=section.tokenizer, weights=not section.dummy_weights)
        files = await anyio.to_thread.run_sync(find, abandon_on_cancel=True)
        if files is None:
            files = await _fetched(ctx, config)
        ctx.started(files)
        await anyio.sleep_forever()


async def _fetched(ctx: actors.Context, config: Config) -> ModelFiles:
    limit_s = config.supervision.start_timeout_max_s
    spec = actors.ChildSpec(
        "fetch",
        "runtime.fetch:fetch",
        args=(config.model,),
        where="process",
        backend="main-thread",
        restart="temporary",
        start_timeout=limit_s,
        start_timeout_max=limit_s,
        title="runtime: fetch",
    )
    async with ctx.open_supervisor() as supervisor:
        return value((await supervisor.start(spec)).value, ModelFiles)


def fetch(ctx: actors.ThreadContext, section: ModelSection) -> None:
    """The process that fetches. It is started when the files are in the cache, and ends then."""
    ctx.started(find(section, ctx.progress))


def find(section: ModelSection, progress: Progress = lambda phase, done, total: None) -> ModelFiles:
    """The model's files, fetched and converted first if need be. Blocks; raises SourceError."""
    return resolve(section.source, progress, tokenizer=section.tokenizer, weights=not section.dummy_weights)
