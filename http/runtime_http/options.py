"""The front's own settings, resolved once from the configuration."""

from typing import Any

import msgspec


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How the front treats its clients. Times in seconds; 0 for ``request_timeout_s`` means none."""

    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("*",)  # () turns CORS off
    root_path: str = ""  # prefix under which a proxy shows us, like "/llm"
    max_body_bytes: int = 16 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    max_choices: int = 1024  # prompts x n of one request
    keep_alive_s: float = 75.0  # also the limit for sending a request's head
    body_idle_s: float = 30.0  # without a byte of the body
    ping_s: float = 15.0  # a stream that has nothing to say says so, for the proxies on the way
    linger_s: float = 10.0  # how long a refused body is still read, so that the client gets to see the refusal
    send_stall_s: float = 120.0  # how long a client may take nothing of what is ready for it
    request_timeout_s: float = 0.0
    drain_s: float = 30.0
    max_behind_bytes: int = 64 * 1024  # unsent text of one stream; beyond it the request is aborted
    backlog: int = 2048
    debug_faults: bool = False  # offer the debug door, for tests

    @classmethod
    def of(cls, config: Any) -> "Options":
        """The options that a runtime configuration asks for."""
        http = config.http
        return cls(
            api_keys=tuple(http.api_keys),
            cors_origins=tuple(getattr(http, "cors_origins", ("*",))),
            root_path=getattr(http, "root_path", "").rstrip("/"),
            max_body_bytes=http.max_body_bytes,
            keep_alive_s=http.keep_alive_s,
            request_timeout_s=http.request_timeout_s,
            drain_s=config.supervision.drain_timeout_s,
            debug_faults=getattr(config.supervision, "debug_faults", False),
        )
