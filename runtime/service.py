"""What the serving tree offers to those who put a front before it: the HTTP layer and embedders.

Only the shapes live here, so that the HTTP layer imports no engine and a front can be tested against anything that
keeps these promises.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from runtime.messages import FinishReason, SamplingParams, TokenLogprobs


class ModelInfo(msgspec.Struct, frozen=True):
    """What clients may know of the served model."""

    name: str
    context_tokens: int  # prompt + output
    vocab_size: int  # ids below this are known to the tokenizer
    eos_token_ids: tuple[int, ...] = ()
    created: int = 0  # unix seconds


class Delta(msgspec.Struct, frozen=True):
    """What one request got since the last time. Joined ``text`` is the answer, without the stop string or token."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # in the first delta; the first position has none
    finish: FinishReason | None = None
    error: str = ""  # with finish == "error": what happened and what to do
    stop_match: str | int | None = None  # the stop string or token id that ended it


class ServiceError(Exception):
    """A request that could not be taken."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(ServiceError):
    """The request itself is at fault; ``param`` names the part."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Unavailable(ServiceError):
    """Not ready, or stopping."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    """As many requests wait as may wait."""


class Sink(Protocol):
    """Called on the event loop, by the task that reads the engine's answers, once per step and stream."""

    def push(self, delta: Delta) -> None:
        """Take the news. Never blocks, never raises; nothing comes after a delta with ``finish``."""
        ...


class Generation(Protocol):
    """One running request.

    With a sink the deltas go there, else they are what iterating gives; a reader that is behind finds them merged.
    Leaving the context aborts what still runs.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def abort(self) -> None:
        """Forget the request, now and without waiting: nothing is pushed any more. After its end: no effect."""
        ...

    async def __aenter__(self) -> "Generation": ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> "Generation": ...

    async def __anext__(self) -> Delta: ...


class TokenizerClient(Protocol):
    """Text to tokens and back, safe under concurrent use. Long inputs are worked on in a thread."""

    async def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    async def decode(self, tokens: Sequence[int]) -> str: ...

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> list[int]:
        """Render the chat template and encode the result.

        ``kwargs`` go to the template, but for two: ``add_generation_prompt`` (default true) and
        ``continue_final_message`` (the prompt ends inside the last message).

        Raises BadRequest where the template refuses the messages, or where the model has none.
        """
        ...

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for (special tokens: their name); for logprobs. Cheap, never blocks."""
        ...


class Service(Protocol):
    """A serving tree as its fronts see it, on trio or asyncio."""

    config: Any  # runtime.config.Config
    tokenizer: TokenizerClient

    @property
    def info(self) -> ModelInfo | None:
        """None until the model is loaded."""
        ...

    def ready(self) -> bool: ...

    async def status(self) -> dict[str, Any]:
        """For /ready: ``state`` (starting, ready, degraded, draining) and ``actors`` ({path, state, phase, …} each)."""
        ...

    async def metrics(self) -> bytes:
        """The Prometheus text page."""
        ...

    def open(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        sink: Sink | None = None,
    ) -> Generation:
        """Queue a request. Raises Unavailable, QueueFull or BadRequest; later faults are deltas with finish "error"."""
        ...
