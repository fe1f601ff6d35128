"""The model actor: it knows where the model's files are, and has them fetched and converted if need be.

What is here is found at once. Anything else is done by a process of its own, so that the front keeps answering, and so
that a stop leaves no download behind.
"""

from functools import partial

import anyio

import actors

from .config import Config, ModelSection
from .handshakes import ModelUp
from .sources import Progress, is_here, resolve


async def model(ctx: actors.Context, config: Config) -> None:
    """The actor. Started value: ``ModelUp``."""
    ctx.progress("find the model")
    if not await anyio.to_thread.run_sync(is_here, config.model.source, abandon_on_cancel=True):
        await _fetched(ctx, config)
    find = partial(_find, config.model, lambda phase, done, total: None)
    ctx.started(await anyio.to_thread.run_sync(find, abandon_on_cancel=True))
    await anyio.sleep_forever()


async def _fetched(ctx: actors.Context, config: Config) -> None:
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
        await supervisor.start(spec)


def fetch(ctx: actors.ThreadContext, section: ModelSection) -> None:
    """The process that fetches. It is started when the files are in the cache, and ends then."""
    ctx.started(_find(section, ctx.progress))


def _find(section: ModelSection, progress: Progress) -> ModelUp:
    files = resolve(section.source, progress, tokenizer=section.tokenizer, weights=not section.dummy_weights)
    return ModelUp(str(files.folder), str(files.tokenizer))


def find(config: Config) -> ModelUp:
    """The model's files, for a program without a tree. Blocks; raises SourceError."""
    return _find(config.model, lambda phase, done, total: None)
