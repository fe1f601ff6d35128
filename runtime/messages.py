"""What crosses the data plane, as msgspec structs (msgpack on the wire, the objects themselves inside one process).

Token ids travel as little-endian int32 bytes. Tensors, batches and page tables never cross.
A request is named by ``(origin, id)``: the frontend's mailbox address and a number of its own; ``attempt`` counts
its resubmissions, so that words of an earlier incarnation are told from the present one's and dropped.
"""

from collections.abc import Iterator
from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]
# What kind of error ended a request: the client's frontend words its status code by it.
ErrorCode = Literal["", "queue_full", "deadline", "too_long", "not_finite", "shutdown", "internal"]


def ids(data: bytes) -> list[int]:
    """Token ids as they travel, as numbers."""
    return memoryview(data).cast("i").tolist()


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen and when a request ends. Validated by the frontend; the engine trusts it."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # always set: the frontend draws one where the client gave none
    stop: tuple[str, ...] = ()  # strings; matched by the detokenizer
    include_stop: bool = False  # keep the stop string in the text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int = -1  # top alternatives per output token; -1 = none, 0 = the chosen token's only
    prompt_logprobs: int = -1
    skip_special_tokens: bool = True


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Frontend -> scheduler rank 0. ``output`` is what an earlier attempt had generated already (resumption)."""

    origin: str
    id: int
    attempt: int
    prompt: bytes  # int32[prompt_tokens]
    params: SamplingParams
    output: bytes = b""  # int32[output_tokens so far]
    priority: int = 0  # larger runs earlier
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    budget_s: float | None = None  # time left until the request's deadline
    via: int = 0  # generation of the detokenizer that the frontend counts on: not before the scheduler knows it too


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Frontend -> scheduler rank 0: forget the request; no answer comes."""

    origin: str
    id: int
    attempt: int


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Frontend -> scheduler rank 0: drop cached prefixes that nobody uses."""


ToScheduler = Submit | Abort | Flush


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithms for one position: the chosen (or prompt) token's, and the top alternatives'."""

    token: int
    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Opened(msgspec.Struct, frozen=True, array_like=True):
    """The first word of a request on its way through the detokenizer: everything it needs to be stateless before."""

    origin: str
    id: int
    attempt: int
    prompt_tail: bytes  # int32: the last prompt tokens, for the text's left context
    output: bytes  # int32: tokens of earlier attempts, to be replayed silently
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    prompt_tokens: int
    cached_tokens: int


class TokenRow(msgspec.Struct, frozen=True, array_like=True):
    """What one request got in one step (several tokens only in speculative or multi-step engines)."""

    origin: str
    id: int
    attempt: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    error: str = ""  # with finish == "error": what happened and what to do
    code: ErrorCode = ""
    stop_token: bool = False  # finish == "stop" because of the last token, which is then not part of the text
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class StepTokens(msgspec.Struct, frozen=True, tag="step"):
    """Scheduler rank 0 -> detokenizer: one message per step.

    Most requests of most steps get one token and no other news; these *plain* rows travel as columns, the others as
    ``TokenRow`` in ``news``. A request has at most one row in a message. ``rows`` shows all of them alike.
    """

    opened: tuple[Opened, ...]
    news: tuple[TokenRow, ...]
    origins: tuple[str, ...] = ()
    plain: bytes = b""  # int64[4, plain rows]: index into origins, id, attempt, token
    source: str = ""  # with ``opened``: the scheduler's path

    def plain_rows(self) -> Iterator[tuple[str, int, int, int]]:
        """(origin, id, attempt, token) of each plain row."""
        cells = memoryview(self.plain).cast("q").tolist()
        n = len(cells) // 4
        origins = [self.origins[index] for index in cells[:n]]
        return zip(origins, cells[n : 2 * n], cells[2 * n : 3 * n], cells[3 * n :], strict=True)

    @property
    def rows(self) -> tuple[TokenRow, ...]:
        plain = [TokenRow(origin, id, attempt, (token,)) for origin, id, attempt, token in self.plain_rows()]
        return (*plain, *self.news)


class TextRow(msgspec.Struct, frozen=True, array_like=True):
    """One request's news for its frontend.

    ``start`` and ``offset`` say how many output tokens and characters of output text came before these.
    """

    id: int
    attempt: int
    start: int
    tokens: tuple[int, ...]
    offset: int
    text: str
    finish: FinishReason | None = None
    error: str = ""
    code: ErrorCode = ""
    stop_match: str | int | None = None  # the stop string or stop token id that ended it
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()


class StepText(msgspec.Struct, frozen=True, tag="text"):
    """Detokenizer -> frontend: one message per step and frontend."""

    rows: tuple[TextRow, ...]
