"""POST /v1/completions."""

from typing import Any

from quart import Response

from runtime.limits import MAX_LOGPROBS
from runtime.messages import SamplingParams
from runtime.service import Delta
from runtime_http import params as p
from runtime_http.context import Call
from runtime_http.errors import ApiError, invalid, unsupported
from runtime_http.job import Choice, Job, Prompt
from runtime_http.schema import CompletionRequest, convert, describe
from runtime_http.sse import DONE, encode, error_event, event, split_template
from runtime_http.tokens import CompletionLogprobs, TokenTexts
from runtime_http.usage import usage

DEFAULT_MAX_TOKENS = 16
MARK = "\ue000text\ue000"


class CompletionDialect:
    """How /v1/completions answers."""

    def __init__(self, request: CompletionRequest, id: str, created: int, texts: TokenTexts) -> None:
        self.request = request
        self.frame: dict[str, Any] = {"id": id, "object": "text_completion", "created": created, "model": request.model}
        options = request.stream_options
        self.include_usage = options is not None and options.include_usage
        self.running_usage = self.include_usage and options is not None and options.continuous_usage_stats
        self.scoring = request.max_tokens == 0  # one token is generated all the same, and kept from the client
        self.texts = texts
        self._halves: dict[int, tuple[bytes, bytes]] = {}
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def opening(self, choice: Choice) -> bytes:
        index = choice.index
        self._halves[index] = split_template(self._chunk(index, MARK, None, None), MARK)
        if self.request.logprobs is not None:
            self._logprobs[index] = CompletionLogprobs(self.texts, self.request.logprobs)
        if not self.request.echo or self.request.logprobs is not None:
            return b""
        head, tail = self._halves[index]
        return head + encode(choice.prompt.text) + tail

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        if delta.finish is None and not self._logprobs and not self.running_usage and not self.scoring:
            if not delta.text:
                return b""
            head, tail = self._halves[choice.index]
            return head + encode(delta.text) + tail
        text, logprobs = self._content(choice, delta)
        if not text and not logprobs and delta.finish is None:
            return b""
        chunk = self._chunk(choice.index, text, logprobs, delta.finish and self._finish(delta))
        if self.running_usage:
            chunk["usage"] = self._usage([choice], 1)
        return event(chunk)

    def closing(self, job: Job) -> bytes:
        if not self.include_usage:
            return DONE
        return event(self.frame | {"choices": [], "usage": self._usage(job.choices, self.request.n)}) + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error.body())

    def body(self, job: Job) -> bytes:
        choices = []
        for choice in job.choices:
            if self.request.logprobs is not None:
                self._logprobs[choice.index] = CompletionLogprobs(self.texts, self.request.logprobs)
            delta = choice.whole()
            text, logprobs = self._content(choice, delta)
            if self.request.echo and logprobs is None:
                text = choice.prompt.text + text
            choices.append(self._choice(choice.index, text, logprobs, self._finish(delta)))
        return encode(self.frame | {"choices": choices, "usage": self._usage(job.choices, self.request.n)})

    def _content(self, choice: Choice, delta: Delta) -> tuple[str, dict[str, Any] | None]:
        """Text and logprobs of some news; the prompt's too where it is echoed with them."""
        text, tokens, entries = delta.text, delta.tokens, delta.logprobs
        if self.scoring:
            text, tokens, entries = "", (), ()
        logprobs = self._logprobs.get(choice.index)
        if logprobs is None:
            return text, None
        if self.request.echo and delta.prompt_logprobs:
            text = choice.prompt.text + text
            both = logprobs.part((*choice.prompt.tokens, *tokens[: len(entries)]), (*delta.prompt_logprobs, *entries))
            return text, both
        if not entries:
            return text, None
        return text, logprobs.part(tokens[: len(entries)], entries)

    def _finish(self, delta: Delta) -> str | None:
        return "length" if self.scoring else delta.finish

    def _usage(self, choices: list[Choice], n: int) -> dict[str, Any]:
        return usage(choices, n, completion_tokens=0 if self.scoring else None)

    def _choice(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, index: int, text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        chunk = self.frame | {"choices": [self._choice(index, text, logprobs, finish)]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk


async def completions(call: Call) -> Response:
    body = call.for_model(await call.json())
    request = convert(body, CompletionRequest)
    info = call.info
    p.whole_between("n", request.n, 1, p.MAX_N)
    if request.best_of is not None and request.best_of != request.n:
        raise unsupported("best_of", "'best_of' other than 'n'")
    if request.logprobs is not None:
        p.whole_between("logprobs", request.logprobs, 0, MAX_LOGPROBS)
    if request.max_tokens is not None:
        p.whole_between("max_tokens", request.max_tokens, 0)
    p.response_format(request.response_format)
    scoring = request.max_tokens == 0
    logprobs = -1 if request.logprobs is None else request.logprobs
    base = p.sampling_params(request, info, logprobs=logprobs, prompt_logprobs=logprobs if request.echo else -1)
    prompts = await read_prompts(call, request)
    if len(prompts) * request.n > call.options.max_choices:
        raise invalid("prompt", f"{len(prompts)} prompts with n = {request.n} are too many for one request.")
    params: list[SamplingParams] = [
        p.fit(
            base,
            info,
            len(prompt.tokens),
            wanted=1 if scoring else request.max_tokens,
            default=DEFAULT_MAX_TOKENS,
            param="prompt",
            limit_name="max_tokens",
        )
        for prompt in prompts
    ]
    id = call.new_id("cmpl-")
    dialect = CompletionDialect(request, id, call.now, call.texts)
    job = Job(call.front, call.exchange, dialect, id=id, stream=request.stream)
    return await job.run(prompts, params, n=request.n, priority=request.priority, cache_salt=request.cache_salt)


async def read_prompts(call: Call, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request: one string, some strings, one list of token ids, or some of those."""
    raw = request.prompt
    if isinstance(raw, str):
        parts: list[Any] = [raw]
    elif not raw:
        raise invalid("prompt", "'prompt' is an empty list.")
    elif isinstance(raw[0], int):
        parts = [raw]
    else:
        parts = raw
    kind = type(parts[0])
    prompts = []
    for part in parts:
        if type(part) is not kind or kind not in (str, list):
            raise invalid(
                "prompt",
                "'prompt' must be a string, a list of strings, a list of token ids or a list of lists of token ids; "
                f"it holds {describe(part)}.",
                "invalid_type",
            )
        if isinstance(part, str):
            prompts.append(Prompt(await call.tokenizer.encode(part, request.add_special_tokens), part))
        else:
            tokens = p.known_tokens("prompt", part, call.info)
            prompts.append(Prompt(tokens, await call.tokenizer.decode(tokens) if request.echo else ""))
    return prompts
