"""POST /v1/chat/completions."""

from typing import Any

from quart import Response

from runtime.limits import MAX_LOGPROBS
from runtime.service import Delta
from runtime_http import params as p
from runtime_http.context import Call
from runtime_http.errors import ApiError, invalid, unsupported
from runtime_http.job import Choice, Job, Prompt
from runtime_http.messages import plain_messages
from runtime_http.schema import ChatRequest, convert
from runtime_http.sse import DONE, encode, error_event, event, split_template
from runtime_http.tokens import TokenTexts, chat_logprobs
from runtime_http.usage import usage

MARK = "\ue000text\ue000"


class ChatDialect:
    """How /v1/chat/completions answers."""

    def __init__(self, request: ChatRequest, id: str, created: int, texts: TokenTexts) -> None:
        self.request = request
        self.id = id
        self.created = created
        options = request.stream_options
        self.include_usage = options is not None and options.include_usage
        self.running_usage = self.include_usage and options is not None and options.continuous_usage_stats
        self.logprobs = request.logprobs
        self.texts = texts
        self._halves: dict[int, tuple[bytes, bytes]] = {}

    def opening(self, choice: Choice) -> bytes:
        self._halves[choice.index] = split_template(self._chunk(choice.index, {"content": MARK}, None, None), MARK)
        return event(self._chunk(choice.index, {"role": "assistant", "content": ""}, None, None))

    def delta(self, choice: Choice, delta: Delta) -> bytes:
        plain = not self.logprobs and not self.running_usage
        data = b""
        if plain and delta.text:
            head, tail = self._halves[choice.index]
            data = head + encode(delta.text) + tail
        elif delta.text or (self.logprobs and delta.logprobs):
            logprobs = chat_logprobs(self.texts, delta.logprobs) if self.logprobs else None
            data = self._event(choice, {"content": delta.text}, logprobs, None)
        if delta.finish is not None:
            data += self._event(choice, {}, None, delta.finish)
        return data

    def closing(self, job: Job) -> bytes:
        if not self.include_usage:
            return DONE
        frame = self._frame("chat.completion.chunk")
        return event(frame | {"choices": [], "usage": usage(job.choices, self.request.n)}) + DONE

    def error(self, error: ApiError) -> bytes:
        return error_event(error.body())

    def body(self, job: Job) -> bytes:
        choices = []
        for choice in job.choices:
            delta = choice.whole()
            choices.append(
                {
                    "index": choice.index,
                    "message": {"role": "assistant", "content": delta.text, "refusal": None},
                    "logprobs": chat_logprobs(self.texts, delta.logprobs) if self.logprobs else None,
                    "finish_reason": delta.finish,
                }
            )
        frame = self._frame("chat.completion")
        return encode(frame | {"choices": choices, "usage": usage(job.choices, self.request.n)})

    def _event(self, choice: Choice, delta: dict[str, Any], logprobs: Any, finish: str | None) -> bytes:
        chunk = self._chunk(choice.index, delta, logprobs, finish)
        if self.running_usage:
            chunk["usage"] = usage([choice], 1)
        return event(chunk)

    def _frame(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model,
            "system_fingerprint": None,
        }

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk = self._frame("chat.completion.chunk") | {"choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return chunk


async def chat_completions(call: Call) -> Response:
    body = call.for_model(await call.json())
    request = convert(body, ChatRequest)
    info = call.info
    p.whole_between("n", request.n, 1, p.MAX_N)
    limit_name, wanted = "max_tokens", request.max_tokens
    if request.max_completion_tokens is not None:
        limit_name, wanted = "max_completion_tokens", request.max_completion_tokens
    if wanted is not None:
        p.whole_between(limit_name, wanted, 1)
    check_tools(request)
    p.response_format(request.response_format)
    base = p.sampling_params(request, info, logprobs=top_logprobs(request))
    if request.add_generation_prompt and request.continue_final_message and "add_generation_prompt" in body:
        raise invalid(
            "continue_final_message", "'continue_final_message' and 'add_generation_prompt' cannot both be true."
        )
    messages = plain_messages(request.messages)
    kwargs = template_kwargs(
        request.chat_template_kwargs, request.add_generation_prompt, request.continue_final_message
    )
    tokens = await call.tokenizer.encode_chat(messages, None, kwargs)
    params = p.fit(base, info, len(tokens), wanted=wanted, default=None, param="messages", limit_name=limit_name)
    id = call.new_id("chatcmpl-")
    dialect = ChatDialect(request, id, call.now, call.texts)
    job = Job(call.front, call.exchange, dialect, id=id, stream=request.stream)
    return await job.run(
        [Prompt(tokens)], [params], n=request.n, priority=request.priority, cache_salt=request.cache_salt
    )


def template_kwargs(extra: dict[str, Any], add_generation_prompt: bool, continue_final: bool) -> dict[str, Any]:
    return extra | {
        "add_generation_prompt": add_generation_prompt and not continue_final,
        "continue_final_message": continue_final,
    }


def top_logprobs(request: ChatRequest) -> int:
    """SamplingParams.logprobs for a chat request."""
    if request.top_logprobs is not None:
        p.whole_between("top_logprobs", request.top_logprobs, 0, MAX_LOGPROBS)
        if request.top_logprobs > 0 and not request.logprobs:
            raise invalid("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return (request.top_logprobs or 0) if request.logprobs else -1


def check_tools(request: ChatRequest) -> None:
    """Calls of tools would have to be parsed out of the text, and forced ones to be enforced."""
    if isinstance(request.tool_choice, dict) or request.tool_choice == "required":
        raise unsupported("tool_choice", "Forcing a tool call by 'tool_choice'")
    if request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", f"Invalid value for 'tool_choice': {request.tool_choice!r}.")
    if request.tools and request.tool_choice != "none":
        raise unsupported("tools", "'tools' (with a 'tool_choice' other than 'none')")
