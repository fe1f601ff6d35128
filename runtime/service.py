"""What a frontend offers to the HTTP layer and to embedders, and the words it uses. No IO here."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from .config import Config
from .messages import ErrorCode, FinishReason, SamplingParams, TokenLogprobs


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that is served. Known once the tree is ready."""

    name: str
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created: int  # unix seconds at which it became ready
    max_prompt_tokens: int = 0  # what the KV pool can hold for one request (<= context_tokens)
    dtype: str = ""
    quantization: str = ""
    device: str = ""
    kv_tokens: int = 0
    memory_bytes: dict[str, int] = {}

    @property
    def numbers(self) -> str:
        """What is computed with, such as "bfloat16, int8 weights"."""
        return self.dtype if self.quantization in ("", "none") else f"{self.dtype}, {self.quantization} weights"


class Delta(msgspec.Struct):
    """News of one generation: all that came since the last one. The last one has ``finish``."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish: FinishReason | None = None
    error: str = ""  # with finish == "error": a sentence for the client
    code: ErrorCode = ""
    stop_match: str | int | None = None

    def merge(self, later: "Delta") -> None:
        """Take in what came after."""
        self.text += later.text
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.finish, self.error, self.code, self.stop_match = later.finish, later.error, later.code, later.stop_match


class ServiceError(Exception):
    """A request that can't be taken. The message is a sentence for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(ServiceError):
    """The request itself is at fault. ``param`` names the field, ``code`` is OpenAI's word for the fault, if any."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class Unavailable(ServiceError):
    """Not now: starting, draining, or too many requests wait. Try again after ``retry_after_s`` seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(Unavailable):
    """As many requests as allowed wait already."""


class Sink(Protocol):
    """A consumer that is called as news arrive, instead of waiting for them."""

    def push(self, delta: Delta) -> None:
        """Called on the event loop, in the task that serves all streams: must neither block nor raise."""
        ...


class Generation(Protocol):
    """One running request.

    With a sink the deltas go there, else they are what iterating gives; a reader that is behind finds them merged.
    Leaving the context aborts what still runs.
    """

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    @property
    def completion_tokens(self) -> int: ...

    def abort(self) -> None:
        """Forget the request, now and without waiting: nothing is pushed any more. After its end: no effect."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self: ...

    async def __anext__(self) -> Delta: ...


class TokenizerClient(Protocol):
    """Text to ids and back. Long texts are handled in a worker thread; cancelling drops the result."""

    async def encode(self, text: str, add_special: bool = True) -> list[int]: ...

    async def decode(self, tokens: Sequence[int]) -> str: ...

    async def encode_chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, kwargs: Mapping[str, Any]
    ) -> list[int]:
        """The ids of a rendered conversation.

        ``kwargs`` go to the model's template; two are understood here: ``add_generation_prompt`` (default true) and
        ``continue_final_message`` (the prompt ends inside the last message).

        Raises BadRequest where the template refuses the messages, or where the model has none.
        """
        ...

    def token_bytes(self, tokens: Sequence[int]) -> list[bytes]:
        """The bytes that each token stands for (a special token: its name). Cheap, never blocks."""
        ...


class Service(Protocol):
    """A frontend's door. All methods belong to its event loop."""

    config: Config
    tokenizer: TokenizerClient

    @property
    def info(self) -> ModelInfo | None: ...

    def ready(self) -> bool: ...

    def recovering(self) -> bool:
        """It was ready and will be again: something is being restarted. Requests are taken, and wait for it."""
        ...

    async def status(self) -> dict[str, Any]:
        """``{"state": "starting" | "ready" | "degraded" | "draining", "actors": [...]}``"""
        ...

    async def metrics(self) -> bytes:
        """The Prometheus text format, version 0.0.4."""
        ...

    async def flush_cache(self) -> None:
        """Drop the cached prefixes that no running request uses."""
        ...

    def open(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
        sink: Sink | None = None,
    ) -> Generation:
        """Start a generation. Raises BadRequest, Unavailable or QueueFull; never blocks."""
        ...
