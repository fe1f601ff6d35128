"""The model actor: it knows where the model's files are, and has them fetched and converted if need be.

What is cached is found at once. Anything else is done by a process of its own, so that the front keeps answering, and
so that a stop leaves no download behind.
"""

from functools import partial

import anyio

import actors

from .config import Config
from .sources import cached, resolve


async def model(ctx: actors.Context, config: Config) -> None:
    """The actor. Started value: ``ModelFiles``."""
    ctx.progress("find the model")
    source = config.model.source
    files = await anyio.to_thread.run_sync(partial(cached, source), abandon_on_cancel=True)
    if files is not None:
        ctx.started(files)
        await anyio.sleep_forever()
    spec = actors.ChildSpec(
        "fetch",
        "runtime.fetch:fetch",
        args=(source,),
        where="process",
        backend="main-thread",
        restart="temporary",
        start_timeout=config.supervision.start_timeout_max_s,
        start_timeout_max=config.supervision.start_timeout_max_s,
        title="runtime: fetch",
    )
    async with ctx.open_supervisor() as supervisor:
        await supervisor.start(spec)
    files = await anyio.to_thread.run_sync(partial(cached, source), abandon_on_cancel=True)
    if files is None:
        raise RuntimeError(f"{source} was fetched, but is not in the cache: was it removed meanwhile?")
    ctx.started(files)
    await anyio.sleep_forever()


def fetch(ctx: actors.ThreadContext, source: str) -> None:
    """The process that fetches. It is started when the files are in the cache, and ends then."""
    resolve(source, lambda phase, done, total: ctx.progress(phase, done, total))
    ctx.started()
