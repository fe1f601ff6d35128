"""Logging: one line of text or one JSON object an event, to standard error or a file."""

import logging
import sys
from typing import Any

import msgspec

from .config import LogSection


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ``time`` (unix seconds), ``level``, ``logger``, ``message``, and ``error`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        event: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["error"] = self.formatException(record.exc_info)
        return msgspec.json.encode(event).decode()


class TextFormatter(logging.Formatter):
    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")


class _Quiet(logging.StreamHandler[Any]):
    """A full disk or a closed terminal loses lines, and nothing else."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def configure(section: LogSection) -> None:
    """Set up the root logger of a process that is ours. An embedding program has its own logging."""
    stream = open(section.file, "a", encoding="utf-8") if section.file else sys.stderr  # noqa: SIM115  lives with us
    handler = _Quiet(stream)
    handler.setFormatter(JsonFormatter() if section.format == "json" else TextFormatter())
    logging.getLogger().handlers[:] = [handler]
    set_level(section)


def set_level(section: LogSection) -> None:
    """The one thing about it that changes while we run."""
    root = logging.getLogger()
    root.setLevel(section.level.upper())
    for chatty in ("hypercorn.access", "quart.app", "runtime.http.server"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
