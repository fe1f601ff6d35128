"""The state of one front: who is being served, whether it drains, what it counted."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import anyio

from runtime.service import Service
from runtime_http.errors import ApiError
from runtime_http.options import Options
from runtime_http.stats import Stats
from runtime_http.tokens import TokenTexts

if TYPE_CHECKING:
    from runtime_http.exchange import Exchange
    from runtime_http.job import Job

log = logging.getLogger("runtime.http")


class Front:
    """Shared by all requests of one app."""

    def __init__(self, service: Service, options: Options, endpoints: Iterable[str]) -> None:
        self.service = service
        self.options = options
        self.stats = Stats(endpoints)
        self.texts = TokenTexts(service.tokenizer)
        self.exchanges: set[Exchange] = set()
        self.jobs: set[Job] = set()
        self.draining = False
        self._quiet = anyio.Event()

    def job_done(self, job: "Job") -> None:
        self.jobs.discard(job)
        if not self.jobs:
            self._quiet.set()

    def begin_drain(self) -> None:
        """New requests are refused from now on; running ones go on."""
        self.draining = True

    async def wait_quiet(self) -> None:
        """Until no request is being answered."""
        while self.jobs:
            self._quiet = anyio.Event()
            await self._quiet.wait()

    def cut(self, error: ApiError) -> None:
        """End what still runs: streams get an error event, the others an error answer."""
        for job in tuple(self.jobs):
            job.fail(error)

    def drop_connections(self) -> None:
        """Drop the connections of all requests that have not ended, whatever their clients do."""
        for exchange in tuple(self.exchanges):
            if exchange.link is not None:
                exchange.link.drop()
