"""SIGHUP: the configuration is read again. What can change while the server runs does; the rest is named."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec

import actors

from .config import Config, ConfigError, all_keys
from .log import set_level

log = logging.getLogger("runtime.reload")

LIVE = ("log.level", "http.api_keys", "engine.max_queued_requests", "supervision.drain_timeout_s")


class Reloaded(msgspec.Struct, frozen=True):
    """Told to the actors that it concerns, and to their later lives."""

    config: Config


def merged(old: Config, new: Config) -> tuple[Config, list[str], list[str]]:
    """``old`` with what may change taken from ``new``; the keys that did change, and those that can't now."""
    before, after = msgspec.to_builtins(old), msgspec.to_builtins(new)
    changed: list[str] = []
    waiting: list[str] = []
    for key in all_keys():
        path = key.split(".")
        if _at(before, path) != _at(after, path):
            if key in LIVE:
                _at(before, path[:-1])[path[-1]] = _at(after, path)
                changed.append(key)
            else:
                waiting.append(key)
    return msgspec.convert(before, Config), changed, waiting


def _at(data: Any, path: list[str]) -> Any:
    for part in path:
        data = data[part]
    return data


class Reloader:
    """Holds the configuration that is in force, in the root."""

    def __init__(self, config: Config, reread: Callable[[], Config], supervisor: actors.Supervisor) -> None:
        self.config = config
        self._reread, self._supervisor = reread, supervisor
        self._concerned: tuple[str, ...] = ()
        self._reloaded = False

    def reload(self) -> None:
        """Read again and tell. A configuration that can't be used changes nothing, and is logged."""
        try:
            new = self._reread()
        except ConfigError as error:
            log.error("%s can't be used; nothing has changed: %s", error.where, "; ".join(error.problems))
            return
        self.config, changed, waiting = merged(self.config, new)
        set_level(self.config.log)
        log.warning("the configuration was read again; changed: %s", ", ".join(changed) or "nothing")
        if waiting:
            log.warning("these need a restart to change: %s", ", ".join(waiting))
        self._reloaded = True
        for path in self._concerned:
            self._tell(path)

    async def follow(self, path: str) -> None:
        """Keep the actor at ``path`` informed, in this life and the next ones."""
        self._concerned += (path,)
        async for notice in self._supervisor.watch(path):
            if isinstance(notice, actors.Up) and self._reloaded:
                self._tell(path)

    def _tell(self, path: str) -> None:
        self._supervisor.ref(path).cast_nowait(Reloaded(self.config))
