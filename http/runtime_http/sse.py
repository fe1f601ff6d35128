"""Server-sent events."""

from typing import Any

import msgspec

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


def event(value: Any) -> bytes:
    return b"data: %b\n\n" % encode(value)


def error_event(body: bytes) -> bytes:
    return b"data: %b\n\n" % body


def split_template(value: Any, mark: str) -> tuple[bytes, bytes]:
    """An event in two halves, around the place of ``mark``: between them goes a JSON value."""
    head, tail = event(value).split(encode(mark))
    return head, tail
